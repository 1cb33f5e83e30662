"""Plant every defect of the catalogue, one at a time, and report which test notices it.

    python -m tools.mutants                 all of them
    python -m tools.mutants A1 wrong-norm   these only; the results of the others stay
    python -m tools.mutants --again         each against the test that noticed it the last time
    python -m tools.mutants --survivors     those that no test noticed, against all tests
    python -m tools.mutants --check         only check that every defect applies
    python -m tools.mutants --waits         take out the waits for a device instead (waits.py)

A mutant runs the tests that reach its lines, first the one that noticed it the last time, and stops
at the first failure. Survivors run all tests, and then `plait verify`. Waits run the tests on the
simulated device. The results are benchmarks/results/mutants.json and docs/development/mutants.md,
for waits waits.json and waits.md in docs/development. The exit code is 1 if the tests notice fewer
than 95 of 100.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tools.mutants import reach, report
from tools.mutants.catalogue import Mutant, check, load
from tools.mutants.preloaded import run_pytest, server
from tools.mutants.project import ROOT, ProjectCopy
from tools.mutants.waits import TESTS, waits

BUILD = ROOT / "build/mutants"
SIDE_BY_SIDE = 2
LIMIT_SECONDS = 1800.0
"""Time for the tests of one mutant."""
REQUIRED_SHARE = 0.95
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NO_TESTS = 5
"""Exit code of pytest if no test was selected."""
NOT_EQUAL = 3
"""Exit code of `plait verify` if a layout computes something else than one process."""

Outcome = dict[str, Any]
"""`caught_by` (empty if no test failed), `seconds`, and `ran`: `reaching` or `everything`."""
UNREACHED: Outcome = {"caught_by": "", "seconds": 0.0, "ran": "reaching"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ids", nargs="*", help="mutants to run; all by default")
    parser.add_argument("--survivors", action="store_true", help="those that no test noticed")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--again", action="store_true", help="the test that noticed it, no other")
    parser.add_argument("--waits", action="store_true", help="waits for a device")
    parser.add_argument("--reached", type=Path, help="file of an earlier run with probes")
    options = parser.parse_args()

    if options.waits:
        os.environ.setdefault("SIMULATED_DEVICE_TIMEOUT", "20")
    mutants = waits() if options.waits else load()
    record = report.WAITS if options.waits else report.DEFECTS
    everything = list(TESTS) if options.waits else ["tests"]
    unknown = sorted(set(options.ids) - {mutant.id for mutant in mutants})
    if unknown:
        names = ", ".join(mutant.id for mutant in mutants)
        parser.error(f"no mutant is called {', '.join(unknown)}; the catalogue has {names}")
    check(mutants)
    if options.check:
        print(f"{len(mutants)} mutants apply")
        return 0

    results, _ = report.load(record.results)
    selected = [one for one in mutants if not options.ids or one.id in options.ids]
    tests = None
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.survivors:
        selected = [one for one in selected if not results.get(one.id, {}).get("caught_by")]
    elif options.again:
        selected = [one for one in selected if "::" in results.get(one.id, {}).get("caught_by", "")]
        tests = {one.id: [results[one.id]["caught_by"]] for one in selected}
    else:
        command = ("-m", "pytest", *TESTS) if options.waits else ("tools/tests.py",)
        lines = options.reached or reach.find(
            mutants, BUILD, command, limit_seconds=3 * LIMIT_SECONDS
        )
        tests = reach.tests_by_mutant(lines)
    for mutant, outcome in run(selected, results, tests, everything, thorough=not options.again):
        results[mutant.id] = outcome
        if not outcome["caught_by"] and outcome["ran"] == "everything" and not options.waits:
            outcome["verify"] = is_noticed_by_verify(mutant)
        current = {one.id: results[one.id] for one in mutants if one.id in results}
        report.store(current, record.results)
    page = report.page(mutants, *report.load(record.results), record)
    record.page.write_text(page, encoding="utf-8")

    recorded = [one.id for one in mutants if one.id in results]
    missed = [name for name in recorded if not results[name]["caught_by"]]
    share = 1 - len(missed) / max(1, len(recorded))
    print(
        f"the tests notice {share:.1%} of {len(recorded)}; not {', '.join(missed) or 'noticed: 0'}"
    )
    return 0 if share >= REQUIRED_SHARE else 1


def run(
    mutants: list[Mutant],
    results: dict[str, Outcome],
    tests: dict[str, list[str]] | None,
    everything: list[str],
    *,
    thorough: bool,
) -> Iterator[tuple[Mutant, Outcome]]:
    """Run the tests against each mutant, and yield the outcomes in the order of the catalogue.

    Args:
        mutants: Mutants to run.
        results: Outcomes of earlier runs. The test that noticed a mutant runs first.
        tests: Tests that reach each mutant, or None to run all tests against each.
        everything: All tests, as arguments of pytest.
        thorough: Whether survivors of the tests that reach them run all tests.
    """
    context = server()
    copies: SimpleQueue[ProjectCopy] = SimpleQueue()
    for index in range(min(SIDE_BY_SIDE, len(mutants))):
        copies.put(ProjectCopy(BUILD / f"copy-{index}"))

    def test(mutant: Mutant) -> Outcome:
        copy = copies.get()
        try:
            outcome = UNREACHED
            reaching = [] if tests is None else tests.get(mutant.id, [])
            if reaching:
                last = results.get(mutant.id, {}).get("caught_by", "")
                # A stable sort: the test that noticed the mutant the last time comes first.
                reaching = sorted(reaching, key=lambda name: name != last)
                outcome = UNREACHED | test_mutant(mutant, copy, reaching, context)
            if outcome["caught_by"] or not thorough:
                return outcome
            return test_mutant(mutant, copy, everything, context) | {"ran": "everything"}
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        outcomes = threads.map(test, mutants)
        for number, (mutant, outcome) in enumerate(zip(mutants, outcomes, strict=True), 1):
            by = f"noticed by {outcome['caught_by']}" if outcome["caught_by"] else "NOT NOTICED"
            count = f"{number}/{len(mutants)}"
            print(f"{count} {mutant.id}: {by} ({outcome['seconds']:.0f} s)", flush=True)
            yield mutant, outcome


def test_mutant(
    mutant: Mutant,
    copy: ProjectCopy,
    tests: list[str],
    context: ForkServerContext,
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
    if code in (0, NO_TESTS):
        caught_by = ""
    elif code is None:
        caught_by = "(hangs)"
    else:
        caught_by = failure[1] if failure else "(does not start)"
    return {"caught_by": caught_by, "seconds": round(time.monotonic() - began, 1)}


VERIFIED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 301,
        }
    },
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "pp": 2},
    {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
)
"""Section `parallel` of the files that `plait verify` runs, by ZeRO stage."""


def is_noticed_by_verify(mutant: Mutant) -> bool:
    """Return whether `plait verify` finds a difference in one of `LAYOUTS`."""
    copy = ProjectCopy(BUILD / "verify")
    with copy.planted(mutant.file, mutant.applied()):
        for stage, parallel in enumerate(LAYOUTS):
            file = copy.folder / f"verify-{stage}.json"
            settings = {"zero_optimization": {"stage": stage}, "parallel": parallel}
            file.write_text(json.dumps(VERIFIED | settings), encoding="utf-8")
            log = BUILD / f"{mutant.id}-verify.log"
            command = ("-m", "plait", "verify", str(file))
            code, _ = copy.run(*command, limit_seconds=LIMIT_SECONDS, log=log)
            if code == NOT_EQUAL:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
