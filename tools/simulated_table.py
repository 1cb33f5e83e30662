"""Write docs/development/simulated_device.md: configurations on the simulated device, with their largest difference and races.

    python tools/simulated_table.py build/results/simulated.xml     take results (junit) of tests/simulated_device, and write the page

The numbers are the tests' own records: each test records what it compared, and the device counts the races.
"""

from __future__ import annotations

import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "development" / "simulated_device.md"


@dataclass(frozen=True)
class Row:
    """One test."""

    configuration: str
    devices: int
    compared_with: str
    difference: float
    races: int
    outcome: str


def rows(results: Iterable[Path]) -> list[Row]:
    """Of tests that record a configuration; a test that failed before it did has its name instead."""
    found = []
    for path in results:
        for case in ElementTree.parse(path).iter("testcase"):
            kept = {
                entry.get("name", ""): entry.get("value", "") for entry in case.iter("property")
            }
            failed = case.find("failure") is not None or case.find("error") is not None
            if "configuration" not in kept and not failed:
                continue
            found.append(
                Row(
                    kept.get("configuration", case.get("name", "")),
                    int(kept.get("devices", 0)),
                    kept.get("compared with", ""),
                    float(kept.get("difference", "nan")),
                    int(kept.get("races", 0)),
                    "failed" if failed else "passed",
                )
            )
    return sorted(found, key=lambda row: (row.devices, row.configuration))


def newest(results: Iterable[Path]) -> str:
    """Return the date of the last of these runs, or "an unknown date" where no file has one."""
    suites = (suite for path in results for suite in ElementTree.parse(path).iter("testsuite"))
    return (
        max((suite.get("timestamp", "")[:10] for suite in suites), default="") or "an unknown date"
    )


def page(found: list[Row], date: str) -> str:
    """Return the text of the page for tests that ran on `date`."""
    worst = max(
        (row.difference for row in found if row.compared_with.startswith("one process")),
        default=float("nan"),
    )
    counts = ", ".join(
        f"{sum(row.devices == count for row in found)} on {count}"
        for count in sorted({row.devices for row in found})
    )
    lines = [
        "# On simulated GPUs",
        "",
        "Written by `tools/simulated_table.py` from the tests' own records; do not edit. `make simulated` runs the tests and leaves the",
        "records in `build/results/simulated.xml`; `make simulated-docs` runs more of them and writes this page.",
        "",
        "Every row is a training run on devices of the kind `cuda` with NCCL's streams and order of calls, simulated on the CPU",
        "(`tests/simulated_device`): copies and collectives are deferred until somebody waits for them, memory that was not written holds",
        "NaN, and two accesses that no wait orders are counted as a race. It shows that the program orders what GPUs do; it says nothing",
        "of their speed, nor of their kernels' rounding.",
        "",
        f"**{len(found)} configurations ({counts} devices), {sum(row.races for row in found)} races, "
        f"{sum(row.outcome != 'passed' for row in found)} failures.** The largest difference to one process on the CPU, in float64, is",
        f"{worst:.1e} of the largest value of its tensor. torch {version('torch')}, Python {platform.python_version()}, {date}.",
        "",
        "| devices | configuration | compared with | largest difference | races | |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.devices} | {row.configuration} | {row.compared_with} | {row.difference:.1e} | {row.races} | {row.outcome} |"
        for row in found
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    PAGE.write_text(page(rows(files), newest(files)), encoding="utf-8")
