"""Write tests/long_cases.txt: cases that only `make proof` runs, so that `make test` stays short.

    python -m tools.long_cases build/results/test-*.xml    choose by the durations of `make test`

A function with several cases gives up at most half of them: those that took longest and at least
0.5 s. Cases that notice a planted defect (benchmarks/results/mutants.json) stay. Cases that are in
the list already stay in it.
"""

import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.common.report import ROOT
from tools import junit
from tools.mutants.report import load

LIST = ROOT / "tests" / "long_cases.txt"
SECONDS = 0.5


def main(paths: list[str]) -> None:
    mutants, _ = load()
    noticing = {entry["caught_by"] for entry in mutants.values()}
    functions: dict[str, list[junit.Result]] = defaultdict(list)
    for result in junit.results(map(Path, paths)):
        functions[result.test.split("[")[0]].append(result)

    names = set(LIST.read_text(encoding="utf-8").splitlines())
    count = 0
    seconds = 0.0
    for name, cases in functions.items():
        if name.startswith("tests/architecture/"):
            continue
        long = [case for case in cases if case.seconds >= SECONDS and case.test not in noticing]
        long.sort(key=lambda case: -case.seconds)
        for case in long[: len(cases) // 2]:
            names.add(case.test)
            count += 1
            seconds += case.seconds
    LIST.write_text("\n".join([*sorted(names), ""]), encoding="utf-8")
    print(f"{count} cases of {seconds:.0f} s run in make proof")


if __name__ == "__main__":
    main(sys.argv[1:])
