"""Compare every combination of `tests.parity.combinations` with one process; write the deviations and docs/development/combinations.md.

Run: make combinations, or PYTHONPATH=src python -m tools.combinations [--write | --added]. --write only writes the page. Exit code 1 where
one deviates by more than 1e-10, or fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.common.report import markdown, today, write
from plait.verify.parity import compare, worst
from tests.parity.combinations import (
    ADDED_SEED,
    ADVERSARIAL,
    SEED,
    everything,
    features,
    label,
    sampled,
    sampled_of_added,
)
from tests.parity.experts import Case, reference, train
from tests.pool import Pool, WorkerFailed

ROOT = Path(__file__).parents[1]
DATA, PAGE = (
    ROOT / "benchmarks" / "results" / "combinations.json",
    ROOT / "docs" / "development" / "combinations.md",
)
TOLERANCE = 1e-10


def deviation(pool: Pool, case: Case) -> float:
    """The largest relative difference of any loss, gradient, norm, parameter or bias; infinite for a case that fails."""
    try:
        results = pool.run(case.world, train, case)
    except WorkerFailed as failure:
        print(failure, flush=True)
        return float("inf")
    expected, moved = reference(case)
    found = [worst(compare(expected, trace)) for trace, _ in results]
    for one in found:
        if not one.ok(TOLERANCE):
            print(f"{label(case)}: {one.name}: {one.error}", flush=True)
    biases = [
        float((bias - moved[name]).abs().max()) for _, own in results for name, bias in own.items()
    ]
    return max(*(one.error for one in found), *biases, 0.0)


def measure() -> dict[str, Any]:
    """The contents of the results file."""
    pool = Pool()
    try:
        named = {
            name: {label(case): deviation(pool, case) for case in group}
            for name, group in ADVERSARIAL.items()
        }
        drawn = _deviations(pool, sampled())
    finally:
        pool.close()
    adversarial = {name: error for group in named.values() for name, error in group.items()}
    return {
        "seed": SEED,
        **_versions(),
        "named": {name: [len(group), max(group.values())] for name, group in named.items()},
        "adversarial": summary(adversarial),
        "sampled": summary(drawn),
        "added": measure_added(),
    }


def measure_added() -> dict[str, Any]:
    """The part of the results file that is of the second sample."""
    pool = Pool()
    try:
        return {
            "seed": ADDED_SEED,
            **_versions(),
            "sampled": summary(_deviations(pool, sampled_of_added())),
        }
    finally:
        pool.close()


def summary(errors: dict[str, float]) -> dict[str, Any]:
    """Return how many of these combinations are exact and their largest deviation: of all, and of each value of each axis."""
    cases = {label(case): case for case in everything()}
    places: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, error in errors.items():
        for axis, value in features(cases[name]).items():
            places[axis][value].append(error)
    axes = {
        axis: {value: [len(found), max(found)] for value, found in values.items()}
        for axis, values in places.items()
    }
    exact = sum(error <= TOLERANCE for error in errors.values())
    return {"cases": len(errors), "exact": exact, "largest": max(errors.values()), "axes": axes}


def _deviations(pool: Pool, cases: list[Case]) -> dict[str, float]:
    drawn = {}
    for case in cases:
        drawn[label(case)] = deviation(pool, case)
        print(f"{len(drawn)} {drawn[label(case)]:.1e} {label(case)}", flush=True)
    return drawn


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"date": today(), "torch": torch.__version__, "transformers": transformers.__version__}


def samples(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the summaries of all combinations in the results file."""
    return [data["sampled"], data["adversarial"], data["added"]["sampled"]]


def page(data: dict[str, Any]) -> str:
    """Return the text of docs/development/combinations.md."""
    added, groups = data["added"]["sampled"], samples(data)
    places: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        for axis, values in group["axes"].items():
            for value, (count, largest) in values.items():
                places[axis][value].append((count, largest))
    rows = [
        [
            f"{axis}: {value}",
            str(sum(count for count, _ in found)),
            f"{max(largest for _, largest in found):.0e}",
        ]
        for axis, values in places.items()
        for value, found in sorted(values.items())
    ]
    named = [
        [name, str(count), f"{largest:.0e}"] for name, (count, largest) in data["named"].items()
    ]
    exact, cases = sum(group["exact"] for group in groups), sum(group["cases"] for group in groups)
    return f"""# Combinations that equal one process

{exact} of {cases} combinations of context, tensor, sequence, pipeline and expert parallelism with ZeRO, recomputation,
documents, masks, MLPs in tiles, hybrid sharding and files equal one process to {TOLERANCE:g} in float64: losses, every gradient,
norms, parameters after two steps, and the biases of routers. The largest deviation is {max(group["largest"] for group in groups):.1e}.

{data["sampled"]["cases"]} are drawn by a seed from one space; {added["cases"]} more (largest deviation {added["largest"]:.1e}) by another,
from what was added to it later: MLPs in tiles, hybrid sharding, and states, parameters and activations in files. The others are named
for what is hard about them. The reference is plain Transformers and torch in one process, with Transformers' own losses; the global
balance loss and the z loss, which Transformers does not have, are written in torch. Run on 2, 4 and 8 CPU processes; a combination
that Plait refuses is not in the space.

Generated by `make combinations` on {data["date"]} from torch {data["torch"]} and Transformers {data["transformers"]}.

## Adversarial

{markdown(["what", "combinations", "largest deviation"], named)}
## All, by axis

{markdown(["axis: value", "combinations", "largest deviation"], rows)}"""


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Every combination against one process.")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the page from what was run before, and run nothing",
    )
    parser.add_argument(
        "--added",
        action="store_true",
        help="run the second sample alone, and keep the results of the rest",
    )
    options = parser.parse_args(arguments)
    if options.added:
        kept = json.loads(DATA.read_text(encoding="utf-8"))
        write(DATA, {**kept, "added": measure_added()})
    elif not options.write:
        write(DATA, measure())
    data = json.loads(DATA.read_text(encoding="utf-8"))
    PAGE.write_text(page(data), encoding="utf-8")
    return 0 if all(group["exact"] == group["cases"] for group in samples(data)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
