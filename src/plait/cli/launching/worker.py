"""What `plait launch` starts on every rank: runs the user's script or module as `__main__` and
records how it fails.

Not imported but run by its path, before anything of Plait or torch is imported, so that the script
finds the interpreter as `python script.py` leaves it. An exception goes to the file the launcher
watches, and is printed here only where there is no such file: the launcher prints the first failure
first. The process never outlives its launcher.

    python worker.py LAUNCHER_PID script.py arguments... python worker.py LAUNCHER_PID -m module
    arguments... python worker.py LAUNCHER_PID --stand-by DESCRIPTOR      imports what the ranks
    have, until it is told to be one (`standby`)
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
"""A rank that failed but cannot end (a thread or a communicator blocks its exit) is ended after
this, with every thread's stack.
"""
THREADS_SECONDS = 2
"""Of them for threads that are not daemons: others wait meanwhile."""


IMPORTED = (
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
"""Packages that are imported while a process stands by: nothing in them is different on another
rank.
"""
LOOK_SECONDS = 1.0
"""Imports that rest for this long are listed."""


class UserError(Exception):
    """A script or module that cannot be started: told without a traceback."""


def main(arguments: list[str]) -> None:
    """Run it. Exits with the script's own exit code, 1 after an exception, or a PlaitError's
    code.
    """
    _die_with(int(arguments[0]))
    if arguments[1] == "--stand-by":
        arguments = [arguments[0], *_stand_by(int(arguments[2]))]
    faulthandler.enable()
    _write_stacks_when_asked()
    _list_imports()
    try:
        code, module = (
            _load_module(arguments[2:]) if arguments[1] == "-m" else _load_script(arguments[1:])
        )
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        faulthandler.dump_traceback_later(EXIT_TIMEOUT_SECONDS, exit=True)
        _leave(_fail(error))


def _leave(exit_code: int) -> None:
    """End as the interpreter does, with its threads and what is registered for the end, but for
    taking the modules apart: that takes seconds with torch, in which other ranks wait for this one.
    """
    ends = time.monotonic() + THREADS_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join(max(0.0, ends - time.monotonic()))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code)


def _load_script(arguments: list[str]) -> tuple[CodeType, ModuleType]:
    path = arguments[0]
    sys.argv = arguments
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
    """As `python -m` does it: a package means its `__main__`, and the current folder is where
    imports begin.
    """
    sys.argv = arguments
    sys.path[0] = os.getcwd()
    name = arguments[0]
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise UserError(
            f"-m {name}: not a module that Python can run from here; check its name and the current"
            " folder"
        )
    module = _main_module(spec)
    module.__file__ = spec.origin
    sys.argv[0] = spec.origin or name
    return code, module


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _main_module(spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__spec__ = spec
    module.__loader__ = spec.loader if spec is not None else None
    module.__package__ = spec.parent if spec is not None else None
    module.__dict__["__builtins__"] = __builtins__
    return module


def _fail(error: Exception) -> int:
    """Record the failure, or print it where no launcher reads the record; the exit code."""
    exit_code, text, told = _describe(error)
    recorded = _record(error, exit_code, text, told)
    # Hooks that report elsewhere (an error tracker) keep working; what they print (torch's does)
    # the launcher tells better.
    with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
        sys.excepthook(type(error), error, _own_frames_removed(error.__traceback__))
    if not recorded:
        print(text, file=sys.stderr, flush=True)
    return exit_code


def _describe(error: Exception) -> tuple[int, str, bool]:
    """(exit code, what to print, whether that is a sentence for the user and no traceback)."""
    errors = sys.modules.get("plait.errors")
    if isinstance(error, UserError):
        return 2, str(error), True
    if errors is not None and isinstance(error, errors.PlaitError):
        return error.exit_code, str(error), True
    lines = traceback.format_exception(type(error), error, _own_frames_removed(error.__traceback__))
    return 1, "".join(lines).rstrip(), False


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _record(error: Exception, exit_code: int, text: str, told: bool) -> bool:
    """Write the failure where the launcher looks, in the format of torch's error files,
    atomically.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now = time.time_ns()
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(now // 10**9)},
        },
        "plait": {"time_ns": now, "exit_code": exit_code, "pid": os.getpid(), "told": told},
    }
    try:
        with open(f"{path}.partial", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(f"{path}.partial", path)
    except OSError:
        return False
    return True


def _write_stacks_when_asked() -> None:
    """The launcher's signal writes the stacks of all threads, from C: also while a call holds the
    interpreter's lock.
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


def _list_imports() -> None:
    """Where a launch has processes that stand by, one rank of the machine keeps a list of its
    imports for them, in a thread.
    """
    path = os.environ.get("PLAIT_STANDBY")
    if path and os.environ.get("LOCAL_RANK") == "0":
        threading.Thread(target=_keep_list, args=(path,), name="plait-imports", daemon=True).start()


def _keep_list(path: str) -> None:
    seen = written = 0
    while True:
        time.sleep(LOOK_SECONDS)
        names = [name for name in list(sys.modules) if name.partition(".")[0] in IMPORTED]
        if len(names) == seen != written:
            packages = {name: _origin(name) for name in IMPORTED if name in names}
            with open(f"{path}.partial", "w", encoding="utf-8") as file:
                json.dump({"packages": packages, "modules": names}, file)
            os.replace(f"{path}.partial", path)
            written = seen
        seen = len(names)


def _origin(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return spec.origin if spec is not None else None


def _stand_by(descriptor: int) -> list[str]:
    """Import what the ranks list, whenever the launcher says that there is more; then be a rank:
    its arguments.
    """
    # not the folder of this file; the rank's own is not known yet
    sys.path[0] = sysconfig.get_path("stdlib")
    line = socket.socket(fileno=descriptor)
    while True:
        text, files, *_ = socket.recv_fds(line, 4096, 2)
        if not text:
            sys.exit(0)
        order = text.decode().strip()
        if order.startswith("run "):
            break
        with (
            contextlib.suppress(OSError),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            _import(os.environ["PLAIT_STANDBY"])
        line.sendall(b"ready\n" * len(order.splitlines()))
    line.close()
    with open(order[4:], encoding="utf-8") as file:
        told = json.load(file)
    os.unlink(order[4:])
    for number, given in zip(told["files"], files, strict=True):
        os.dup2(given, number)
        os.close(given)
    os.environ.clear()
    os.environ.update(told["environment"])
    arguments: list[str] = told["arguments"]
    return arguments[1:]  # after the launcher's process


def _import(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        listed = json.load(file)
    # a script may bring its own
    alike = {name for name, origin in listed["packages"].items() if _origin(name) == origin}
    for name in listed["modules"]:
        if name.partition(".")[0] in alike:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher dies without ending it (Linux; elsewhere
    the launcher's signals must do).
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit(f"the launcher (process {launcher}) has ended; not starting")


if __name__ == "__main__":
    main(sys.argv[1:])
