"""`plait launch` as a user meets it: real processes, real signals, and machines that a stand-in for ssh runs here. `make test` has a run
that ends well, one that fails, one that is stopped and one over ssh; the rest is for `make proof`."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

REDUCE = """
import os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} sum {total.item():.0f} args {sys.argv[1:]}\\n", end="")
dist.destroy_process_group()
"""

ONE_RAISES = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.barrier()  # a rank that is still connecting when another ends has gloo print so before anything else

def step():
    raise ValueError("a gradient went missing")

if dist.get_rank() == dist.get_world_size() - 1:
    step()
dist.all_reduce(torch.ones(1))
"""

INITIALIZES_AGAIN = """
import faulthandler, torch, plait
faulthandler.dump_traceback_later(60, exit=True)
config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
for turn in range(4):
    engine = plait.initialize(torch.nn.Linear(8, 1), config)
    total = torch.full((1,), float(engine.rank + turn))
    torch.distributed.all_reduce(total)
    engine.close()
    print(f"turn {turn} sum {total.item():.0f} group {torch.distributed.is_initialized()}\\n", end="", flush=True)
"""

AGAIN = [f"turn {turn} sum {1 + 2 * turn} group False" for turn in range(4) for _ in range(2)]

ENDS_IN_TIME = """
import os, signal, sys, time
received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
print(f"ready {os.getpid()}\\n", end="", flush=True)
while not received:
    time.sleep(0.02)
time.sleep(1)  # a second signal would arrive in this second
print(f"rank {os.environ['RANK']} saved after {received}\\n", end="", flush=True)
if "disk-full" in sys.argv and os.environ["RANK"] == "1":
    raise OSError("No space left on device")
"""

NEVER_ENDS = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
print(f"ready {os.getpid()}\\n", end="", flush=True)
while True:
    time.sleep(0.1)
"""

FAILS_ONCE = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    raise ValueError("only the first time")
dist.barrier()
print(f"rank {dist.get_rank()} done in attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n", end="")
dist.destroy_process_group()
"""

SPAWNS = """
import multiprocessing, pickle, sys
import beside
class Mine: pass
def double(x): return 2 * x
if __name__ == '__main__':
    assert sys.modules['__main__'].Mine is Mine and type(pickle.loads(pickle.dumps(Mine()))) is Mine
    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [beside.value]), __file__)
"""

FAKE_SSH = """#!/bin/sh
# Runs here what ssh would run there, and says where that was.
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
echo "ssh to $1" >&2
[ "$1" = unreachable.invalid ] && exit 255
exec sh -c "$2"
"""


class Launched:
    """A folder with a stand-in for ssh, and scripts that are launched in it."""

    def __init__(self, folder):
        self.folder, self.running = folder, list[subprocess.Popen[str]]()

    def script(self, text):
        (self.folder / "script.py").write_text(text)
        return "script.py"

    def start(self, *arguments, text=""):
        """Launch a script with this text, behind the options that come first."""
        script = [self.script(text)] if text else []
        at = next((n for n, word in enumerate(arguments) if word == "--"), len(arguments))
        words = [*arguments[:at], *script, *arguments[at + 1 :]]
        process = subprocess.Popen(
            [sys.executable, "-m", "plait", "launch", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def run(self, *arguments, text=""):
        process = self.start(*arguments, text=text)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def waiting(self, *arguments, text, ranks = 2):  # fmt: skip
        """A script that waits for a signal, and the ids of its processes."""
        process = self.start(*arguments, text=text)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(ranks)]
        return process, [int(re.search(r"ready (\d+)", line)[1]) for line in lines]  # type: ignore[index]

    def close(self):
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def launched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = Launched(tmp_path)
    yield made
    made.close()


def _gone(pids, seconds=0):
    """Whether all processes end within this time; those that do not are killed."""
    deadline = time.monotonic() + seconds
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if _alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def _free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ONE, TWO = ("--nproc-per-node", "1"), ("--nproc-per-node", "2")


class TestRanks:
    def test_they_work_together(self, launched):
        done = launched.run(*TWO, "--", "--lr", "1", text=REDUCE)
        assert done.returncode == 0, done.stderr
        lines = [f"rank {rank} of 2 sum 2 args ['--lr', '1']" for rank in range(2)]
        assert sorted(done.stdout.splitlines()) == lines and done.stderr == ""

    @pytest.mark.proof
    def test_the_same_script_under_torchrun(self, launched):
        done = subprocess.run(
            [*TORCHRUN, launched.script(REDUCE)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2

    @pytest.mark.proof
    def test_an_engine_after_one_that_was_closed(self, launched):
        """Its group does not find the addresses of the first engine's in the launch's store."""
        done = launched.run(*TWO, text=INITIALIZES_AGAIN)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == AGAIN

    @pytest.mark.proof
    @pytest.mark.parametrize("torchrun", [False, True])
    def test_the_same_where_another_launcher_or_rank_0_has_the_store(self, launched, torchrun):
        script = launched.script(INITIALIZES_AGAIN)
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        there |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with (launched.folder / "output").open("w+") as output:
            codes = []
            if torchrun:
                commands = [(TORCHRUN, dict[str, str]())]
            else:
                ranks = [{**there, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
                commands = [([sys.executable], environment) for environment in ranks]
            running = [
                subprocess.Popen(
                    [*command, script],
                    env={**os.environ, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for command, environment in commands
            ]
            codes = [process.wait(120) for process in running]
            output.seek(0)
            text = output.read()
        assert set(codes) == {0}, text
        assert sorted(line for line in text.splitlines() if line.startswith("turn")) == AGAIN

    @pytest.mark.proof
    def test_a_module_in_the_current_folder(self, launched):
        package = launched.folder / "mine"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text("word = 'part'")
        (package / "__main__.py").write_text(
            "import sys\nfrom .part import word\nprint(__name__, __package__, word, sys.argv[1:])"
        )
        done = launched.run(*ONE, "-m", "mine", "-x")
        assert (done.returncode, done.stdout) == (0, "__main__ mine part ['-x']\n"), done.stderr

    @pytest.mark.proof
    def test_a_script_finds_what_python_gives_it(self, launched):
        """Its own folder on the path, itself as `__main__` (for pickle and for processes it spawns), no trace of the launcher."""
        folder = launched.folder / "sub"
        folder.mkdir()
        (folder / "beside.py").write_text("value = 3")
        (folder / "job.py").write_text(SPAWNS)
        done = launched.run(*ONE, "sub/job.py")
        assert (done.returncode, done.stdout) == (0, "[6] sub/job.py\n"), done.stderr

    @pytest.mark.proof
    @pytest.mark.parametrize("given", [None, "7"])
    def test_cores_are_shared_unless_the_user_says(self, launched, monkeypatch, given):
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        from plait.cluster.topology import cpu_count

        text = "import os; print(os.environ['OMP_NUM_THREADS'] + '\\n', end='')"
        done = launched.run(*TWO, text=text)
        assert done.stdout.split() == [given or str(max(1, cpu_count() // 2))] * 2


class TestFailures:
    def test_the_cause_comes_first_and_the_others_are_stopped(self, launched):
        done = launched.run(*TWO, text=ONE_RAISES)
        assert done.returncode == 1
        assert re.match(
            r"plait: rank 1 \(node \S+, process \d+\) failed with exit code 1\. Its traceback:\nTraceback",
            done.stderr,
        )
        head, _, tail = done.stderr.partition("ValueError: a gradient went missing\n")
        assert "in step" in head
        assert "worker.py" not in head
        assert re.fullmatch(
            r"plait: rank 0 was stopped\n|plait: rank 0 .* failed too, with exit code 1: RuntimeError: .*\n",
            tail,
        )

    @pytest.mark.proof
    def test_it_is_told_while_another_rank_refuses_to_end(self, launched):
        """The 30 seconds that torchrun waits for the others do not delay the message."""
        early = "import os\nif os.environ['RANK'] == '0':\n    raise KeyError('early')\n"
        process = launched.start(*TWO, text=early + NEVER_ENDS)
        assert process.stderr is not None
        assert "rank 0" in process.stderr.readline()
        assert process.poll() is None, "rank 1 is still waited for"

    @pytest.mark.proof
    def test_exit_codes_are_propagated(self, launched):
        text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)"
        done = launched.run(*TWO, text=text)
        assert done.returncode == 7
        assert re.match(r"plait: rank 1 \(node \S+\) ended with exit code 7", done.stderr)
        assert done.stderr.endswith("plait: rank 0 was stopped\n")

    @pytest.mark.proof
    def test_a_crash_is_the_cause_before_errors_of_other_ranks(self, launched):
        raises = 'raise ValueError("a gradient went missing")'
        crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        done = launched.run(*TWO, text=ONE_RAISES.replace(raises, crash))
        assert done.returncode == 139
        first = next(line for line in done.stderr.splitlines() if line.startswith("plait:"))
        assert "rank 1" in first and "SIGSEGV" in first
        assert "Segmentation fault" in done.stderr

    @pytest.mark.proof
    def test_a_users_mistake_is_one_sentence_with_its_exit_code(self, launched):
        text = (
            "from plait.errors import CheckpointError\nraise CheckpointError('step 40: incomplete')"
        )
        done = launched.run(*TWO, text=text)
        assert (done.returncode, done.stderr) == (4, "plait: step 40: incomplete\n")

    @pytest.mark.proof
    @pytest.mark.parametrize("name", ["nothing.here", "json.nothing"])
    def test_a_module_that_is_not_there(self, launched, name):
        done = launched.run(*TWO, "-m", name)
        assert done.returncode == 2
        assert (
            done.stderr
            == f"plait: -m {name}: not a module that Python can run from here; check its name and the current folder\n"
        )

    @pytest.mark.proof
    def test_an_error_tracker_still_hears_of_it(self, launched):
        text = "import sys\nsys.excepthook = lambda kind, error, trace: open('heard', 'w').write(kind.__name__)\n1 / 0"
        done = launched.run(*ONE, text=text)
        assert (launched.folder / "heard").read_text() == "ZeroDivisionError"
        assert done.stderr.count("Traceback") == 1

    @pytest.mark.proof
    def test_restart(self, launched):
        done = launched.run(*TWO, "--max-restarts", "1", text=FAILS_ONCE)
        assert done.returncode == 0, done.stderr
        lines = [f"rank {rank} done in attempt 1" for rank in (0, 1)]
        assert sorted(done.stdout.splitlines()) == lines
        assert "ValueError: only the first time" in done.stderr
        assert "starting the ranks again" in done.stderr


class TestSignals:
    @pytest.mark.proof
    def test_a_signal_that_one_rank_gets_is_no_failure(self, launched):
        """A scheduler may send it to one; the ranks agree to end, one sooner than the others, and nothing starts again."""
        text = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(0.7)
    print("rank 0 has saved", flush=True)
sys.exit(138)
"""
        done = launched.run(*TWO, "--max-restarts", "2", text=text)
        assert (done.returncode, done.stdout) == (138, "rank 0 has saved\n")
        said = "plait: the ranks have ended after SIGUSR1, which one of them received\n"
        assert done.stderr == said

    @pytest.mark.proof
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ranks_get_it_once_and_end_well(self, launched, number):
        process, _ = launched.waiting(*TWO, text=ENDS_IN_TIME)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        lines = [f"rank {rank} saved after ['{number.name}']" for rank in range(2)]
        assert sorted(out.splitlines()) == lines
        assert (
            err
            == f"plait: {number.name}: the ranks have up to 300 s to end; Ctrl-C or another signal stops them at once\n"
        )

    def test_a_failure_while_ending_is_not_a_clean_end(self, launched):
        process, _ = launched.waiting(*TWO, "--", "disk-full", text=ENDS_IN_TIME)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "OSError: No space left on device" in err

    @pytest.mark.proof
    def test_a_plain_script_ends_without_tracebacks(self, launched):
        text = (
            "import os, time\nprint(f'ready {os.getpid()}\\n', end='', flush=True)\ntime.sleep(100)"
        )
        process, _ = launched.waiting(*TWO, text=text)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err

    @pytest.mark.proof
    def test_ranks_that_outlive_their_grace_are_killed(self, launched):
        process, pids = launched.waiting(*TWO, "--grace", "1", text=NEVER_ENDS)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 137
        assert "rank 0, 1 did not end within 1 s and is killed" in err
        assert _gone(pids)

    @pytest.mark.proof
    def test_a_second_signal_stops_them_at_once(self, launched):
        process, pids = launched.waiting(*TWO, text=NEVER_ENDS)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130 and _gone(pids)

    @pytest.mark.proof
    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
    def test_ranks_do_not_outlive_a_killed_launcher(self, launched):
        process, pids = launched.waiting(*TWO, text=NEVER_ENDS)
        process.kill()
        process.wait(10)
        assert _gone(pids, seconds=10)

    @pytest.mark.proof
    def test_a_closed_terminal_does_not_end_what_nohup_protects(self, launched):
        script = launched.script(ENDS_IN_TIME)
        process = subprocess.Popen(
            ["nohup", sys.executable, "-m", "plait", "launch", *ONE, script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None and "ready" in process.stdout.readline()
            process.send_signal(signal.SIGHUP)
            time.sleep(1)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
            assert "rank 0 saved after ['SIGTERM']" in out
        finally:
            process.kill()


class TestMachines:
    def _together(self, launched, text, *commands):
        """What launchers of one process each print on standard output and standard error, all of which end well."""
        processes = [launched.start(*ONE, *command, text=text) for command in commands]
        said = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), said
        return [out for out, _ in said], [err for _, err in said]

    @pytest.mark.proof
    def test_numbered_by_hand(self, launched):
        meet = ("--nnodes", "2", "--master-addr", "localhost", "--master-port", _free_port())
        ranks = ((*meet, "--node-rank", str(rank)) for rank in (1, 0))
        outs, _ = self._together(launched, REDUCE, *ranks)
        assert outs == [f"rank {rank} of 2 sum 2 args []\n" for rank in (1, 0)]

    @pytest.mark.proof
    def test_at_an_endpoint(self, launched):
        meet = ("--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{_free_port()}")
        outs, _ = self._together(launched, REDUCE, meet, meet)
        assert sorted(outs) == [f"rank {rank} of 2 sum 2 args []\n" for rank in (0, 1)]

    @pytest.mark.proof
    def test_all_start_again_when_a_rank_of_one_failed(self, launched):
        failing = FAILS_ONCE.replace(
            'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"', 'not os.path.exists("failed")'
        ).replace("    raise", '    open("failed", "w").close()\n    raise')
        meet = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{_free_port()}")
        again = (*meet, "--max-restarts", "3")
        outs, errors = self._together(launched, failing, again, again)
        assert sorted(out.split(" in ")[0] for out in outs) == ["rank 0 done", "rank 1 done"]
        assert sum("ValueError: only the first time" in err for err in errors) == 1

    @pytest.mark.proof
    def test_the_others_do_not_come(self, launched):
        meet = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{_free_port()}", "--timeout", "2")
        done = launched.run(*ONE, *meet, text=REDUCE)
        assert done.returncode == 1
        assert "2 machines did not join the rendezvous at localhost:" in done.stderr
        assert "Traceback" not in done.stderr


class TestSsh:
    @pytest.fixture
    def hosts(self, launched):
        return self._hosts(launched, "far slots=2  # played by this machine")

    def _hosts(self, launched, other):
        (launched.folder / "hosts").write_text(f"{socket.gethostname()} slots=1\n{other}\n")
        return ("-H", "hosts", "--master-port", _free_port())

    def test_every_machine_of_a_hostfile(self, launched, hosts):
        done = launched.run(*hosts, "--", "it's mine", text=REDUCE)
        assert done.returncode == 0, done.stderr
        expected = ["[far] rank 1 of 3 sum 3", "[far] rank 2 of 3 sum 3", "rank 0 of 3 sum 3"]
        assert sorted(line.split(" args")[0] for line in done.stdout.splitlines()) == expected
        assert """args ["it's mine"]""" in done.stdout
        assert done.stderr.count("ssh to far") == 1

    @pytest.mark.proof
    def test_a_failure_there_stops_all_and_is_told_first(self, launched, hosts):
        done = launched.run(*hosts, *ONE, text=ONE_RAISES)
        assert done.returncode == 1
        first = next(line for line in done.stderr.splitlines() if "plait: " in line)
        assert re.match(r"\[far\] plait: rank 1 .* failed with exit code 1", first)
        assert "[far] ValueError: a gradient went missing" in done.stderr

    @pytest.mark.proof
    def test_a_signal_reaches_every_machine_once(self, launched, hosts):
        process, pids = launched.waiting(*hosts, *ONE, text=ENDS_IN_TIME)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "rank 0 saved after ['SIGINT']" in out
        assert "[far] rank 1 saved after ['SIGINT']" in out
        assert _gone(pids)

    @pytest.mark.proof
    def test_machines_end_themselves_when_the_launcher_is_gone(self, launched, hosts):
        process, pids = launched.waiting(*hosts, *ONE, text=ENDS_IN_TIME)
        process.kill()
        process.wait(10)
        assert _gone(pids, seconds=30)

    @pytest.mark.proof
    def test_a_machine_that_cannot_be_reached(self, launched):
        done = launched.run(*self._hosts(launched, "unreachable.invalid slots=1"), text=REDUCE)
        assert done.returncode == 255
        assert (
            "node unreachable.invalid: no connection, or it was lost (try `ssh unreachable.invalid true`)"
            in done.stderr
        )
