"""Program of every rank: runs the user's script or module as `__main__` and records its failure.

The launcher runs this file by its path, before anything of Plait or torch is imported, so that the
script starts in the same interpreter state as with `python script.py`. An exception is written to a
file that the launcher watches, so that the launcher can print the failures of all ranks in the
right order, the cause first. This process prints the exception only if there is no such file. The
process never outlives its launcher.

    python worker.py LAUNCHER_PID script.py arguments...
    python worker.py LAUNCHER_PID -m module arguments...
    python worker.py LAUNCHER_PID --stand-by DESCRIPTOR

The last form is a standby process, see Note [Standby processes] in `standby`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

EXIT_TIMEOUT_SECONDS = 60
"""Time after which a failed rank that cannot end is killed, after printing all stacks.

A thread or a communicator can block its exit.
"""
THREADS_SECONDS = 2
"""Time that a failed rank waits for threads that are not daemons.

The other ranks wait during this time.
"""

STANDBY_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "trl",
    "plait",
)
"""Packages that a standby process imports, because their import does not depend on the rank."""
IMPORT_POLL_SECONDS = 1.0
"""Interval between looks at the imported modules. They are written if their number is unchanged."""


class UserError(Exception):
    """Script or module that cannot be started. The message is printed without a traceback."""


def main(arguments: list[str]) -> None:
    """Run the script or module.

    The process exits with the exit code of the script, with 1 after an exception, or with the exit
    code of a PlaitError.
    """
    _die_with(int(arguments[0]))
    if arguments[1] == "--stand-by":
        arguments = [arguments[0], *_stand_by(int(arguments[2]))]
    faulthandler.enable()
    _register_stack_signal()
    _start_listing_imports()
    try:
        if arguments[1] == "-m":
            code, module = _load_module(arguments[2:])
        else:
            code, module = _load_script(arguments[1:])
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except KeyboardInterrupt:
        # No failure of the rank, so nothing is recorded.
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        faulthandler.dump_traceback_later(EXIT_TIMEOUT_SECONDS, exit=True)
        _exit_process(_report_failure(error))


def _exit_process(exit_code: int) -> None:
    """Exit like the interpreter, but without the teardown of modules.

    With torch the teardown takes seconds, in which other ranks wait for this one.
    """
    deadline = time.monotonic() + THREADS_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    # `os._exit` below does not run them.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code)


def _load_script(arguments: list[str]) -> tuple[CodeType, ModuleType]:
    path = arguments[0]
    sys.argv = arguments
    # The first entry is the folder of this file, in whose place the script expects its own.
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a Python script") from None
    module = _main_module(None)
    module.__file__ = path
    return compile(source, path, "exec"), module


def _load_module(arguments: list[str]) -> tuple[CodeType, ModuleType]:
    """Load a module as `python -m` does, and return (code, module object).

    For a package, its `__main__` is loaded. Imports are resolved from the current folder first.
    """
    sys.argv = arguments
    sys.path[0] = os.getcwd()
    name = arguments[0]
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    code = None
    if spec is not None:
        # Namespace packages and extension modules have no code.
        get_code = getattr(spec.loader, "get_code", None)
        if get_code is not None:
            code = get_code(spec.name)
    if spec is None or code is None:
        raise UserError(
            f"-m {name}: not a module that Python can run from here; check its name and the current"
            " folder"
        )
    module = _main_module(spec)
    module.__file__ = spec.origin
    sys.argv[0] = spec.origin or name
    return code, module


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Another name belongs to a failing import inside a parent package.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _main_module(spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__spec__ = spec
    if spec is None:
        module.__loader__ = None
        module.__package__ = None
    else:
        module.__loader__ = spec.loader
        module.__package__ = spec.parent
    module.__dict__["__builtins__"] = __builtins__
    return module


def _report_failure(error: Exception) -> int:
    """Record a failure, or print it if no launcher reads the record. Return the exit code."""
    exit_code, text, is_message = _describe(error)
    recorded = _write_record(error, exit_code, text, is_message)
    # Hooks of error trackers keep working. Their output is dropped, because torch's hook prints a
    # traceback that the launcher also prints.
    with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
        sys.excepthook(type(error), error, _user_frames(error.__traceback__))
    if not recorded:
        print(text, file=sys.stderr, flush=True)
    return exit_code


def _describe(error: Exception) -> tuple[int, str, bool]:
    """Return (exit code, text, whether the text is a message without a traceback)."""
    # plait.errors is not imported here. If the script did not import it, it raised no PlaitError.
    errors = sys.modules.get("plait.errors")
    if isinstance(error, UserError):
        return 2, str(error), True
    if errors is not None and isinstance(error, errors.PlaitError):
        return error.exit_code, str(error), True
    lines = traceback.format_exception(type(error), error, _user_frames(error.__traceback__))
    return 1, "".join(lines).rstrip(), False


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _write_record(error: Exception, exit_code: int, text: str, is_message: bool) -> bool:
    """Write the failure to torch's error file atomically. Return False without an error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now = time.time_ns()
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(now // 10**9)},
        },
        "plait": {"time_ns": now, "exit_code": exit_code, "pid": os.getpid(), "told": is_message},
    }
    try:
        with open(f"{path}.partial", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(f"{path}.partial", path)
    except OSError:
        return False
    return True


def _register_stack_signal() -> None:
    """Register a handler that writes all stacks to a file when the launcher sends a signal.

    faulthandler writes them from C, even while a call holds the GIL.
    """
    folder = os.environ.get("PLAIT_WATCH_FOLDER")
    number = os.environ.get("PLAIT_STACK_SIGNAL", "")
    if folder and number.isdigit() and os.path.isdir(folder):
        file = os.open(
            os.path.join(folder, f"{os.getpid()}.stack"),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )
        faulthandler.register(int(number), file=file, all_threads=True)


def _start_listing_imports() -> None:
    """Start a thread on one rank per machine that lists the imports for standby processes."""
    path = os.environ.get("PLAIT_STANDBY")
    if path and os.environ.get("LOCAL_RANK") == "0":
        threading.Thread(
            target=_list_imports, args=(path,), name="plait-imports", daemon=True
        ).start()


def _list_imports(path: str) -> None:
    previous = 0
    written = 0
    while True:
        time.sleep(IMPORT_POLL_SECONDS)
        names = [name for name in list(sys.modules) if name.partition(".")[0] in STANDBY_PACKAGES]
        # While the number grows, the script is still importing.
        if len(names) == previous and previous != written:
            packages = {name: _origin(name) for name in STANDBY_PACKAGES if name in names}
            with open(f"{path}.partial", "w", encoding="utf-8") as file:
                json.dump({"packages": packages, "modules": names}, file)
            os.replace(f"{path}.partial", path)
            written = previous
        previous = len(names)


def _origin(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return spec.origin if spec is not None else None


def _stand_by(descriptor: int) -> list[str]:
    """Import the modules that the launcher requests until this process becomes a rank.

    Returns:
        The arguments of the rank.
    """
    # The folder of this file must not be searched, and the folder of the script is not known yet.
    sys.path[0] = sysconfig.get_path("stdlib")
    connection = socket.socket(fileno=descriptor)
    while True:
        message, files, *_ = socket.recv_fds(connection, 4096, 2)
        # The launcher has closed its end of the connection, so no restart follows.
        if not message:
            sys.exit(0)
        # Several import requests can arrive in one message.
        request = message.decode().strip()
        if request.startswith("run "):
            break
        with (
            contextlib.suppress(OSError),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            _import_listed(os.environ["PLAIT_STANDBY"])
        connection.sendall(b"ready\n" * len(request.splitlines()))
    connection.close()

    path = request.removeprefix("run ")
    with open(path, encoding="utf-8") as file:
        order = json.load(file)
    os.unlink(path)
    # Standard output and standard error of the rank.
    for number, received in zip(order["files"], files, strict=True):
        os.dup2(received, number)
        os.close(received)
    # The rank gets the environment of the launch, not that of this process.
    os.environ.clear()
    os.environ.update(order["environment"])
    arguments: list[str] = order["arguments"]
    # The first argument is the process id of the launcher.
    return arguments[1:]


def _import_listed(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        listed = json.load(file)
    # A script can bring its own copy of a package, which must not be replaced by the installed one.
    same_packages = {name for name, origin in listed["packages"].items() if _origin(name) == origin}
    for name in listed["modules"]:
        if name.partition(".")[0] in same_packages:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _die_with(launcher: int) -> None:
    """Request that the kernel kill this process when its launcher dies.

    This works on Linux only. Elsewhere the launcher has to send signals.
    """
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG of <sys/prctl.h>.
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # The launcher may have died before prctl took effect.
    if os.getppid() != launcher:
        sys.exit(f"the launcher (process {launcher}) has ended; not starting")


if __name__ == "__main__":
    main(sys.argv[1:])
