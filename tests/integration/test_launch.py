"""`plait launch` as a user meets it: real processes, real signals, and machines that a stand-in for ssh runs here. `make test` has a run
that ends well, one that fails, one that is stopped and one over ssh; the rest is for `make proof`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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

FAKE_SSH = """#!/bin/sh
# Runs here what ssh would run there, and says where that was.
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
echo "ssh to $1" >&2
[ "$1" = unreachable.invalid ] && exit 255
exec sh -c "$2"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def _script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def _plait(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "plait", "launch", *arguments]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _plait(*arguments), capture_output=True, text=True, timeout=120, check=False
    )


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                _plait(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _ready(process: subprocess.Popen[str], ranks: int) -> list[int]:
    """The process ids that the ranks print when they wait for a signal."""
    assert process.stdout is not None
    return [int(re.search(r"ready (\d+)", process.stdout.readline())[1]) for _ in range(ranks)]  # type: ignore[index]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class TestRanks:
    def test_they_work_together(self, folder: Path) -> None:
        done = _run("--nproc-per-node", "2", _script(folder, REDUCE), "--lr", "1")
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [
            f"rank {rank} of 2 sum 2 args ['--lr', '1']" for rank in range(2)
        ]
        assert done.stderr == ""

    @pytest.mark.proof
    def test_the_same_script_under_torchrun(self, folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            _script(folder, REDUCE),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2

    def test_an_engine_after_one_that_was_closed(self, folder: Path) -> None:
        """Its group does not find the addresses of the first engine's in the launch's store."""
        done = _run("--nproc-per-node", "2", _script(folder, INITIALIZES_AGAIN))
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == AGAIN

    @pytest.mark.proof
    @pytest.mark.parametrize("torchrun", [False, True])
    def test_the_same_where_another_launcher_or_rank_0_has_the_store(
        self, folder: Path, torchrun: bool
    ) -> None:
        script, port = _script(folder, INITIALIZES_AGAIN), str(_free_port())
        if torchrun:
            commands = {
                0: [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    "2",
                    script,
                ]
            }
        else:
            commands = {rank: [sys.executable, script] for rank in range(2)}
        there = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        with (folder / "output").open("w+") as output:
            running = []
            for rank, command in commands.items():
                environment = {
                    **os.environ,
                    **({} if torchrun else {**there, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
                }
                running.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )
            codes = [process.wait(120) for process in running]
            output.seek(0)
            text = output.read()
        assert set(codes) == {0}, text
        assert sorted(line for line in text.splitlines() if line.startswith("turn")) == AGAIN

    @pytest.mark.proof
    def test_a_module_in_the_current_folder(self, folder: Path) -> None:
        package = folder / "mine"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text("word = 'part'")
        (package / "__main__.py").write_text(
            "import sys\nfrom .part import word\nprint(__name__, __package__, word, sys.argv[1:])"
        )
        done = _run("--nproc-per-node", "1", "-m", "mine", "-x")
        assert (done.returncode, done.stdout) == (0, "__main__ mine part ['-x']\n"), done.stderr

    @pytest.mark.proof
    def test_a_script_finds_what_python_gives_it(self, folder: Path) -> None:
        """Its own folder on the path, itself as `__main__` (for pickle and for processes it spawns), no trace of the launcher."""
        (folder / "sub").mkdir()
        (folder / "sub" / "beside.py").write_text("value = 3")
        (folder / "sub" / "job.py").write_text(
            "import multiprocessing, pickle, sys\n"
            "import beside\n"
            "class Mine: pass\n"
            "def double(x): return 2 * x\n"
            "if __name__ == '__main__':\n"
            "    assert sys.modules['__main__'].Mine is Mine and type(pickle.loads(pickle.dumps(Mine()))) is Mine\n"
            "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [beside.value]), __file__)\n"
        )
        done = _run("--nproc-per-node", "1", "sub/job.py")
        assert (done.returncode, done.stdout) == (0, "[6] sub/job.py\n"), done.stderr

    @pytest.mark.proof
    @pytest.mark.parametrize(("given", "seen"), [(None, "share"), ("7", "7")])
    def test_cores_are_shared_unless_the_user_says(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str
    ) -> None:
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        from plait.cluster.topology import cpu_count

        done = _run(
            "--nproc-per-node",
            "2",
            _script(folder, "import os; print(os.environ['OMP_NUM_THREADS'] + '\\n', end='')"),
        )
        assert (
            done.stdout.split() == [str(max(1, cpu_count() // 2)) if seen == "share" else seen] * 2
        )


class TestFailures:
    def test_the_cause_comes_first_and_the_others_are_stopped(self, folder: Path) -> None:
        done = _run("--nproc-per-node", "2", _script(folder, ONE_RAISES))
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
    def test_it_is_told_while_another_rank_refuses_to_end(self, folder: Path, start: Start) -> None:
        """The 30 seconds that torchrun waits for the others do not delay the message."""
        text = (
            "import os\nif os.environ['RANK'] == '0':\n    raise KeyError('early')\n" + NEVER_ENDS
        )
        process = start("--nproc-per-node", "2", _script(folder, text))
        assert process.stderr is not None
        assert "rank 0" in process.stderr.readline()
        assert process.poll() is None, "rank 1 is still waited for"

    @pytest.mark.proof
    def test_exit_codes_are_propagated(self, folder: Path) -> None:
        done = _run(
            "--nproc-per-node",
            "2",
            _script(
                folder,
                "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)",
            ),
        )
        assert done.returncode == 7
        assert re.match(r"plait: rank 1 \(node \S+\) ended with exit code 7", done.stderr)
        assert done.stderr.endswith("plait: rank 0 was stopped\n")

    @pytest.mark.proof
    def test_a_crash_is_the_cause_before_errors_of_other_ranks(self, folder: Path) -> None:
        crash = ONE_RAISES.replace(
            'raise ValueError("a gradient went missing")',
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        )
        done = _run("--nproc-per-node", "2", _script(folder, crash))
        assert done.returncode == 139
        told = [line for line in done.stderr.splitlines() if line.startswith("plait:")]
        assert "rank 1" in told[0]
        assert "SIGSEGV" in told[0]
        assert "Segmentation fault" in done.stderr

    @pytest.mark.proof
    def test_a_users_mistake_is_one_sentence_with_its_exit_code(self, folder: Path) -> None:
        done = _run(
            "--nproc-per-node",
            "2",
            _script(
                folder,
                "from plait.errors import CheckpointError\nraise CheckpointError('step 40: incomplete')",
            ),
        )
        assert (done.returncode, done.stderr) == (4, "plait: step 40: incomplete\n")

    @pytest.mark.proof
    @pytest.mark.parametrize("name", ["nothing.here", "json.nothing"])
    def test_a_module_that_is_not_there(self, folder: Path, name: str) -> None:
        done = _run("--nproc-per-node", "2", "-m", name)
        assert done.returncode == 2
        assert (
            done.stderr
            == f"plait: -m {name}: not a module that Python can run from here; check its name and the current folder\n"
        )

    @pytest.mark.proof
    def test_an_error_tracker_still_hears_of_it(self, folder: Path) -> None:
        text = "import sys\nsys.excepthook = lambda kind, error, trace: open('heard', 'w').write(kind.__name__)\n1 / 0"
        done = _run("--nproc-per-node", "1", _script(folder, text))
        assert (folder / "heard").read_text() == "ZeroDivisionError"
        assert done.stderr.count("Traceback") == 1

    @pytest.mark.proof
    def test_restart(self, folder: Path) -> None:
        done = _run("--nproc-per-node", "2", "--max-restarts", "1", _script(folder, FAILS_ONCE))
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [
            "rank 0 done in attempt 1",
            "rank 1 done in attempt 1",
        ]
        assert "ValueError: only the first time" in done.stderr
        assert "starting the ranks again" in done.stderr


class TestSignals:
    @pytest.mark.proof
    def test_a_signal_that_one_rank_gets_is_no_failure(self, folder: Path) -> None:
        """A scheduler may send it to one; the ranks agree to end, one sooner than the others, and nothing starts again."""
        text = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(0.7)
    print("rank 0 has saved", flush=True)
sys.exit(138)
"""
        done = _run("--nproc-per-node", "2", "--max-restarts", "2", _script(folder, text))
        assert (done.returncode, done.stdout) == (138, "rank 0 has saved\n")
        assert (
            done.stderr == "plait: the ranks have ended after SIGUSR1, which one of them received\n"
        )

    @pytest.mark.proof
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ranks_get_it_once_and_end_well(
        self, folder: Path, start: Start, number: signal.Signals
    ) -> None:
        process = start("--nproc-per-node", "2", _script(folder, ENDS_IN_TIME))
        _ready(process, 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert sorted(out.splitlines()) == [
            f"rank {rank} saved after ['{number.name}']" for rank in range(2)
        ]
        assert (
            err
            == f"plait: {number.name}: the ranks have up to 300 s to end; Ctrl-C or another signal stops them at once\n"
        )

    def test_a_failure_while_ending_is_not_a_clean_end(self, folder: Path, start: Start) -> None:
        process = start("--nproc-per-node", "2", _script(folder, ENDS_IN_TIME), "disk-full")
        _ready(process, 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "OSError: No space left on device" in err

    @pytest.mark.proof
    def test_a_plain_script_ends_without_tracebacks(self, folder: Path, start: Start) -> None:
        process = start(
            "--nproc-per-node",
            "2",
            _script(
                folder,
                "import os, time\nprint(f'ready {os.getpid()}\\n', end='', flush=True)\ntime.sleep(100)",
            ),
        )
        _ready(process, 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err

    @pytest.mark.proof
    def test_ranks_that_outlive_their_grace_are_killed(self, folder: Path, start: Start) -> None:
        process = start("--nproc-per-node", "2", "--grace", "1", _script(folder, NEVER_ENDS))
        pids = _ready(process, 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 137
        assert "rank 0, 1 did not end within 1 s and is killed" in err
        assert not any(map(_alive, pids))

    @pytest.mark.proof
    def test_a_second_signal_stops_them_at_once(self, folder: Path, start: Start) -> None:
        process = start("--nproc-per-node", "2", _script(folder, NEVER_ENDS))
        pids = _ready(process, 2)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
        assert not any(map(_alive, pids))

    @pytest.mark.proof
    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
    def test_ranks_do_not_outlive_a_killed_launcher(self, folder: Path, start: Start) -> None:
        process = start("--nproc-per-node", "2", _script(folder, NEVER_ENDS))
        pids = _ready(process, 2)
        process.kill()
        process.wait(10)
        deadline = time.monotonic() + 10
        while any(map(_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [pid for pid in pids if _alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left

    @pytest.mark.proof
    def test_a_closed_terminal_does_not_end_what_nohup_protects(self, folder: Path) -> None:
        command = ["nohup", *_plait("--nproc-per-node", "1", _script(folder, ENDS_IN_TIME))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _ready(process, 1)
            process.send_signal(signal.SIGHUP)
            time.sleep(1)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
            assert "rank 0 saved after ['SIGTERM']" in out
        finally:
            process.kill()


class TestMachines:
    def _together(self, start: Start, *commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
        processes = [start(*command) for command in commands]
        return [
            (process.returncode, *streams)
            for process in processes
            for streams in [process.communicate(timeout=120)]
        ]

    @pytest.mark.proof
    def test_numbered_by_hand(self, folder: Path, start: Start) -> None:
        meet = (
            "--nproc-per-node",
            "1",
            "--nnodes",
            "2",
            "--master-addr",
            "localhost",
            "--master-port",
            str(_free_port()),
        )
        script = _script(folder, REDUCE)
        done = self._together(
            start, *((*meet, "--node-rank", str(rank), script) for rank in (1, 0))
        )
        assert [code for code, _, _ in done] == [0, 0], done
        assert [out for _, out, _ in done] == [
            "rank 1 of 2 sum 2 args []\n",
            "rank 0 of 2 sum 2 args []\n",
        ]

    @pytest.mark.proof
    def test_at_an_endpoint(self, folder: Path, start: Start) -> None:
        meet = (
            "--nproc-per-node",
            "1",
            "--nnodes",
            "1:2",
            "--rdzv-endpoint",
            f"localhost:{_free_port()}",
            _script(folder, REDUCE),
        )
        done = self._together(start, meet, meet)
        assert [code for code, _, _ in done] == [0, 0], done
        assert sorted(out for _, out, _ in done) == [
            "rank 0 of 2 sum 2 args []\n",
            "rank 1 of 2 sum 2 args []\n",
        ]

    @pytest.mark.proof
    def test_all_start_again_when_a_rank_of_one_failed(self, folder: Path, start: Start) -> None:
        failing = FAILS_ONCE.replace(
            'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"', 'not os.path.exists("failed")'
        ).replace("    raise", '    open("failed", "w").close()\n    raise')
        endpoint = f"localhost:{_free_port()}"
        meet = (
            "--nproc-per-node",
            "1",
            "--nnodes",
            "2",
            "--rdzv-endpoint",
            endpoint,
            "--max-restarts",
            "3",
            _script(folder, failing),
        )
        done = self._together(start, meet, meet)
        assert [code for code, _, _ in done] == [0, 0], done
        assert sorted(out.split(" in ")[0] for _, out, _ in done) == ["rank 0 done", "rank 1 done"]
        assert sum("ValueError: only the first time" in err for _, _, err in done) == 1

    @pytest.mark.proof
    def test_the_others_do_not_come(self, folder: Path) -> None:
        meet = (
            "--nproc-per-node",
            "1",
            "--nnodes",
            "2",
            "--rdzv-endpoint",
            f"localhost:{_free_port()}",
            "--timeout",
            "2",
        )
        done = _run(*meet, _script(folder, REDUCE))
        assert done.returncode == 1
        assert "2 machine(s) did not meet at localhost:" in done.stderr
        assert "Traceback" not in done.stderr


class TestSsh:
    @pytest.fixture
    def hosts(self, folder: Path) -> tuple[str, ...]:
        (folder / "hosts").write_text(
            f"{socket.gethostname()} slots=1\nfar slots=2  # played by this machine\n"
        )
        return ("-H", "hosts", "--master-port", str(_free_port()))

    def test_every_machine_of_a_hostfile(self, folder: Path, hosts: tuple[str, ...]) -> None:
        done = _run(*hosts, _script(folder, REDUCE), "it's mine")
        assert done.returncode == 0, done.stderr
        expected = ["[far] rank 1 of 3 sum 3", "[far] rank 2 of 3 sum 3", "rank 0 of 3 sum 3"]
        assert sorted(line.split(" args")[0] for line in done.stdout.splitlines()) == expected
        assert """args ["it's mine"]""" in done.stdout
        assert done.stderr.count("ssh to far") == 1

    @pytest.mark.proof
    def test_a_failure_there_stops_all_and_is_told_first(
        self, folder: Path, hosts: tuple[str, ...]
    ) -> None:
        done = _run(*hosts, "--nproc-per-node", "1", _script(folder, ONE_RAISES))
        assert done.returncode == 1
        told = [line for line in done.stderr.splitlines() if "plait: " in line]
        assert re.match(r"\[far\] plait: rank 1 .* failed with exit code 1", told[0])
        assert "[far] ValueError: a gradient went missing" in done.stderr

    @pytest.mark.proof
    def test_a_signal_reaches_every_machine_once(
        self, folder: Path, hosts: tuple[str, ...], start: Start
    ) -> None:
        process = start(*hosts, "--nproc-per-node", "1", _script(folder, ENDS_IN_TIME))
        pids = _ready(process, 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "rank 0 saved after ['SIGINT']" in out
        assert "[far] rank 1 saved after ['SIGINT']" in out
        assert not any(map(_alive, pids))

    @pytest.mark.proof
    def test_machines_end_themselves_when_the_launcher_is_gone(
        self, folder: Path, hosts: tuple[str, ...], start: Start
    ) -> None:
        process = start(*hosts, "--nproc-per-node", "1", _script(folder, ENDS_IN_TIME))
        pids = _ready(process, 2)
        process.kill()
        process.wait(10)
        deadline = time.monotonic() + 30
        while any(map(_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [pid for pid in pids if _alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left

    @pytest.mark.proof
    def test_a_machine_that_cannot_be_reached(self, folder: Path) -> None:
        (folder / "hosts").write_text(
            f"{socket.gethostname()} slots=1\nunreachable.invalid slots=1\n"
        )
        done = _run("-H", "hosts", "--master-port", str(_free_port()), _script(folder, REDUCE))
        assert done.returncode == 255
        assert (
            "node unreachable.invalid: no connection, or it was lost (try `ssh unreachable.invalid true`)"
            in done.stderr
        )
