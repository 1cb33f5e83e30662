"""Processes that stand by: they are what a rank that was started in the ordinary way is, with imports done."""

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
print(json.dumps([known, sys.argv, sys.path[0], os.environ.get("NAME"), os.environ.get("BEFORE"), __name__]))
print("told", file=sys.stderr)
sys.exit(7)
"""

SAID: list[str] = []


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.setenv("BEFORE", "x")
    (tmp_path / "launch").mkdir()
    standby = Standby(2, tmp_path / "launch", WORKER, SAID.append)
    SAID.clear()
    monkeypatch.setenv(VARIABLE, standby.environment()[VARIABLE])
    yield standby
    standby.close()


def imports(standby, *names, **changed):
    """What a rank lists."""
    origins = {name: importlib.util.find_spec(name).origin for name in names} | changed  # type: ignore[union-attr]
    path = Path(standby.environment()[VARIABLE])
    path.with_suffix(".new").write_text(json.dumps({"packages": origins, "modules": list(names)}))
    path.with_suffix(".new").replace(path)


def wait(standby, count=2):
    ends = time.monotonic() + 60
    while sum(process.ready for process in standby._processes) < count:
        assert time.monotonic() < ends
        standby.poll()
        time.sleep(0.02)


def run(standby, folder, **environment):
    """(exit code, what the script printed) of a process that stood by."""
    (folder / "script.py").write_text(SCRIPT)
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        script = [str(WORKER), str(os.getpid()), str(folder / "script.py")]
        command = [sys.executable, "-u", *script, "a", "-m"]
        taken = standby.take(command, {**os.environ, **environment}, (out, err))
    if taken is None:
        return None
    return taken.wait(), json.loads((folder / "out").read_text()), (folder / "err").read_text()


def test_one_that_stood_by_is_a_rank(two, tmp_path):
    """It has its arguments, its environment and its files, and its script finds the interpreter as without; a module that it brings itself
    in place of the ranks' is not imported, nor is one that is none of those that are safe."""
    two.poll()
    assert not two._processes, "nobody has listed imports"
    imports(two, "numpy", "torch", torch="/elsewhere/torch/__init__.py")
    two.poll()
    assert run(two, tmp_path) is None, "none is ready yet"
    wait(two)
    two.poll()
    assert len(SAID) == 1 and "2 processes standing by" in SAID[0] and " 0 B" not in SAID[0]
    script = str(tmp_path / "script.py")
    assert run(two, tmp_path, NAME="y") == (
        7,
        [["numpy"], [script, "a", "-m"], str(tmp_path), "y", "x", "__main__"],
        "told\n",
    )
    assert not list(two.folder.glob("standby-*")), "an environment may hold secrets"
    two._processes[0].popen.kill()
    two._processes[0].popen.wait()
    assert run(two, tmp_path) is None, "the other has ended"
    wait(two)
    assert len(two._processes) == 2
    left = [process.popen for process in two._processes]
    two.close()
    assert all(popen.poll() is not None for popen in left)


def test_more_imports_are_told(two, tmp_path):
    imports(two, "json")
    wait(two)
    imports(two, "numpy")
    two.poll()
    wait(two)
    code, printed, _ = run(two, tmp_path)
    assert (code, printed[0]) == (7, ["numpy"])
