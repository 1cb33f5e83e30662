"""Launch of the ranks of this machine with torchrun's elastic agent.

torchrun performs the rendezvous, assigns the rank numbers, and starts, monitors and restarts the
ranks. Two methods that torch documents for extensions of its agent are overridden: one reports the
cause of a failed attempt before its other failures. The second one passes a signal to every rank
once, and waits up to `grace_seconds` until the ranks have written a checkpoint. When `launch`
returns, none of its ranks runs.

Several machines use torch's rendezvous. It also works for one machine, but has two disadvantages
there: it exchanges heartbeats with itself, which a busy machine can miss, and after a restart it
gives the new ranks the addresses of the dead ranks. On a single machine, `SingleNodeRendezvous`
therefore replaces torch's rendezvous. It creates a new store per attempt.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from plait._torch.starting import take_processes_from
from plait.cli.launching import failures, remote
from plait.cli.launching.failures import POLL_SECONDS, RankWatch, Reporter, process_exit_code
from plait.cli.launching.launch_settings import DEFAULT_PORT, LaunchSettings, check
from plait.cli.launching.standby import Standby
from plait.cli.terminal import SIGNALS, on_signals
from plait.cluster.topology import thread_count
from plait.errors import (
    CommunicationError,
    ConfigError,
    NumbersError,
    ParityError,
    PlaitError,
    first_line,
)
from plait.names import number_of

# Other machines are not involved, and in containers the name of this machine often does not
# resolve.
LOOPBACK = "127.0.0.1"


WORKER = Path(__file__).with_name("worker.py")
NO_RESTART = (ConfigError.exit_code, ParityError.exit_code, NumbersError.exit_code)
"""Exit codes of failures that a restart would repeat.

They come from a wrong file, or from numbers that follow from the same data and weights.
"""
STOP_SECONDS = 6
"""Time for ranks to end after another rank failed.

They cannot continue, and write at most a checkpoint that they began before.
"""
FAILED_RANK_SECONDS = 5
"""Time for a failed rank to end by itself, while others may wait for it."""
SUCCESS_CODES = {
    signal.SIGINT: (0, 128 + signal.SIGINT, -signal.SIGINT),
    signal.SIGTERM: (0, 128 + signal.SIGTERM, -signal.SIGTERM),
}
"""Exit codes of a rank that are not failures after the launcher sent it the signal."""


class LaunchError(PlaitError):
    """Rendezvous that the machines of a launch did not complete."""


def launch(
    command: Sequence[str],
    settings: LaunchSettings,
    *,
    environment: Mapping[str, str] | None = None,
    follow_stdin: bool = False,
) -> int:
    """Run a command on every rank of this machine until all ranks have ended.

    Args:
        command: `script.py arguments...` or `-m module arguments...`.
        settings: Settings of the launch.
        environment: Variables for the ranks, in addition to those of this process and of torchrun.
        follow_stdin: Whether standard input is the lifeline to the launcher of several machines,
            see Note [Lifeline] in `remote`.

    Returns:
        0 if all ranks succeed, else the exit code of the rank that failed first. If signal N
        (SIGINT, SIGTERM, SIGHUP) ended the launch, 128 + N, or 137 if ranks had to be killed.

    Raises:
        ConfigError: The settings cannot work.
        LaunchError: Other machines did not join the rendezvous.
    """
    # torchrun would accept wrong settings, and then hang or ignore them.
    check(settings)
    with (
        tempfile.TemporaryDirectory(prefix="plait-launch-") as folder,
        _quiet_torchrun(),
        closing(
            Standby(settings.processes if settings.standby else 0, Path(folder), WORKER, _print)
        ) as standby,
        _environment(
            {
                **_rank_variables(settings),
                **failures.environment(Path(folder)),
                **standby.environment(),
                **(environment or {}),
            }
        ),
        take_processes_from(standby.take),
        # Until torch's agent has started ranks and handles signals, nothing requires an orderly
        # end. The wait for other machines happens in C++, where a Python handler would not run.
        on_signals(signal.SIG_DFL),
        Reporter(socket.gethostname()) as reporter,
    ):
        # A signal can arrive before the agent exists.
        agent = None
        rank_watch = RankWatch(
            Path(folder),
            stack_folder=settings.stack_folder or settings.log_folder,
            emit=reporter.report_hang,
        )
        try:
            handler = make_rendezvous(settings)
            agent = Agent(
                _worker_spec(command, settings, handler),
                _RankLogs(folder, reporter, settings.log_folder),
                reporter,
                rank_watch,
                standby,
                settings.grace_seconds,
            )
            if follow_stdin:
                remote.follow(agent)
            result = agent.run()
        except SignalException as interruption:
            failure = None
            if agent is not None:
                failure = agent.report_after_signal(interruption.sigval)
            if failure is None:
                return 128 + interruption.sigval
            return failure
        except (RendezvousError, DistError) as error:
            raise _meeting_error(settings, error) from None
        handler.shutdown()
    # The result is None if the other machines have ended the launch.
    if result is None or result.state == WorkerState.SUCCEEDED:
        return 0
    return agent.exit_code


class Agent(LocalElasticAgent):
    """torchrun's agent for the ranks of this machine, with Plait's reports and shutdown."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        reporter: Reporter,
        watch: RankWatch,
        standby: Standby,
        grace_seconds: float,
    ) -> None:
        super().__init__(spec, logs_specs=logs)
        self.grace_seconds = grace_seconds
        self.exit_code = 1
        self._reporter = reporter
        self._watch = watch
        self._standby = standby
        self._failed_attempts = 0
        self._exit_codes: dict[int, int] = {}
        """Exit codes of ranks that ended during a shutdown."""
        self._interrupted = False
        self._killed_ranks = False
        self._signal_noticed_at = 0.0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        received = self._signal_of_ranks(worker_group)
        if received is not None and any(_is_running(worker.id) for worker in worker_group.workers):
            return RunResult(state=WorkerState.HEALTHY)
        if received is not None:
            _print(f"the ranks have ended after {received.name}, which one of them received")
            # A run that a signal has stopped must not start again.
            self._remaining_restarts = 0
            self.exit_code = 128 + received
            return RunResult(state=WorkerState.FAILED)

        # Read before super() ends the remaining ranks of a failed attempt.
        ended = {
            worker.global_rank for worker in worker_group.workers if not _is_running(worker.id)
        }
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and result.failures:
            self._report_attempt(
                {rank: failure.exitcode for rank, failure in result.failures.items()},
                ended,
                worker_group.spec.max_restarts,
            )
        if result.state == WorkerState.HEALTHY and self._is_stuck(worker_group):
            self._failed_attempts += 1
            if self._failed_attempts <= worker_group.spec.max_restarts:
                self._reporter.report_restart()
            return RunResult(state=WorkerState.FAILED)
        if result.state == WorkerState.HEALTHY:
            self._standby.poll()
        return result

    def _report_attempt(
        self, exit_codes: Mapping[int, int], ended: Collection[int], max_restarts: int
    ) -> None:
        """Report a failed attempt and set the exit code of the launch."""
        self._failed_attempts += 1
        if set(exit_codes.values()) & set(NO_RESTART):
            self._remaining_restarts = 0
            self._failed_attempts = max_restarts + 1
        succeeded = set(ended) - exit_codes.keys()
        failed = set(ended) & exit_codes.keys()
        # Without a rank that failed before, the last look at the ranks was too early to tell.
        running = exit_codes.keys() - failed if failed else set()
        cause = self._reporter.report_attempt(
            exit_codes,
            time.time_ns(),
            ended=succeeded,
            running=running,
            restarting=self._failed_attempts <= max_restarts,
        )
        self.exit_code = process_exit_code(cause)
        # The others lost a rank that ended early with exit code 0.
        if succeeded and cause.record is not None and cause.record.lost_peer:
            self.exit_code = CommunicationError.exit_code

    def _signal_of_ranks(self, worker_group: WorkerGroup) -> signal.Signals | None:
        """Return the signal that ended ranks without reaching this process, or None.

        After signal N, all ranks that have ended have exit code 128 + N, and the other ranks are
        expected to end after the same step. If the others do not end within the grace period, the
        result is None.
        """
        codes = {
            _exit_code(worker.id) for worker in worker_group.workers if not _is_running(worker.id)
        }
        received = next((number for number in SIGNALS if codes == {128 + number}), None)
        if received is None:
            self._signal_noticed_at = 0.0
            return None
        self._signal_noticed_at = self._signal_noticed_at or time.monotonic()
        if time.monotonic() - self._signal_noticed_at >= self.grace_seconds:
            return None
        return received

    def _is_stuck(self, worker_group: WorkerGroup) -> bool:
        """Return True if the ranks cannot continue although all of them run.

        This is the case if a rank is late for a collective, or has failed and does not end.
        """
        processes = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        if self._watch.hangs(processes):
            self.exit_code = CommunicationError.exit_code
            return True
        running = [rank for rank, pid in processes.items() if _is_running(pid)]
        failed = self._reporter.failed_and_running(running, FAILED_RANK_SECONDS)
        if not failed:
            return False
        self.exit_code = process_exit_code(self._reporter.report_attempt(failed, time.time_ns()))
        return True

    def _shutdown(self, death_sig: signal.Signals | None = None, *args: Any, **kwargs: Any) -> None:
        """End the ranks before torch's shutdown, which then finds no running rank.

        Without a received signal, the reason is a failed rank or a changed set of machines. The
        remaining ranks cannot continue, and a long grace period would only delay the restart.
        """
        if death_sig is not None:
            self._interrupted = True
            # Ranks write their checkpoint after SIGINT and SIGTERM only.
            if death_sig not in SUCCESS_CODES:
                self._end_ranks(signal.SIGTERM, self.grace_seconds)
            else:
                self._end_ranks(death_sig, self.grace_seconds)
        elif self._interrupted:
            # A second signal arrived before `_end_ranks` could handle it.
            self._end_ranks(signal.SIGKILL, 0)
        else:
            self._end_ranks(signal.SIGTERM, min(STOP_SECONDS, self.grace_seconds))
        super()._shutdown(death_sig or signal.SIGTERM, *args, **kwargs)

    def _end_ranks(self, sent: signal.Signals, seconds: float) -> None:
        running = {}
        for worker in self.get_worker_group().workers:
            if _is_running(worker.id):
                running[worker.id] = worker.global_rank

        def kill(*_: object) -> None:
            _send_signal(running, signal.SIGKILL)

        # From here on, a second signal ends the ranks at once.
        with on_signals(kill):
            if running and self._interrupted and seconds:
                _print(
                    f"{sent.name}: the ranks have up to {seconds:.0f} s to end; Ctrl-C or another"
                    " signal stops them at once"
                )
            _send_signal(running, sent)
            # A stopped process handles no other signal until it continues.
            _send_signal(running, signal.SIGCONT)
            deadline = time.monotonic() + seconds
            while running:
                for pid in list(running):
                    if _is_running(pid):
                        continue
                    rank = running.pop(pid)
                    code = _exit_code(pid)
                    if code is not None:
                        self._exit_codes[rank] = code
                if running and time.monotonic() > deadline:
                    if sent != signal.SIGKILL:
                        _print(
                            f"rank {', '.join(map(str, running.values()))} did not end within"
                            f" {seconds:.0f} s and is killed"
                        )
                        self._killed_ranks = True
                    _send_signal(running, signal.SIGKILL)
                    break
                time.sleep(POLL_SECONDS)

    def report_after_signal(self, received: signal.Signals) -> int | None:
        """Report ranks that failed after a signal, for example while they wrote a checkpoint.

        Returns:
            The exit code of the first failure, or 137 if ranks were killed after the grace period.
            None if the signal, or a second signal, ended all ranks.
        """
        success_codes = SUCCESS_CODES.get(received, SUCCESS_CODES[signal.SIGTERM])
        failed = {}
        for rank, code in self._exit_codes.items():
            if code not in (*success_codes, -signal.SIGKILL):
                failed[rank] = code
        if failed:
            return process_exit_code(self._reporter.report_attempt(failed, time.time_ns()))
        if self._killed_ranks:
            return 128 + signal.SIGKILL
        return None


class _RankLogs(DefaultLogsSpecs):
    """Output and error files of the ranks.

    The reporter receives the paths of the error files of each attempt. If the user named a folder,
    the output of the ranks is also written there, in one file per rank and stream.
    """

    def __init__(self, folder: str, reporter: Reporter, log_folder: Path | None) -> None:
        if log_folder is None:
            super().__init__(log_dir=folder, tee=Std.NONE)
        else:
            log_folder.mkdir(parents=True, exist_ok=True)
            super().__init__(log_dir=str(log_folder), tee=Std.ALL)
        self._reporter = reporter

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = super().reify(envs)
        self._reporter.watch(
            {int(envs[local]["RANK"]): path for local, path in destination.error_files.items()}
        )
        return destination


def _worker_spec(
    command: Sequence[str], settings: LaunchSettings, handler: RendezvousHandler
) -> WorkerSpec:
    addresses: dict[str, Any] = {}
    if settings.single_node:
        addresses = {"local_addr": LOOPBACK}
    elif settings.rdzv_endpoint is None:
        addresses = {
            "master_addr": settings.master_addr,
            "master_port": settings.master_port or DEFAULT_PORT,
        }
    return WorkerSpec(
        role="plait",
        local_world_size=settings.processes,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        # Unbuffered, so that the output of a rank that is killed is complete.
        args=("-u", str(WORKER), str(os.getpid()), *command),
        max_restarts=settings.max_restarts,
        monitor_interval=POLL_SECONDS,
        **addresses,
    )


def make_rendezvous(settings: LaunchSettings) -> RendezvousHandler:
    """Return the rendezvous of a launch.

    Raises:
        RendezvousError, DistError: torch tried to connect and failed.
    """
    seconds = max(1, int(settings.timeout_seconds))
    if settings.single_node:
        return SingleNodeRendezvous(
            settings.rdzv_id or str(uuid.uuid4()), timedelta(seconds=seconds)
        )
    elastic = settings.rdzv_endpoint is not None
    config: dict[str, Any] = {"rank": settings.node_rank, "timeout": seconds}
    if elastic:
        # torch names the timeouts of its two backends differently.
        config = {"join_timeout": seconds, "read_timeout": seconds}
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d" if elastic else "static",
            endpoint=settings.rendezvous_address,
            run_id=settings.rdzv_id or "plait",
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            **config,
        )
    )


def loopback_store(timeout: timedelta) -> TCPStore:
    """Return a store server that only processes of this machine can connect to.

    TCPStore requires no key. By default its socket listens on all interfaces, so that anyone on
    the network could read and write the addresses that ranks exchange.
    """
    # Port 0 lets the system choose a free one.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # The store closes the descriptor.
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        # The ranks connect only after this call has returned.
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


class SingleNodeRendezvous(RendezvousHandler):
    """Rendezvous of one machine. Every attempt gets a new store on the loopback interface."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        self._run_id = run_id
        self._timeout = timeout

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = loopback_store(self._timeout)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def get_backend(self) -> str:
        return "one machine"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other machine could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _meeting_error(settings: LaunchSettings, error: Exception) -> LaunchError:
    machines = number_of(settings.min_nodes, "machine")
    if settings.min_nodes != settings.max_nodes:
        machines = f"{settings.min_nodes} to {settings.max_nodes} machines"
    place = "on this machine"
    unresolved = None
    if not settings.single_node:
        place = f"at {settings.rendezvous_address}"
        unresolved = _resolution_error(settings.rendezvous_address)
    rule = f"{machines} did not join the rendezvous {place} within {settings.timeout_seconds:.0f} s"
    if unresolved is not None:
        return LaunchError(f"{rule}: {unresolved}")
    return LaunchError(
        f"{rule}: {type(error).__name__}: {first_line(error)}\nCheck that every machine runs the"
        " same command with the same address, and that the port is free on the first machine and"
        " reachable from the others."
    )


def _resolution_error(endpoint: str) -> str | None:
    """Return a message if this machine cannot resolve the host of HOST:PORT, else None."""
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return (
            f"this machine finds no address for the name {host!r} ({error.strerror}); correct it,"
            " or add it to /etc/hosts or to the DNS"
        )
    return None


def _rank_variables(settings: LaunchSettings) -> dict[str, str]:
    """Return the environment variables of the ranks in addition to torchrun's."""
    # torchrun would handle SIGHUP even if nohup ignores it.
    handled = [number.name for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    variables = {"TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(handled)}
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(thread_count(settings.processes))
    # torch's record of collectives stays small, because `comm.watch` reads it again and again.
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        variables["TORCH_FR_BUFFER_SIZE"] = "64"
    can_restart = settings.max_restarts or settings.min_nodes != settings.max_nodes
    if can_restart and not settings.single_node:
        # After a restart the agent's store still has the addresses of the dead ranks, and new ranks
        # would connect to them (torch 2.13).
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """Silence the agent's log lines about failures, which would precede the reported cause."""
    loggers = [
        logging.getLogger(f"torch.distributed.elastic.{name}")
        for name in ("multiprocessing.api", "agent.server.api")
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to ranks and to the processes that they started (their process groups)."""
    for pid in list(pids):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _is_running(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        # WNOWAIT leaves the exit status for torch.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _exit_code(pid: int) -> int | None:
    """Return the exit code of an ended rank, or None if torch has already collected the code."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return status.si_status
    # Negative for a signal, as in `subprocess`.
    return -status.si_status


def _print(text: str) -> None:
    print(f"plait: {text}", file=sys.stderr, flush=True)
