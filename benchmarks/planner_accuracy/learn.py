"""Learn the planner's constants from published runs: medians and widths for new machines.

Every source has about the same weight. A source has an offset that moves no constant. `learn` can
leave sources out, which the errors in the docs need.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_accuracy.frameworks import (
    DATA,
    STACKS,
    datasheet_priors,
    open_kernels,
    unknown,
)
from benchmarks.planner_accuracy.grouped_fit import grouped_fit
from benchmarks.planner_accuracy.predict import source_of
from benchmarks.planner_accuracy.runs import (
    Row,
    choose,
    costs,
    measured_bytes,
    measured_seconds,
    read_runs,
)
from plait.planner import calibrate as fitting
from plait.planner import constants
from plait.planner.constants import Priors
from plait.planner.job import Job

_OWN_OFFSET = 0.10
"""Width of the offset of a source. It is wider than the differences of frameworks
(`constants.of_kernels`), so that no source alone moves a constant."""
_TIME_NOISE, _MEMORY_NOISE = 0.06, 0.08
_NOISY = {"NANO": 0.15, "NANOBEST": 0.15}
"""Weights of sources whose repeated runs differ by more than an order of magnitude."""
_UNTRUSTED_MEMORY = {
    "DSSDMA",
    "THUNDER",
    "LAMBDA",
    "COLOSSAL",
    "JZV100",
    "ALPA",
    "DLPONE",
    "DLPMEG",
    "MI325X",
}
"""Sources whose memory contradicts the size of their model, is of an unknown tool, of the pool of
XLA or OneFlow, or is what a process reserved."""


def rows_of(*names: str) -> list[Row]:
    """Return the rows of these tables of `data`."""
    found: list[Row] = []
    for name in names:
        with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            found += list(csv.DictReader(file))
    return found


@dataclass(frozen=True)
class _Measured:
    job: Job
    values: np.ndarray
    sources: np.ndarray
    groups: np.ndarray
    kinds: list[str]


def learn(
    rows: Iterable[Row], *, without: Sequence[str] = (), near: Priors | None = None
) -> Priors:
    """Fit the constants to rows of tiers A and B of models without experts.

    Args:
        rows: Rows of published runs.
        without: Sources that are left out.
        near: Where the search starts. The result is the same, sooner.
    """
    kept = [
        r
        for r in rows
        if r["tier"] in "AB"
        and r["status"] == "ok"
        and not r["moe"]
        and source_of(r) not in without
    ]
    kept = [r for r in kept if "limited" not in r["gpu"]]  # to an unknown power
    kept = [r for r in kept if not unknown(r["framework"])]
    base = datasheet_priors()
    time, memory = _measured(kept, base)
    names = tuple(name for name in fitting.relevant(base.time_names, time.job) if name != "overall")
    weights = _weights(time.sources)
    first, _ = grouped_fit(
        fitting.time_of(time.job),
        np.log(time.values),
        names,
        priors=base.constants,
        spread=_TIME_NOISE,
        weights=weights,
        groups=time.groups,
        group_width=_OWN_OFFSET,
        begin=near.rates if near is not None else None,
    )
    second, _ = grouped_fit(
        fitting.memory_of(memory.job, memory.kinds),
        np.log(memory.values),
        fitting.MEMORY_NAMES,
        priors=base.constants,
        spread=_MEMORY_NOISE,
        weights=_weights(memory.sources),
        groups=memory.groups,
        group_width=0.08,
        begin=near.rates if near is not None else None,
    )
    constants = {}
    for name, constant in base.constants.items():
        found = second if name.startswith("memory:") else first
        if name in open_kernels():  # the next user writes others
            constants[name] = constant
            continue
        width = constant.width
        if name in found.names:
            index = found.names.index(name)
            # New machines are not those of the fit, so half of the prior width stays.
            width = float(np.hypot(0.5 * constant.width, np.sqrt(found.covariance[index, index])))
        constants[name] = replace(
            constant, median=float(found.rates[name]), width=min(width, constant.width)
        )
    return Priors(constants, 0.052, 0.14)


def _measured(rows: Sequence[Row], base: Priors) -> tuple[_Measured, _Measured]:
    runs = read_runs(rows)
    assert runs.job is not None
    chosen = choose(runs, costs(runs, fitting.uncalibrated(base)))
    timed = [(row, variant) for row, variant in chosen.items() if measured_seconds(rows[row])]
    sized = [
        (row, variant)
        for row, variant in chosen.items()
        if measured_bytes(rows[row]) and source_of(rows[row]) not in _UNTRUSTED_MEMORY
    ]

    def of(pairs: list[tuple[int, int]], values: list[float], kinds: list[str]) -> _Measured:
        assert runs.job is not None
        names = np.array([f"{source_of(rows[row])} {rows[row]['gpu']}" for row, _ in pairs])
        return _Measured(
            job=runs.job.take(np.array([variant for _, variant in pairs])),
            values=np.array(values),
            sources=np.array([source_of(rows[row]) for row, _ in pairs]),
            groups=np.unique(names, return_inverse=True)[1],
            kinds=kinds,
        )

    sizes = [measured_bytes(rows[row]) or (0.0, "") for row, _ in sized]
    return (
        of(timed, [measured_seconds(rows[row]) or 0.0 for row, _ in timed], []),
        of(sized, [size for size, _ in sizes], [kind for _, kind in sizes]),
    )


def _weights(sources: np.ndarray) -> np.ndarray:
    weights = np.ones(len(sources))
    for source in np.unique(sources):
        rows = sources == source
        weights[rows] = min(1.0, 40 / rows.sum()) ** 0.7 * _NOISY.get(str(source), 1.0)
    return weights


def write(learned: Priors, path: Path) -> None:
    """Write the constants for the planner, and the speeds of other frameworks to `STACKS`."""
    shipped = constants.datasheet_priors().constants
    values = {
        name: [float(f"{c.median:.4g}"), round(c.width, 4)] for name, c in learned.constants.items()
    }
    how = "python -m benchmarks.planner_accuracy --learn, from benchmarks/planner_accuracy/data; [median, width of the logarithm]"
    source: dict[str, Any] = {"source": how}
    spreads = {"time_spread": learned.time_spread, "memory_spread": learned.memory_spread}
    _write(
        path,
        source
        | spreads
        | {"constants": {name: value for name, value in values.items() if name in shipped}},
    )
    _write(
        STACKS,
        source
        | {"constants": {name: value for name, value in values.items() if name not in shipped}},
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
