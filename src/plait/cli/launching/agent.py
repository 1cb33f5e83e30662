"""Runs the ranks of this machine on torchrun's own elastic agent, and ends them well.

What torchrun does stays its work: rendezvous, numbering, starting, watching, restarting. Overridden
are two of the methods that torch documents for extending its agent: a failed attempt is reported
with its cause first, and after a signal the ranks get it once and then up to `grace_seconds` to
write a checkpoint. Invariant: when `launch` returns, no rank of it runs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    Std,
)
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from plait._torch.starting import started_by
from plait.cli.launching import lifeline, rendezvous, watch
from plait.cli.launching.failures import POLL_SECONDS, Reporter, process_exit_code
from plait.cli.launching.lifeline import SIGNALS, on_signals
from plait.cli.launching.settings import DEFAULT_PORT, Settings, check
from plait.cli.launching.standby import Standby
from plait.cli.launching.watch import RankWatch
from plait.cluster.topology import thread_count
from plait.errors import (
    CommunicationError,
    ConfigError,
    NumbersError,
    ParityError,
    PlaitError,
    first_line,
)

WORKER = Path(__file__).with_name("worker.py")
AS_BEFORE = (ConfigError.exit_code, ParityError.exit_code, NumbersError.exit_code)
"""Exit codes of failures that would come again: a wrong file, and numbers that follow from the same
data and weights. No restart.
"""
STOP_SECONDS = 6
"""What ranks get to end in when others failed: they cannot go on together, and what they write is
at most a checkpoint begun before.
"""
ENDING_SECONDS = 5
"""What a rank that has failed gets to end in by itself; meanwhile others may wait for it."""
ENDS_WELL = {
    signal.SIGINT: (0, 128 + signal.SIGINT, -signal.SIGINT),
    signal.SIGTERM: (0, 128 + signal.SIGTERM, -signal.SIGTERM),
}
"""Exit codes of a rank that are no failure after the launcher sent it the signal."""


class LaunchError(PlaitError):
    """The machines of a launch did not come together."""


def launch(
    command: Sequence[str],
    settings: Settings,
    *,
    environment: Mapping[str, str] | None = None,
    follow_stdin: bool = False,
) -> int:
    """Run `command` (`script.py args...` or `-m module args...`) on every rank of this machine
    until all have ended.

    The ranks get this process's environment with torchrun's variables and those of `environment`.

    Returns 0 when every rank did; the exit code of the rank that failed first; 128 + N when signal
    N (SIGINT, SIGTERM, SIGHUP) ended the launch and the ranks ended in time and without a failure,
    137 when they had to be killed. With `follow_stdin` standard input is the line to the launcher
    of several machines, see `lifeline`. Raises ConfigError for settings that cannot work and
    LaunchError when the other machines did not appear.
    """
    check(settings)
    with (
        tempfile.TemporaryDirectory(prefix="plait-launch-") as folder,
        _quiet_torchrun(),
        closing(
            Standby(settings.processes if settings.standby else 0, Path(folder), WORKER, _say)
        ) as standby,
        _environment(
            {
                **_additions(settings),
                **watch.environment(Path(folder)),
                **standby.environment(),
                **(environment or {}),
            }
        ),
        started_by(standby.take),
        # Until torch's agent has started ranks and handles signals, nothing needs an orderly end,
        # and waiting for the other machines happens in C++, where a handler in Python would not
        # run.
        on_signals(signal.SIG_DFL),
        Reporter(socket.gethostname()) as reporter,
    ):
        agent = None
        ranks = RankWatch(
            Path(folder), kept=settings.stack_folder or settings.log_folder, tell=reporter.tell_hang
        )
        try:
            handler = rendezvous.make(settings)
            logs = _Logs(folder, reporter, settings.log_folder)
            agent = Agent(
                _spec(command, settings, handler),
                logs,
                reporter,
                ranks,
                standby,
                settings.grace_seconds,
            )
            if follow_stdin:
                lifeline.follow(agent)
            result = agent.run()
        except SignalException as interruption:
            bad = agent.report_after(interruption.sigval) if agent is not None else None
            return bad if bad is not None else 128 + interruption.sigval
        except (RendezvousError, DistError) as error:
            raise _not_met(settings, error) from None
        handler.shutdown()
    # None: the other machines have ended the launch
    if result is None or result.state == WorkerState.SUCCEEDED:
        return 0
    return agent.exit_code


class Agent(LocalElasticAgent):
    """torchrun's agent for the ranks of this machine."""

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
        self._ended: dict[int, int] = {}
        self._interrupted = False
        self._overdue = False
        self._heard_at = 0.0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        heard = self._signal_that_ranks_heard(worker_group)
        if heard is not None and any(_running(worker.id) for worker in worker_group.workers):
            return RunResult(state=WorkerState.HEALTHY)
        if heard is not None:
            _say(f"the ranks have ended after {heard.name}, which one of them got")
            self._remaining_restarts = 0
            self.exit_code = 128 + heard
            return RunResult(state=WorkerState.FAILED)
        # before torch ends the others
        ended = {worker.global_rank for worker in worker_group.workers if not _running(worker.id)}
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and result.failures:
            self._failed_attempts += 1
            exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            if set(exit_codes.values()) & set(AS_BEFORE):
                self._remaining_restarts = 0
                self._failed_attempts = worker_group.spec.max_restarts + 1
            restarting = self._failed_attempts <= worker_group.spec.max_restarts
            early = ended - exit_codes.keys()
            cause = self._reporter.failed(
                exit_codes, time.time_ns(), ended=early, restarting=restarting
            )
            self.exit_code = process_exit_code(cause)
            if early and cause.record is not None and cause.record.lost_peer:
                self.exit_code = CommunicationError.exit_code
        if result.state == WorkerState.HEALTHY and self._stuck(worker_group):
            self._failed_attempts += 1
            if self._failed_attempts <= worker_group.spec.max_restarts:
                self._reporter.tell_restart()
            return RunResult(state=WorkerState.FAILED)
        if result.state == WorkerState.HEALTHY:
            self._standby.look()
        return result

    def _signal_that_ranks_heard(self, worker_group: WorkerGroup) -> signal.Signals | None:
        """Of ranks that end well after a signal, which none but the ranks got: those that have
        ended did so with 128 + N. The others follow after the same step; None where they do not
        within the time that ranks get to end in.
        """
        codes = {
            _exit_code(worker.id) for worker in worker_group.workers if not _running(worker.id)
        }
        heard = next((number for number in SIGNALS if codes == {128 + number}), None)
        if heard is None:
            self._heard_at = 0.0
            return None
        self._heard_at = self._heard_at or time.monotonic()
        return heard if time.monotonic() - self._heard_at < self.grace_seconds else None

    def _stuck(self, worker_group: WorkerGroup) -> bool:
        """Whether the ranks can go on no more although none has ended: one is late for a
        collective, or has failed and does not end.
        """
        processes = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        if self._watch.hangs(processes):
            self.exit_code = CommunicationError.exit_code
            return True
        failed = self._reporter.failed_and_running(
            [rank for rank, pid in processes.items() if _running(pid)], ENDING_SECONDS
        )
        if failed:
            self.exit_code = process_exit_code(self._reporter.failed(failed, time.time_ns()))
        return bool(failed)

    def _shutdown(self, death_sig: signal.Signals | None = None, *args: Any, **kwargs: Any) -> None:
        """End the ranks. torch's own shutdown follows and finds none left.

        Without a signal received the ranks are ended because others failed or the machines changed:
        they cannot go on together, and a long grace would only delay the restart.
        """
        if death_sig is not None:
            self._interrupted = True
            self._end(death_sig if death_sig in ENDS_WELL else signal.SIGTERM, self.grace_seconds)
        elif self._interrupted:  # a second signal, before `_end` could take it
            self._end(signal.SIGKILL, 0)
        else:
            self._end(signal.SIGTERM, min(STOP_SECONDS, self.grace_seconds))
        super()._shutdown(death_sig or signal.SIGTERM, *args, **kwargs)

    def _end(self, sent: signal.Signals, seconds: float) -> None:
        running = {
            worker.id: worker.global_rank
            for worker in self.get_worker_group().workers
            if _running(worker.id)
        }
        with on_signals(lambda *_: _kill(running, signal.SIGKILL)):
            if running and self._interrupted and seconds:
                _say(
                    f"{sent.name}: the ranks have up to {seconds:.0f} s to end; Ctrl-C or another"
                    " signal stops them at once"
                )
            _kill(running, sent)
            _kill(running, signal.SIGCONT)  # one that is stopped takes no other signal
            deadline = time.monotonic() + seconds
            while running:
                for pid in [pid for pid in running if not _running(pid)]:
                    rank = running.pop(pid)
                    if (code := _exit_code(pid)) is not None:
                        self._ended[rank] = code
                if running and time.monotonic() > deadline:
                    if sent != signal.SIGKILL:
                        _say(
                            f"rank {', '.join(map(str, running.values()))} did not end within"
                            f" {seconds:.0f} s and is killed"
                        )
                        self._overdue = True
                    _kill(running, signal.SIGKILL)
                    break
                time.sleep(POLL_SECONDS)

    def report_after(self, received: signal.Signals) -> int | None:
        """Tell which ranks ended otherwise than by the signal: with an exception while they wrote
        their checkpoint, for one.

        Returns the exit code of such a failure; None when all ended as a signal makes them, or were
        stopped by a second one.
        """
        ends_well = ENDS_WELL[received if received in ENDS_WELL else signal.SIGTERM]
        bad = {
            rank: code
            for rank, code in self._ended.items()
            if code not in (*ends_well, -signal.SIGKILL)
        }
        if bad:
            return process_exit_code(self._reporter.failed(bad, time.time_ns()))
        return 128 + signal.SIGKILL if self._overdue else None


class _Logs(DefaultLogsSpecs):
    """Tells the reporter where the ranks of an attempt will record their exceptions. With a folder
    of the user's, what ranks print goes there too, in a file a rank and stream.
    """

    def __init__(self, folder: str, reporter: Reporter, kept: Path | None) -> None:
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
        super().__init__(
            log_dir=str(kept) if kept is not None else folder,
            tee=Std.ALL if kept is not None else Std.NONE,
        )
        self._reporter = reporter

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = super().reify(envs)
        self._reporter.watch(
            {int(envs[local]["RANK"]): path for local, path in destination.error_files.items()}
        )
        return destination


def _spec(command: Sequence[str], settings: Settings, handler: RendezvousHandler) -> WorkerSpec:
    by_hand = not settings.single_node and settings.rdzv_endpoint is None
    return WorkerSpec(
        role="plait",
        local_world_size=settings.processes,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-u", str(WORKER), str(os.getpid()), *command),
        max_restarts=settings.max_restarts,
        monitor_interval=POLL_SECONDS,
        master_addr=settings.master_addr if by_hand else None,
        master_port=(settings.master_port or DEFAULT_PORT) if by_hand else None,
        local_addr=rendezvous.LOOPBACK if settings.single_node else None,
    )


def _not_met(settings: Settings, error: Exception) -> LaunchError:
    count = (
        settings.min_nodes
        if settings.min_nodes == settings.max_nodes
        else f"{settings.min_nodes} to {settings.max_nodes}"
    )
    where = "on this machine" if settings.single_node else f"at {settings.meeting_point}"
    failed = f"{count} machine(s) did not meet {where} within {settings.timeout_seconds:.0f} s"
    unknown = None if settings.single_node else _unknown_name(settings.meeting_point)
    if unknown is not None:
        return LaunchError(f"{failed}: {unknown}")
    return LaunchError(
        f"{failed}: {type(error).__name__}: {first_line(error)}\nCheck that every machine runs the"
        " same command with the same address, that the port is free on the first and open between"
        " them."
    )


def _unknown_name(endpoint: str) -> str | None:
    """Return why this machine finds no address for the host of HOST:PORT; None where it finds
    one.
    """
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return (
            f"this machine finds no address for the name {host!r} ({error.strerror}); correct it,"
            " or add it to /etc/hosts or to the DNS"
        )
    return None


def _additions(settings: Settings) -> dict[str, str]:
    """What the ranks find in their environment besides torchrun's variables."""
    # torchrun overrides nohup's decision to ignore the hang-up of a closed terminal; here it
    # stands.
    handled = [number.name for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    additions = {"TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(handled)}
    if "OMP_NUM_THREADS" not in os.environ:
        additions["OMP_NUM_THREADS"] = str(thread_count(settings.processes))
    # torch's record of collectives, which `comm.watch` reads again and again
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        additions["TORCH_FR_BUFFER_SIZE"] = "64"
    if not settings.single_node and (
        settings.max_restarts or settings.min_nodes != settings.max_nodes
    ):
        # The agent's own store still holds the dead ranks' addresses after a restart, and new ranks
        # connect to them (torch 2.13).
        additions["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return additions


@contextmanager
def _environment(additions: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in additions}
    os.environ.update(additions)
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
    """Silence the agent's log lines on failures and signals: they come before the cause, which the
    reporter tells.
    """
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


def _kill(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each rank's process group: the rank with what it started."""
    for pid in list(pids):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _running(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _exit_code(pid: int) -> int | None:
    """The exit code of a rank that has ended, left for torch to collect; None when torch did
    already.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _say(text: str) -> None:
    print(f"plait: {text}", file=sys.stderr, flush=True)
