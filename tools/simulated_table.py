"""Write docs/development/simulated_device.md: configurations on the simulated device, with their
largest difference and races.

    python -m tools.simulated_table build/results/simulated.xml

The numbers are those that the tests record, and the races that the device counts.
"""

import math
import platform
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from benchmarks.common.report import ROOT, markdown, with_sections
from tools import junit

PAGE = ROOT / "docs" / "development" / "simulated_device.md"
HEADER = ("devices", "configuration", "compared with", "largest difference", "races", "")


def page(results: list[junit.Result], date: str) -> str:
    rows = []
    devices: Counter[int] = Counter()
    races = failures = 0
    worst = 0.0
    for result in results:
        values = result.properties
        # A test that failed before it recorded anything is listed by its name.
        if "configuration" not in values and result.outcome != "failed":
            continue
        count = int(values.get("devices", 0))
        difference = float(values.get("difference", "nan"))
        compared_with = values.get("compared with", "")
        cells = [str(count), values.get("configuration", result.test), compared_with]
        cells += [f"{difference:.1e}", values.get("races", "0"), result.outcome]
        rows.append(cells)
        devices[count] += 1
        races += int(values.get("races", 0))
        failures += result.outcome == "failed"
        if compared_with.startswith("one process") and not math.isnan(difference):
            worst = max(worst, difference)
    rows.sort(key=lambda cells: (int(cells[0]), cells[1]))
    counts = ", ".join(f"{devices[count]} on {count}" for count in sorted(devices))
    text = (
        f"**{len(rows)} configurations ({counts} devices), {races} races, {failures} failures.** "
        "The largest difference to one process on the CPU, in float64, is "
        f"{worst:.1e} of the largest value of its tensor. torch {version('torch')}, "
        f"Python {platform.python_version()}, {date}.\n\n{markdown(HEADER, rows, right=())}"
    )
    return with_sections(PAGE, {"results": text})


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    if not files:
        sys.exit("pass the JUnit files of the tests")
    date = max(map(junit.began, files))[:10]
    PAGE.write_text(page(list(junit.results(files)), date), encoding="utf-8")
