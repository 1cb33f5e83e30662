"""Plants every defect of the list, one at a time, and says which test notices it.

    python -m tools.mutants                 all of them; writes benchmarks/results/mutants.json and docs/development/mutants.md
    python -m tools.mutants A1 wrong-norm   these only; the results of the others stay
    python -m tools.mutants --reaching-only     only the tests that reach a mutant; survivors are left for
    python -m tools.mutants --survivors     those that no test noticed the last time, against the whole suite
    python -m tools.mutants --check         only: does every defect of the list still apply?

A mutant runs the tests that reach its lines, first the one that noticed it the last time, and stops at the first failure; survivors run
everything, and then `plait verify`. Exit code 1 where fewer than 95 of 100 are noticed by the tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.mutants import page, results, verified
from tools.mutants.catalogue import ROOT, Mutant, load
from tools.mutants.probes import MARKS, probed
from tools.mutants.runner import Copy, CutResult, run_mutant

BUILD = ROOT / "build/mutants"
SIDE_BY_SIDE = 2
LIMIT = 600.0
"""Seconds for one mutant's tests."""
WANTED = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ids", nargs="*", help="mutants to run; all by default")
    parser.add_argument(
        "--survivors",
        action="store_true",
        help="run those that no test noticed the last time, against everything",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only see whether every defect applies and is valid Python",
    )
    parser.add_argument(
        "--reaching-only", action="store_true", help="leave survivors for a later --survivors"
    )
    parser.add_argument(
        "--reached",
        type=Path,
        help="use this file of an earlier run instead of finding out which tests reach what",
    )
    arguments = parser.parse_args()
    mutants = load()
    unknown = sorted(set(arguments.ids) - {mutant.id for mutant in mutants})
    if unknown:
        parser.error(
            f"no mutant is called {', '.join(unknown)}; the list has {', '.join(mutant.id for mutant in mutants)}"
        )
    check(mutants)
    if arguments.check:
        print(f"{len(mutants)} mutants apply")
        return 0
    known, _ = results.load()
    chosen = [m for m in mutants if not arguments.ids or m.id in arguments.ids]
    if arguments.survivors:
        chosen = [m for m in chosen if not known.get(m.id, {}).get("caught_by")]
    BUILD.mkdir(parents=True, exist_ok=True)
    reached = None if arguments.survivors else tests_of(arguments.reached or find_reached(mutants))
    for mutant, outcome in run(chosen, known, reached, thorough=not arguments.reaching_only):
        known[mutant.id] = asdict(outcome)
        if not outcome.caught_by and outcome.ran == "everything":
            known[mutant.id]["verify"] = verified.notices(mutant, Copy(BUILD / "verify"))
        results.store({m.id: known[m.id] for m in mutants if m.id in known})
    page.write(mutants, *results.load())
    missed = [m.id for m in mutants if m.id in known and not known[m.id]["caught_by"]]
    share = 1 - len(missed) / max(1, len(known))
    print(
        f"{share:.1%} of {len(known)} mutants are noticed by the tests; not noticed: {', '.join(missed) or 'none'}"
    )
    return 0 if share >= WANTED else 1


def check(mutants: list[Mutant]) -> None:
    """Raises ValueError for a mutant that does not apply to the sources as they are, or changes nothing."""
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        if ast.dump(ast.parse(mutant.applied(text))) == ast.dump(ast.parse(text)):
            raise ValueError(f"mutant {mutant.id} changes nothing")


def find_reached(mutants: list[Mutant]) -> Path:
    """Runs the whole suite with probes; returns a file with one line of JSON a test."""
    copy = Copy(BUILD / "probed")
    copy.make()
    by_file = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    for name, members in by_file.items():
        copy.write(name, probed((ROOT / name).read_text(encoding="utf-8"), members))
    marks = BUILD / "marks"
    log = marks.with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    print("which tests reach which mutant: one run of the suite with probes ...", flush=True)
    copy.run(
        "tools/tests.py",
        "-p",
        "tools.mutants.probes",
        limit=9 * LIMIT,
        log=BUILD / "probed.log",
        **{MARKS: str(marks)},
    )
    if not log.exists():
        raise SystemExit(f"the suite did not start; {BUILD / 'probed.log'} says why")
    return log


def tests_of(log: Path) -> dict[str, list[tuple[str, float]]]:
    """Tests that reach a mutant and pass without it, with their seconds; the quickest files first, in the order of the suite within."""
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for line in log.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        for mutant in row["reached"] if not row["failed"] else ():
            found[mutant].append((row["test"], row["seconds"]))
    ordered = {}
    for mutant, tests in found.items():
        of_file: dict[str, float] = defaultdict(float)
        for test, seconds in tests:
            of_file[test.partition("::")[0]] += seconds
        ordered[mutant] = sorted(tests, key=lambda entry: of_file[entry[0].partition("::")[0]])
    return ordered


def run(
    mutants: list[Mutant],
    known: dict[str, Any],
    reached: dict[str, list[tuple[str, float]]] | None,
    *,
    thorough: bool,
) -> Any:
    """Yields (mutant, outcome) in the list's order. `thorough`: survivors of the tests that reach them run everything."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    for index in range(min(SIDE_BY_SIDE, len(mutants))):
        copy = Copy(BUILD / f"copy-{index}")
        copy.make()
        copies.put(copy)

    def one(mutant: Mutant) -> CutResult:
        copy = copies.get()
        try:
            log = BUILD / f"{mutant.id}.log"
            if reached is not None:
                last = known.get(mutant.id, {}).get("caught_by", "")
                tests = [test for test, _ in reached.get(mutant.id, [])]
                tests = [test for test in [last] if test in tests] + [
                    test for test in tests if test != last
                ]
                outcome = run_mutant(mutant, copy, tests, limit=LIMIT, log=log) if tests else None
                if outcome is not None and (outcome.caught_by or not thorough):
                    return outcome
            return run_mutant(mutant, copy, None, limit=3 * LIMIT, log=log)
        finally:
            copies.put(copy)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console()
    with (
        ThreadPoolExecutor(SIDE_BY_SIDE) as threads,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("mutants", total=len(mutants))
        for mutant, outcome in zip(mutants, threads.map(one, mutants), strict=True):
            said = f"noticed by {outcome.caught_by}" if outcome.caught_by else "NOT NOTICED"
            progress.console.print(
                f"{mutant.id}: {said} ({outcome.seconds:.0f} s)", soft_wrap=True, highlight=False
            )
            progress.advance(task)
            yield mutant, outcome


if __name__ == "__main__":
    sys.exit(main())
