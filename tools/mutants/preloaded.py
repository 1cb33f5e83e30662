"""pytest in processes that have imported torch and Transformers before they start.

A mutant changes only Plait, so everything else is imported once, by a server that processes are
forked from. That is nine tenths of the time of a short test: imports take about ten seconds, and
the workers of `tests.pool` import the same packages once more.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing import connection, forkserver, get_context, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.pool import PRELOADED
from tools.mutants.project import environment

PACKAGES = [name for name in PRELOADED if name.partition(".")[0] != "plait"]


def server() -> ForkServerContext:
    """Return a context whose processes have imported the packages that Plait stands on."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PACKAGES)
    return context


def run_pytest(
    context: ForkServerContext, root: Path, *arguments: str, limit_seconds: float, log: Path
) -> tuple[int | None, str]:
    """Run pytest over the sources below `root` and write what it prints to `log`.

    Returns:
        The exit code, or None if pytest was killed at the limit, and the text of the log. No
        process of the tests is left.
    """
    process = context.Process(target=_session, args=(root, arguments, log))
    process.start()
    process.join(limit_seconds)
    code = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return code, log.read_text(encoding="utf-8", errors="replace")


def _session(root: Path, arguments: tuple[str, ...], log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment(root))
    os.chdir(root)
    project = Path(__file__).parents[2]
    others = [path for path in sys.path if path not in ("", str(project), str(project / "src"))]
    sys.path[:] = [str(root / "src"), str(root), *others]
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("tests", "tools", "benchmarks", "plait"):
            del sys.modules[name]
    forkserver._forkserver = _ForkedServer()
    for method in ("ensure_running", "get_inherited_fds", "connect_to_new_process"):
        setattr(forkserver, method, getattr(forkserver._forkserver, method))
    forkserver.set_forkserver_preload = forkserver._forkserver.set_forkserver_preload

    import pytest

    sys.exit(pytest.main(list(arguments)))


class _ForkedServer(forkserver.ForkServer):
    """The fork server of the tests' workers, which is forked itself and has nothing to import.

    `multiprocessing` would start a new interpreter.
    """

    def ensure_running(self: Any) -> None:  # names that the library keeps private
        with self._lock:
            resource_tracker.ensure_running()
            if self._forkserver_pid is not None:
                return
            listener = socket.socket(socket.AF_UNIX)
            address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
            listener.bind(address)
            listener.listen()
            all_alive, alive = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(alive)
                with suppress(SystemExit):
                    forkserver.main(listener.fileno(), all_alive, self._preload_modules)
                os._exit(0)
            os.close(all_alive)
            listener.close()
            self._forkserver_address = address
            self._forkserver_alive_fd = alive
            self._forkserver_pid = pid
