"""Plant every defect of the catalogue, one at a time, and report which test notices it.

    python -m tools.mutants                 all of them
    python -m tools.mutants A1 wrong-norm   these only; the results of the others stay
    python -m tools.mutants --again         each against the test that noticed it the last time
    python -m tools.mutants --check         only check that every defect applies
    python -m tools.mutants --waits         take out the waits for a device instead (waits.py)

A mutant runs the tests that reach its lines, first the one that noticed it the last time, and stops
at the first failure. Survivors run all tests. Waits run the tests on the simulated device. The
results are benchmarks/results/mutants.json and docs/development/mutants.md, for waits waits.json
and waits.md in docs/development. The exit code is 1 if the tests notice fewer than 95 of 100.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue

from tools.mutants import reach, report
from tools.mutants.catalogue import Mutant, check, load
from tools.mutants.preloaded import run_pytest, server
from tools.mutants.project import ROOT, ProjectCopy
from tools.mutants.report import Outcome
from tools.mutants.waits import TESTS, waits

BUILD = ROOT / "build/mutants"
SIDE_BY_SIDE = 2
LIMIT_SECONDS = 1800.0
"""Time for the tests of one mutant."""
REQUIRED_SHARE = 0.95
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NO_TESTS = 5
"""Exit code of pytest if no test was selected."""
UNREACHED: Outcome = {"caught_by": "", "seconds": 0.0, "ran": "reaching"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ids", nargs="*", help="mutants to run; all by default")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--again", action="store_true", help="the test that noticed it, no other")
    parser.add_argument("--waits", action="store_true", help="waits for a device")
    options = parser.parse_args()

    mutants = waits() if options.waits else load()
    record = report.WAITS if options.waits else report.DEFECTS
    by_id = {mutant.id: mutant for mutant in mutants}
    unknown = sorted(set(options.ids) - set(by_id))
    if unknown:
        names = ", ".join(by_id)
        parser.error(f"no mutant is called {', '.join(unknown)}; the catalogue has {names}")
    check(mutants)
    if options.check:
        print(f"{len(mutants)} mutants apply")
        return 0

    if options.waits:
        os.environ.setdefault("SIMULATED_DEVICE_TIMEOUT", "20")
    results, _ = report.load(record.results)
    selected = [mutant for mutant in mutants if not options.ids or mutant.id in options.ids]
    BUILD.mkdir(parents=True, exist_ok=True)
    everything: list[str] = []
    if options.again:
        tests = {}
        for mutant in selected:
            test = last_test(results, mutant)
            if "::" in test:
                tests[mutant.id] = [test]
        selected = [by_id[name] for name in tests]
    else:
        command: tuple[str, ...] = ("tools/tests.py",)
        everything = ["tests"]
        if options.waits:
            command = ("-m", "pytest", *TESTS)
            everything = list(TESTS)
        lines = reach.find(mutants, BUILD, command, limit_seconds=3 * LIMIT_SECONDS)
        tests = reach.tests_by_mutant(lines)
    for mutant, outcome in run(selected, results, tests, everything):
        results[mutant.id] = outcome
        current = {name: results[name] for name in by_id if name in results}
        report.store(current, record.results)
    page = report.page(mutants, *report.load(record.results), record)
    record.page.write_text(page, encoding="utf-8")

    recorded = [mutant for mutant in mutants if mutant.id in results]
    missed = [mutant.id for mutant in recorded if not last_test(results, mutant)]
    share = 1 - len(missed) / max(1, len(recorded))
    names = ", ".join(missed) or "noticed: 0"
    print(f"the tests notice {share:.1%} of {len(recorded)}; not {names}")
    return int(share < REQUIRED_SHARE)


def last_test(results: Mapping[str, Outcome], mutant: Mutant) -> str:
    """Return the test that noticed a mutant in its last run, or an empty string."""
    return str(results.get(mutant.id, UNREACHED)["caught_by"])


def run(
    mutants: list[Mutant],
    results: dict[str, Outcome],
    tests: dict[str, list[str]],
    everything: list[str],
) -> Iterator[tuple[Mutant, Outcome]]:
    """Run the tests against each mutant, and yield the outcomes in the order of the catalogue.

    Args:
        mutants: Mutants to run.
        results: Outcomes of earlier runs. The test that noticed a mutant runs first.
        tests: Tests that reach each mutant.
        everything: Arguments of pytest with which the survivors of those tests run, if any.
    """
    context = server()
    copies: SimpleQueue[ProjectCopy] = SimpleQueue()
    for index in range(min(SIDE_BY_SIDE, len(mutants))):
        copies.put(ProjectCopy(BUILD / f"copy-{index}"))

    def test(mutant: Mutant) -> Outcome:
        copy = copies.get()
        try:
            last = last_test(results, mutant)
            # A stable sort: the test that noticed the mutant the last time comes first.
            reaching = sorted(tests.get(mutant.id, []), key=lambda name: name != last)
            outcome = UNREACHED
            if reaching:
                outcome = UNREACHED | test_mutant(mutant, copy, reaching, context)
            if outcome["caught_by"] or not everything:
                return outcome
            return test_mutant(mutant, copy, everything, context) | {"ran": "everything"}
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        outcomes = threads.map(test, mutants)
        for number, (mutant, outcome) in enumerate(zip(mutants, outcomes, strict=True), 1):
            by = outcome["caught_by"] or "NOTHING"
            place = f"{number}/{len(mutants)} {mutant.id}"
            print(f"{place}: noticed by {by} ({outcome['seconds']:.0f} s)", flush=True)
            yield mutant, outcome


def test_mutant(
    mutant: Mutant, copy: ProjectCopy, tests: list[str], context: ForkServerContext
) -> Outcome:
    """Run `tests` in this order until the first failure.

    Tests that do not end within the limit count as a failure: `make test` would not end either.
    """
    log = BUILD / f"{mutant.id}.log"
    arguments = log.with_suffix(".args")
    arguments.write_text("\n".join(tests) + "\n", encoding="utf-8")
    options = ("-x", "-q", "--no-header", "-rfE", "-p", "no:cacheprovider", f"@{arguments}")
    began = time.monotonic()
    with copy.planted(mutant.file, mutant.applied()):
        code, output = run_pytest(
            context, copy.folder, *options, limit_seconds=LIMIT_SECONDS, log=log
        )
    failure = FIRST_FAILURE.search(output)
    caught_by = "(does not start)"
    if code in (0, NO_TESTS):
        caught_by = ""
    elif code is None:
        caught_by = "(hangs)"
    elif failure:
        caught_by = failure[1]
    return {"caught_by": caught_by, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
