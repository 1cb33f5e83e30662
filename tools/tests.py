"""Run the tests in two concurrent pytest processes of about the same length.

    python tools/tests.py                    all tests
    python tools/tests.py -k topology        the tests of both that pytest's options select
    python tools/tests.py tests/unit -x      one pytest process for these paths

Each line is printed with the name of its part, and the failures of both are repeated at the end.
Results are written to build/results/test-<part>.xml. The exit code is that of the part that failed.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "results"
PARTS = {
    "alone": ("tests/unit", "tests/fake", "tests/security", "tests/architecture"),
    "together": ("tests/parity", "tests/reports", "tests/integration"),
}
"""Tests in one process, and tests that start processes."""
SEPARATE = ("tests/simulated_device",)
"""Tests of `make simulated`, which need a compiler and both cores."""
NOTHING_CHOSEN = 5
"""Exit code of pytest if no test was selected, which is no failure if the other part has tests."""
BY_HAND = {
    *("--pdb", "--trace", "-s", "--capture=no", "--co", "--collect-only"),
    *("--fixtures", "--markers", "-h", "--help"),
}
"""Options for interactive use, with which one pytest process runs."""


def is_path(argument: str) -> bool:
    return not argument.startswith("-") and (ROOT / argument.split("::")[0]).exists()


def side_by_side(arguments: list[str]) -> int:
    processes = []
    readers = []
    failures: list[str] = []
    for part, paths in PARTS.items():
        # Each part has its own cache, for `--lf`.
        options = [f"--junitxml={RESULTS}/test-{part}.xml", "-o", f"cache_dir=.pytest_cache/{part}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *paths, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        readers.append(Thread(target=show, args=(part, process, failures)))
        readers[-1].start()
    for reader in readers:
        with suppress(KeyboardInterrupt):  # pytest got it, too
            reader.join()
        reader.join()
    print("\n".join([*left_out(), *failures]), flush=True)
    return exit_code([process.wait() for process in processes])


def left_out() -> list[str]:
    """Return a line per folder of tests that has its own command."""
    sys.path.insert(0, str(ROOT))
    from tests.simulated_device.build import why_not

    reason = why_not()
    note = f", which would skip them: {reason}" if reason else ""
    return [f"not run here: {path} (make simulated){note}" for path in SEPARATE]


def exit_code(codes: list[int]) -> int:
    """Return the exit code of both parts: that of a failure, or that no test was selected."""
    for code in codes:
        if code not in (0, NOTHING_CHOSEN):
            return max(code, 1)
    return min(codes)


def show(part: str, process: subprocess.Popen[str], failures: list[str]) -> None:
    """Print the lines of a part, and add those that name a failed test to `failures`."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{part:8} | {line}", end="", flush=True)
        if line.startswith(("FAILED ", "ERROR ")):
            failures.append(f"{part:8} | {line.rstrip()}")


def main(arguments: list[str]) -> int:
    if BY_HAND & set(arguments) or any(map(is_path, arguments)):
        command = [sys.executable, "-m", "pytest", f"--junitxml={RESULTS}/test.xml", *arguments]
        return subprocess.call(command, cwd=ROOT)
    return side_by_side(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
