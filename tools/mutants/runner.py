"""Runs the tests against one mutant at a time, each in a copy of the project of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.catalogue import ROOT, Mutant

FIRST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
NOT_RUN = 5
"""pytest's exit code where no test was found."""


@dataclass(frozen=True)
class CutResult:
    """How a mutant fared."""

    caught_by: str
    """The first test that failed; empty where none did."""
    why: str
    """The first line of its message."""
    seconds: float
    """From the start of the tests to that failure."""
    ran: str
    """What ran: `reaching` tests or `everything`."""


class Copy:
    """A copy of the project's files (tracked and new ones), without its history."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Anew, whatever was there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)

    def write(self, name: str, text: str) -> None:
        """Replace a file. Python compares whole seconds and sizes, so compiled copies are removed."""
        (self.folder / name).write_text(text, encoding="utf-8")
        for compiled in (self.folder / name).parent.glob(f"__pycache__/{Path(name).stem}.*"):
            compiled.unlink()

    def restore(self, name: str) -> None:
        """The file as it is in the project."""
        self.write(name, (ROOT / name).read_text(encoding="utf-8"))

    def pytest(
        self, *options: str, limit: float, log: Path, **environment: str
    ) -> tuple[int | None, str]:
        """Exit code (None: ended after `limit` seconds) and output. All processes of the run are gone afterwards."""
        return self.run(
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-rfE",
            "-p",
            "no:cacheprovider",
            *options,
            limit=limit,
            log=log,
            **environment,
        )

    def run(
        self, *arguments: str, limit: float, log: Path, **environment: str
    ) -> tuple[int | None, str]:
        """The same for any of Python's command lines."""
        env = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "src"),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        command = [sys.executable, *arguments]
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, log.read_text(encoding="utf-8", errors="replace")


def run_mutant(
    mutant: Mutant, copy: Copy, tests: list[str] | None, *, limit: float, log: Path
) -> CutResult:
    """Runs `tests`, in this order (None: all), until the first failure. A run that does not end within `limit` seconds counts as noticed:
    the suite would not have ended either."""
    ran = "everything" if tests is None else "reaching"
    copy.write(mutant.file, mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8")))
    started = time.monotonic()
    try:
        arguments = log.with_suffix(".args")
        arguments.write_text("\n".join(tests or ["tests"]) + "\n", encoding="utf-8")
        code, output = copy.pytest("-x", f"@{arguments}", limit=limit, log=log)
    finally:
        copy.restore(mutant.file)
    seconds = round(time.monotonic() - started, 1)
    if code is None:
        return CutResult("(hangs)", f"no end within {limit:.0f} s", seconds, ran)
    if code in (0, NOT_RUN):
        return CutResult("", "", seconds, ran)
    found = FIRST.search(output)
    if found is None:
        return CutResult("(does not start)", output.strip().rpartition("\n")[2][:160], seconds, ran)
    return CutResult(found[1], (found[2] or "")[:160], seconds, ran)
