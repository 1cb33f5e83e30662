"""A standby process becomes a rank like any other, with its imports done."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest

from plait.cli.launching.agent import WORKER
from plait.cli.launching.standby import VARIABLE, Standby

SCRIPT = """
import json, os, sys
known = sorted(name for name in ("numpy", "torch") if name in sys.modules)
variables = [os.environ.get("NAME"), os.environ.get("BEFORE")]
print(json.dumps([known, sys.argv, sys.path[0], *variables, __name__]))
print("an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def messages():
    return []


@pytest.fixture
def standby(tmp_path, monkeypatch, messages):
    """Return two standby processes, which start when a rank lists its imports."""
    monkeypatch.setenv("BEFORE", "x")
    (tmp_path / "launch").mkdir()
    standby = Standby(2, tmp_path / "launch", WORKER, messages.append)
    monkeypatch.setenv(VARIABLE, standby.environment()[VARIABLE])
    yield standby
    standby.close()


def list_imports(standby, *names, **changed):
    """List modules and their files, as a rank does."""
    origins = {name: importlib.util.find_spec(name).origin for name in names} | changed
    path = Path(standby.environment()[VARIABLE])
    path.with_suffix(".new").write_text(json.dumps({"packages": origins, "modules": list(names)}))
    path.with_suffix(".new").replace(path)


def wait_until_ready(standby):
    """Wait for both processes. The private list shows when they are ready."""
    deadline = time.monotonic() + 60
    while sum(process.ready for process in standby._processes) < 2:
        assert time.monotonic() < deadline
        standby.poll()
        time.sleep(0.02)


def run(standby, folder, **environment):
    """Run the script in a standby process, and return its exit code, output and errors.

    Returns None if no process is ready.
    """
    (folder / "script.py").write_text(SCRIPT)
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        script = [str(WORKER), str(os.getpid()), str(folder / "script.py")]
        command = [sys.executable, "-u", *script, "a", "-m"]
        process = standby.take(command, {**os.environ, **environment}, (out, err))
    if process is None:
        return None
    return process.wait(), json.loads((folder / "out").read_text()), (folder / "err").read_text()


def test_a_standby_process_becomes_a_rank(standby, messages, tmp_path):
    standby.poll()
    # Nobody has listed imports.
    assert not standby._processes
    # The script brings its own torch, which must not be imported from where it is installed.
    list_imports(standby, "numpy", "torch", torch="/elsewhere/torch/__init__.py")
    standby.poll()
    # None is ready yet.
    assert run(standby, tmp_path) is None

    wait_until_ready(standby)
    standby.poll()
    (message,) = messages
    assert "2 processes standing by" in message and " 0 B" not in message
    arguments = [str(tmp_path / "script.py"), "a", "-m"]
    printed = [["numpy"], arguments, str(tmp_path), "y", "x", "__main__"]
    assert run(standby, tmp_path, NAME="y") == (7, printed, "an error\n")
    # Files with the environment are removed, because it may contain secrets.
    assert not list(standby.folder.glob("standby-*"))

    # A process that has ended is replaced.
    standby._processes[0].popen.kill()
    standby._processes[0].popen.wait()
    assert run(standby, tmp_path) is None
    wait_until_ready(standby)
    assert len(standby._processes) == 2
    processes = [process.popen for process in standby._processes]
    standby.close()
    assert all(process.poll() is not None for process in processes)


def test_further_imports_are_done(standby, tmp_path):
    list_imports(standby, "json")
    wait_until_ready(standby)
    list_imports(standby, "numpy")
    standby.poll()
    wait_until_ready(standby)
    code, printed, _ = run(standby, tmp_path)
    assert (code, printed[0]) == (7, ["numpy"])
