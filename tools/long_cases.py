"""tests/long_cases.txt: cases that only `make proof` runs, so that `make test` stays short.

    python -m tools.long_cases build/results/test-*.xml     choose from the durations of a whole run of `make test`, and write the list

A function with several cases gives up at most half of them, those that took longest and at least 0.5 s; those that notice a planted
defect (benchmarks/results/mutants.json) stay. Cases that are in the list already stay in it.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tools.mutants.report import load

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "long_cases.txt"
SECONDS = 0.5


def durations(results: Iterable[Path]) -> dict[str, float]:
    """Node id to seconds."""
    found = {}
    for path in results:
        for case in ElementTree.parse(path).iter("testcase"):
            parts = case.get("classname", "").split(".")
            last = next(
                (index for index, part in enumerate(parts) if part.startswith("test_")), None
            )
            if last is None:  # a file that was skipped whole
                continue
            file = "/".join(parts[: last + 1]) + ".py"
            found["::".join([file, *parts[last + 1 :], case.get("name", "")])] = float(
                case.get("time", "0")
            )
    return found


def chosen(seconds: dict[str, float], staying: frozenset[str]) -> list[str]:
    """Those to leave out."""
    functions = defaultdict(list)
    for case in seconds:
        functions[case.split("[")[0]].append(case)
    found: list[str] = []
    for cases in functions.values():
        cases.sort(key=lambda case: -seconds[case])
        long = [
            case
            for case in cases
            if seconds[case] >= SECONDS
            and case not in staying
            and not case.startswith("tests/architecture/")
        ]
        found += long[: len(cases) // 2]
    return found


def main(paths: list[str]) -> None:
    """See the module."""
    mutants, _ = load()
    staying = frozenset(entry["caught_by"] for entry in mutants.values())
    before = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    seconds = durations(map(Path, paths))
    new = chosen(seconds, staying)
    LIST.write_text("".join(f"{case}\n" for case in sorted({*before, *new})), encoding="utf-8")
    print(f"{len(new)} cases of {sum(seconds[case] for case in new):.0f} s are left to make proof")


if __name__ == "__main__":
    main(sys.argv[1:])
