"""Copies of the project that hold a defect, and commands that run in them with a time limit."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(root: Path = ROOT, /, **variables: str) -> dict[str, str]:
    """Return the environment of a command that imports the sources below `root`."""
    paths = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **paths, **variables}


class ProjectCopy:
    """A new copy of the files of the project, without its history and what git ignores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
        # Python compares whole seconds and sizes, and would run the old compiled file.
        for compiled in (self.folder / name).parent.glob(f"__pycache__/{Path(name).stem}.*"):
            compiled.unlink()

    @contextmanager
    def planted(self, name: str, text: str) -> Iterator[None]:
        """Replace the text of a file inside the context, and restore that of the project."""
        self.write(name, text)
        try:
            yield
        finally:
            self.write(name, (ROOT / name).read_text(encoding="utf-8"))

    def run(self, *arguments: str, limit_seconds: float, log: Path, **variables: str) -> None:
        """Run Python in the copy and write what it prints to `log`. No process of it is left."""
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=environment(self.folder, **variables),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(limit_seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
