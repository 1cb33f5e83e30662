"""`plait launch` with real processes, signals, and a stand-in for ssh.

`make test` has a run that succeeds, one that fails, one that is stopped and one over ssh. The
others are for `make proof`.
"""

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
rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
print(f"{rank} sum {total.item():.0f} args {sys.argv[1:]}\\n", end="")
dist.destroy_process_group()
"""

ONE_RAISES = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.barrier()  # gloo prints an error first if a rank ends while another is connecting

def step():
    raise ValueError("a gradient went missing")

if dist.get_rank() == dist.get_world_size() - 1:
    step()
dist.all_reduce(torch.ones(1))
"""

INITIALIZES_AGAIN = """
import faulthandler, torch, plait
faulthandler.dump_traceback_later(60, exit=True)
config = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
}
for turn in range(4):
    engine = plait.initialize(torch.nn.Linear(8, 1), config)
    total = torch.full((1,), float(engine.rank + turn))
    torch.distributed.all_reduce(total)
    engine.close()
    group = torch.distributed.is_initialized()
    print(f"turn {turn} sum {total.item():.0f} group {group}\\n", end="", flush=True)
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
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {dist.get_rank()} done in attempt {attempt}\\n", end="")
dist.destroy_process_group()
"""

SPAWNS = """
import multiprocessing, pickle, sys
import neighbour
class Mine: pass
def double(x): return 2 * x
if __name__ == '__main__':
    assert sys.modules['__main__'].Mine is Mine
    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print(pool.map(double, [neighbour.value]), __file__)
"""

FAKE_SSH = """#!/bin/sh
# Runs a command on this machine, and prints the name of the other.
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
echo "ssh to $1" >&2
[ "$1" = unreachable.invalid ] && exit 255
exec sh -c "$2"
"""


class Launcher:
    """Starts `plait launch` in a folder with a stand-in for ssh."""

    def __init__(self, folder):
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def script(self, text):
        (self.folder / "script.py").write_text(text)
        return "script.py"

    def start(self, *arguments, text=""):
        """Launch a script. Its arguments follow "--", and others are options of the launcher."""
        options = list(arguments)
        script_arguments = []
        if "--" in options:
            end = options.index("--")
            script_arguments = options[end + 1 :]
            options = options[:end]
        script = [self.script(text)] if text else []
        process = subprocess.Popen(
            [sys.executable, "-m", "plait", "launch", *options, *script, *script_arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments, text="", code=0):
        """Launch a script, check its exit code, and return its output and error."""
        process = self.start(*arguments, text=text)
        output, error = process.communicate(timeout=120)
        assert process.returncode == code, error
        return output, error

    def start_waiting(self, *arguments, text, ranks=2):
        """Launch a script that waits for a signal, and return the ids of its ranks."""
        process = self.start(*arguments, text=text)
        assert process.stdout is not None
        # A rank of another machine prints "[far] ready 123".
        lines = [process.stdout.readline() for _ in range(ranks)]
        return process, [int(line.rpartition("ready ")[2]) for line in lines]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def all_end(pids, seconds=0):
    """Return whether all processes end within a time, and kill those that do not."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    remaining = [pid for pid in pids if is_alive(pid)]
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    return not remaining


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ONE = ("--nproc-per-node", "1")
TWO = ("--nproc-per-node", "2")


class TestRanks:
    def test_ranks_reduce_together(self, launcher):
        output, error = launcher.run(*TWO, "--", "--lr", "1", text=REDUCE)
        lines = [f"rank {rank} of 2 sum 2 args ['--lr', '1']" for rank in range(2)]
        assert sorted(output.splitlines()) == lines and error == ""

    @pytest.mark.proof
    def test_script_under_torchrun(self, launcher):
        command = [*TORCHRUN, launcher.script(REDUCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2

    @pytest.mark.proof
    def test_engine_after_one_that_was_closed(self, launcher):
        """The addresses of the first engine are still in the store of the launch."""
        output, _ = launcher.run(*TWO, text=INITIALIZES_AGAIN)
        assert sorted(output.splitlines()) == AGAIN

    @pytest.mark.proof
    @pytest.mark.parametrize("torchrun", [False, True])
    def test_closed_engine_with_another_store(self, launcher, torchrun):
        """The store is that of torchrun, or of rank 0 if each rank is started by hand."""
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        commands: list[tuple[list[str], dict[str, str]]] = [(TORCHRUN, {})]
        if not torchrun:
            ranks = [{**variables, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
            commands = [([sys.executable], rank) for rank in ranks]

        script = launcher.script(INITIALIZES_AGAIN)
        with (launcher.folder / "output").open("w+") as output:
            processes = [
                subprocess.Popen(
                    [*command, script],
                    env={**os.environ, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for command, environment in commands
            ]
            codes = [process.wait(120) for process in processes]
            output.seek(0)
            text = output.read()
        assert set(codes) == {0}, text
        assert sorted(line for line in text.splitlines() if line.startswith("turn")) == AGAIN

    @pytest.mark.proof
    def test_module_in_the_current_folder(self, launcher):
        package = launcher.folder / "mine"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text("word = 'part'")
        text = (
            "import sys\nfrom .part import word\nprint(__name__, __package__, word, sys.argv[1:])"
        )
        (package / "__main__.py").write_text(text)
        output, _ = launcher.run(*ONE, "-m", "mine", "-x")
        assert output == "__main__ mine part ['-x']\n"

    @pytest.mark.proof
    def test_script_runs_as_python_runs_it(self, launcher):
        """The script's folder is on the path, and it is `__main__` for pickle and processes."""
        folder = launcher.folder / "sub"
        folder.mkdir()
        (folder / "neighbour.py").write_text("value = 3")
        (folder / "job.py").write_text(SPAWNS)
        output, _ = launcher.run(*ONE, "sub/job.py")
        assert output == "[6] sub/job.py\n"

    @pytest.mark.proof
    @pytest.mark.parametrize("threads", [None, "7"])
    def test_ranks_share_the_cores(self, launcher, monkeypatch, threads):
        from plait.cluster.topology import cpu_count

        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        text = "import os; print(os.environ['OMP_NUM_THREADS'] + '\\n', end='')"
        output, _ = launcher.run(*TWO, text=text)
        expected = threads or str(max(1, cpu_count() // 2))
        assert output.split() == [expected, expected]


class TestFailures:
    def test_cause_comes_first_and_other_ranks_are_stopped(self, launcher):
        _, error = launcher.run(*TWO, text=ONE_RAISES, code=1)
        cause = r"plait: rank 1 \(node \S+, process \d+\) failed with exit code 1\. "
        assert re.match(cause + r"Its traceback:\nTraceback", error)
        head, _, tail = error.partition("ValueError: a gradient went missing\n")
        assert "in step" in head
        assert "worker.py" not in head
        failed_too = r"plait: rank 0 .* failed too, with exit code 1: RuntimeError: .*\n"
        assert re.fullmatch(rf"plait: rank 0 was stopped\n|{failed_too}", tail)

    @pytest.mark.proof
    def test_cause_is_printed_before_other_ranks_end(self, launcher):
        """The 30 seconds that torchrun waits for the others do not delay the message."""
        early = "import os\nif os.environ['RANK'] == '0':\n    raise KeyError('early')\n"
        process = launcher.start(*TWO, text=early + NEVER_ENDS)
        assert process.stderr is not None
        assert "rank 0" in process.stderr.readline()
        assert process.poll() is None, "the launcher still waits for rank 1"

    @pytest.mark.proof
    def test_exit_codes_are_propagated(self, launcher):
        text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)"
        _, error = launcher.run(*TWO, text=text, code=7)
        assert re.match(r"plait: rank 1 \(node \S+\) ended with exit code 7", error)
        assert error.endswith("plait: rank 0 was stopped\n")

    @pytest.mark.proof
    def test_crash_is_the_cause_of_errors_of_other_ranks(self, launcher):
        raises = 'raise ValueError("a gradient went missing")'
        crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        _, error = launcher.run(*TWO, text=ONE_RAISES.replace(raises, crash), code=139)
        first = next(line for line in error.splitlines() if line.startswith("plait:"))
        assert "rank 1" in first and "SIGSEGV" in first
        assert "Segmentation fault" in error

    @pytest.mark.proof
    def test_error_of_plait_is_a_sentence_with_its_exit_code(self, launcher):
        raises = "raise CheckpointError('step 40: incomplete')"
        text = f"from plait.errors import CheckpointError\n{raises}"
        _, error = launcher.run(*TWO, text=text, code=4)
        assert error == "plait: step 40: incomplete\n"

    @pytest.mark.proof
    @pytest.mark.parametrize("name", ["nothing.here", "json.nothing"])
    def test_missing_module_is_refused(self, launcher, name):
        _, error = launcher.run(*TWO, "-m", name, code=2)
        rule = "not a module that Python can run from here; check its name and the current folder"
        assert error == f"plait: -m {name}: {rule}\n"

    @pytest.mark.proof
    def test_excepthook_of_the_script_is_called(self, launcher):
        hook = "lambda kind, error, trace: open('heard', 'w').write(kind.__name__)"
        text = f"import sys\nsys.excepthook = {hook}\n1 / 0"
        _, error = launcher.run(*ONE, text=text, code=1)
        assert (launcher.folder / "heard").read_text() == "ZeroDivisionError"
        assert error.count("Traceback") == 1

    @pytest.mark.proof
    def test_restart(self, launcher):
        output, error = launcher.run(*TWO, "--max-restarts", "1", text=FAILS_ONCE)
        lines = [f"rank {rank} done in attempt 1" for rank in (0, 1)]
        assert sorted(output.splitlines()) == lines
        assert "ValueError: only the first time" in error
        assert "starting the ranks again" in error


SAVES_AFTER_A_SIGNAL = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(0.7)
    print("rank 0 has saved", flush=True)
sys.exit(138)
"""


class TestSignals:
    @pytest.mark.proof
    def test_signal_to_one_rank_is_no_failure(self, launcher):
        """A scheduler may send it to one rank. All ranks agree to end, and none is restarted."""
        restarts = ("--max-restarts", "2")
        output, error = launcher.run(*TWO, *restarts, text=SAVES_AFTER_A_SIGNAL, code=138)
        assert output == "rank 0 has saved\n"
        message = "the ranks have ended after SIGUSR1, which one of them received"
        assert error == f"plait: {message}\n"

    @pytest.mark.proof
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ranks_get_a_signal_once_and_end(self, launcher, number):
        process, _ = launcher.start_waiting(*TWO, text=ENDS_IN_TIME)
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        lines = [f"rank {rank} saved after ['{number.name}']" for rank in range(2)]
        assert sorted(output.splitlines()) == lines
        rule = "the ranks have up to 300 s to end; Ctrl-C or another signal stops them at once"
        assert error == f"plait: {number.name}: {rule}\n"

    def test_failure_after_a_signal_is_reported(self, launcher):
        process, _ = launcher.start_waiting(*TWO, "--", "disk-full", text=ENDS_IN_TIME)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "OSError: No space left on device" in error

    @pytest.mark.proof
    def test_script_without_handlers_ends_without_tracebacks(self, launcher):
        ready = "print(f'ready {os.getpid()}\\n', end='', flush=True)"
        text = f"import os, time\n{ready}\ntime.sleep(100)"
        process, _ = launcher.start_waiting(*TWO, text=text)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in error

    @pytest.mark.proof
    def test_ranks_that_outlive_their_grace_are_killed(self, launcher):
        process, pids = launcher.start_waiting(*TWO, "--grace", "1", text=NEVER_ENDS)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 137
        assert "rank 0, 1 did not end within 1 s and is killed" in error
        assert all_end(pids)

    @pytest.mark.proof
    def test_second_signal_stops_ranks_at_once(self, launcher):
        process, pids = launcher.start_waiting(*TWO, text=NEVER_ENDS)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130 and all_end(pids)

    @pytest.mark.proof
    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
    def test_ranks_do_not_outlive_a_killed_launcher(self, launcher):
        process, pids = launcher.start_waiting(*TWO, text=NEVER_ENDS)
        process.kill()
        process.wait(10)
        assert all_end(pids, seconds=10)

    @pytest.mark.proof
    def test_nohup_protects_ranks_from_a_closed_terminal(self, launcher):
        script = launcher.script(ENDS_IN_TIME)
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
            output, _ = process.communicate(timeout=60)
            assert "rank 0 saved after ['SIGTERM']" in output
        finally:
            process.kill()


class TestMachines:
    """Machines are launchers of one process each, all on this machine."""

    def _run(self, launcher, text, *options):
        """Run a launcher with each of the options, and return their outputs and errors."""
        processes = [launcher.start(*ONE, *option, text=text) for option in options]
        results = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), results
        outputs, errors = zip(*results, strict=True)
        return list(outputs), list(errors)

    @pytest.mark.proof
    def test_numbered_machines(self, launcher):
        common = ("--nnodes", "2", "--master-addr", "localhost", "--master-port", free_port())
        options = [(*common, "--node-rank", str(rank)) for rank in (1, 0)]
        outputs, _ = self._run(launcher, REDUCE, *options)
        assert outputs == [f"rank {rank} of 2 sum 2 args []\n" for rank in (1, 0)]

    @pytest.mark.proof
    def test_rendezvous_endpoint(self, launcher):
        options = ("--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{free_port()}")
        outputs, _ = self._run(launcher, REDUCE, options, options)
        assert sorted(outputs) == [f"rank {rank} of 2 sum 2 args []\n" for rank in (0, 1)]

    @pytest.mark.proof
    def test_all_machines_restart_after_a_failure_of_one(self, launcher):
        first_attempt = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
        text = FAILS_ONCE.replace(first_attempt, 'not os.path.exists("failed")')
        text = text.replace("    raise", '    open("failed", "w").close()\n    raise')
        endpoint = f"localhost:{free_port()}"
        options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--max-restarts", "3")
        outputs, errors = self._run(launcher, text, options, options)
        assert sorted(output.split(" in ")[0] for output in outputs) == [
            "rank 0 done",
            "rank 1 done",
        ]
        assert sum("ValueError: only the first time" in error for error in errors) == 1

    @pytest.mark.proof
    def test_missing_machine(self, launcher):
        options = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}", "--timeout", "2")
        _, error = launcher.run(*ONE, *options, text=REDUCE, code=1)
        assert "2 machines did not join the rendezvous at localhost:" in error
        assert "Traceback" not in error


class TestSsh:
    @pytest.fixture
    def hosts(self, launcher):
        """Options for this machine and one of two slots, which the stand-in for ssh plays."""
        return self._hosts(launcher, "far slots=2  # a comment")

    def _hosts(self, launcher, other):
        (launcher.folder / "hosts").write_text(f"{socket.gethostname()} slots=1\n{other}\n")
        return ("-H", "hosts", "--master-port", free_port())

    def test_machines_of_a_hostfile(self, launcher, hosts):
        output, error = launcher.run(*hosts, "--", "it's mine", text=REDUCE)
        expected = ["[far] rank 1 of 3 sum 3", "[far] rank 2 of 3 sum 3", "rank 0 of 3 sum 3"]
        assert sorted(line.split(" args")[0] for line in output.splitlines()) == expected
        assert """args ["it's mine"]""" in output
        assert error.count("ssh to far") == 1

    @pytest.mark.proof
    def test_failure_of_a_machine_stops_all(self, launcher, hosts):
        _, error = launcher.run(*hosts, *ONE, text=ONE_RAISES, code=1)
        first = next(line for line in error.splitlines() if "plait: " in line)
        assert re.match(r"\[far\] plait: rank 1 .* failed with exit code 1", first)
        assert "[far] ValueError: a gradient went missing" in error

    @pytest.mark.proof
    def test_signal_reaches_every_machine_once(self, launcher, hosts):
        process, pids = launcher.start_waiting(*hosts, *ONE, text=ENDS_IN_TIME)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "rank 0 saved after ['SIGINT']" in output
        assert "[far] rank 1 saved after ['SIGINT']" in output
        assert all_end(pids)

    @pytest.mark.proof
    def test_machines_end_when_the_launcher_is_killed(self, launcher, hosts):
        process, pids = launcher.start_waiting(*hosts, *ONE, text=ENDS_IN_TIME)
        process.kill()
        process.wait(10)
        assert all_end(pids, seconds=30)

    @pytest.mark.proof
    def test_unreachable_machine(self, launcher):
        hosts = self._hosts(launcher, "unreachable.invalid slots=1")
        _, error = launcher.run(*hosts, text=REDUCE, code=255)
        remedy = "no connection, or it was lost (try `ssh unreachable.invalid true`)"
        assert f"node unreachable.invalid: {remedy}" in error
