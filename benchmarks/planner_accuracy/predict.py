"""Predictions of published runs, and their errors by source, GPU and framework.

The measurement of a row is not used to predict it. Rows for calibration move the constants of their
device and framework, and are not predicted. Rows that cannot be priced are listed with the reason.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import erf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.frameworks import fitted_priors
from benchmarks.planner_accuracy.metrics import confusion, errors, ranking
from benchmarks.planner_accuracy.row import Variant
from benchmarks.planner_accuracy.runs import (
    Row,
    Runs,
    choose,
    column,
    measured_bytes,
    measured_seconds,
    read_runs,
)
from benchmarks.planner_accuracy.runs import calibrate as calibrate_on
from plait.planner.calibrate import (
    Calibration,
    Fit,
    deviation,
    memory_of,
    merged_rates,
    time_of,
    uncalibrated,
)
from plait.planner.constants import Priors
from plait.planner.request import estimate
from plait.planner.search import NINETY

Array = NDArray[np.float64]
Interval = tuple[float, float, float, float]
"""Predicted and measured value, and the ends of the 90 % interval of the prediction."""
LIKELY = 0.5
"""Least probability with which a row counts as predicted to fit."""
_OPEN_SPREAD = 0.08
"""Uncertainty that each open question of a row, up to two, adds to its prediction."""
_SAME = (
    *("n_layers", "hidden", "n_heads", "ffn_hidden", "vocab", "gpu", "gpus_total", "seq_len"),
    *("global_batch", "precision", "framework"),
)
"""Columns that are equal in layouts that compete with each other."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one row, with 90 % intervals."""

    row: int
    source: str
    gpu: str
    framework: str
    seconds: float
    seconds_low: float
    seconds_high: float
    total_bytes: float
    memory_bytes: float
    """Predicted bytes of the kind that was measured, or the total if nothing was."""
    memory_low: float
    memory_high: float
    fit_probability: float
    terms: Mapping[str, float]
    memory_terms: Mapping[str, float]
    experts: bool
    measured_seconds: float | None
    measured_bytes: float | None
    status: str


@dataclass(frozen=True)
class Evaluation:
    """Predictions, and the rows that could not be priced."""

    rows: tuple[Row, ...]
    predictions: tuple[Prediction, ...]
    reasons: Mapping[int, str]


def source_of(row: Row) -> str:
    """Return the source of a row: the prefix of its id, or its `source`."""
    name = _id_of(row).rsplit("-", 1)[0]
    return name or (row.get("source") or "unknown")


def _id_of(row: Row) -> str:
    return row.get("id") or ""


def stack_of(variant: Variant) -> tuple[str, str]:
    """Return the names of the device and the framework, which have constants of their own."""
    return str(variant.device.name), str(variant.framework.name)


def evaluate(
    rows: Sequence[Row], *, calibrate: Sequence[Row] = (), priors: Priors | None = None
) -> Evaluation:
    """Predict every row.

    Args:
        rows: Rows of published runs.
        calibrate: Measured rows that move the constants of their device and framework.
        priors: Constants. Default: those that ship, and those of the table of frameworks.
    """
    priors = priors or fitted_priors()
    used = set(filter(None, map(_id_of, calibrate)))
    rows = tuple(row for row in rows if _id_of(row) not in used)
    runs = read_runs(rows)
    rows_of_stack: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in calibrate:
        for variant in read_runs([row]).variants[:1]:
            rows_of_stack[stack_of(variant)].append(row)
    calibrations = {}
    for stack, group in rows_of_stack.items():
        calibrations[stack] = calibrate_on(read_runs(group), priors=priors)
    groups: dict[tuple[str, str] | None, list[int]] = defaultdict(list)
    for index, variant in enumerate(runs.variants):
        stack = stack_of(variant)
        groups[stack if stack in calibrations else None].append(index)
    predictions: list[Prediction] = []
    for key, indices in groups.items():
        calibration = key and calibrations[key]
        predictions += _predict(runs, np.array(indices), calibration or uncalibrated(priors))
    predictions.sort(key=lambda prediction: prediction.row)
    return Evaluation(rows, tuple(predictions), runs.reasons)


def _predict(runs: Runs, indices: NDArray[np.int64], calibration: Calibration) -> list[Prediction]:
    assert runs.job is not None
    variants = tuple(runs.variants[index] for index in indices)
    candidates = Runs(runs.rows, variants, runs.job.take(indices), {})
    chosen = choose(candidates, calibration)
    assert candidates.job is not None
    job = candidates.job.take(np.array(list(chosen.values())))
    result = estimate(job, merged_rates(calibration))
    count = len(chosen)
    peaks: list[float | None] = []
    kinds: list[str] = []
    questions: list[int] = []
    for row_index, variant_index in chosen.items():
        peak, kind = measured_bytes(runs.rows[row_index]) or (None, "total")
        peaks.append(peak)
        kinds.append(kind)
        questions.append(len(variants[variant_index].assumed))
    open_spread = _OPEN_SPREAD * np.minimum(questions, 2)

    def spread(predict: Callable[[Any], Array], fitted: Fit) -> Array:
        return np.sqrt(deviation(predict, fitted, job) ** 2 + open_spread**2)

    time_margin = np.exp(NINETY * spread(time_of(job), calibration.time))
    memory_margin = np.exp(NINETY * spread(memory_of(job, kinds), calibration.memory))
    total_spread = spread(memory_of(job, ["total"] * count), calibration.memory)
    seconds = column(result.seconds, count)
    memory = {}
    for kind in ("allocated", "reserved", "total"):
        memory[kind] = column(getattr(result.memory, kind), count)
    room = column(job.device.memory_bytes, count)
    margins = (np.log(room) - np.log(memory["total"])) / total_spread
    terms = _by_row(result.step.terms, count)
    memory_terms = _by_row(result.memory.terms, count)
    experts = np.asarray(job.model.experts)

    predictions = []
    for index, (row_index, variant_index) in enumerate(chosen.items()):
        row = runs.rows[row_index]
        gpu, framework = stack_of(variants[variant_index])
        memory_bytes = memory[kinds[index]][index]
        predictions.append(
            Prediction(
                row=row_index,
                source=source_of(row),
                gpu=gpu,
                framework=framework,
                seconds=float(seconds[index]),
                seconds_low=float(seconds[index] / time_margin[index]),
                seconds_high=float(seconds[index] * time_margin[index]),
                total_bytes=float(memory["total"][index]),
                memory_bytes=float(memory_bytes),
                memory_low=float(memory_bytes / memory_margin[index]),
                memory_high=float(memory_bytes * memory_margin[index]),
                fit_probability=0.5 * (1 + erf(margins[index] / sqrt(2))),
                terms=terms[index],
                memory_terms=memory_terms[index],
                experts=bool(experts[index] > 0),
                measured_seconds=measured_seconds(row),
                measured_bytes=peaks[index],
                status=(row.get("status") or "ok").strip(),
            )
        )
    return predictions


def _by_row(terms: Mapping[str, Any], count: int) -> list[dict[str, float]]:
    table = np.stack([column(values, count) for values in terms.values()], axis=1)
    return [dict(zip(terms, row, strict=True)) for row in table.tolist()]


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return errors of time and memory by source, GPU and framework, ranking, fit, and reasons."""
    predictions = evaluation.predictions
    by_experts: dict[bool, list[Prediction]] = {False: [], True: []}
    for prediction in predictions:
        by_experts[prediction.experts].append(prediction)
    ranked = ranking(_competing(evaluation))
    return {
        "time": _errors(by_experts[False], interval_of_time),
        "time_experts": _errors(by_experts[True], interval_of_time),
        "memory": _errors(filter(_ran, predictions), _interval_of_memory),
        "ranking": asdict(ranked) if ranked else None,
        "fit": fit_of(predictions),
        "not_priced": dict(Counter(evaluation.reasons.values()).most_common()),
    }


def _ran(prediction: Prediction) -> bool:
    return prediction.status.lower() == "ok"


def fit_of(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Count fit and no fit of rows that ran or ran out of memory. Crashes may have other causes."""
    fits = []
    ran = []
    for prediction in predictions:
        if prediction.status in ("OOM", "ok"):
            fits.append(prediction.fit_probability >= LIKELY)
            ran.append(prediction.status == "ok")
    return asdict(confusion(np.array(fits, dtype=bool), np.array(ran, dtype=bool)))


def interval_of_time(p: Prediction) -> Interval | None:
    if p.measured_seconds is None:
        return None
    return p.seconds, p.measured_seconds, p.seconds_low, p.seconds_high


def _interval_of_memory(p: Prediction) -> Interval | None:
    if p.measured_bytes is None:
        return None
    return p.memory_bytes, p.measured_bytes, p.memory_low, p.memory_high


def _errors(
    predictions: Iterable[Prediction], values: Callable[[Prediction], Interval | None]
) -> dict[str, Any]:
    groups: dict[str, dict[str, list[Interval]]] = {}
    for key in ("all", "source", "gpu", "framework"):
        groups[key] = defaultdict(list)
    for prediction in predictions:
        interval = values(prediction)
        if interval is not None:
            groups["all"]["all"].append(interval)
            groups["source"][prediction.source].append(interval)
            groups["gpu"][prediction.gpu].append(interval)
            groups["framework"][prediction.framework].append(interval)
    tables: dict[str, Any] = {}
    for key, group in groups.items():
        tables[key] = {}
        for name, intervals in sorted(group.items()):
            tables[key][name] = asdict(errors(*np.array(intervals).T))
    return tables


def _competing(evaluation: Evaluation) -> list[tuple[Array, Array]]:
    """Return predicted and measured seconds of runs that differ in their layout only."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for p in evaluation.predictions:
        if p.measured_seconds is not None and _ran(p):
            row = evaluation.rows[p.row]
            key = (p.source, *(row.get(name) or "" for name in _SAME))
            groups[key].append((p.seconds, p.measured_seconds))
    competing = []
    for pairs in groups.values():
        predicted, measured = np.array(pairs).T
        competing.append((predicted, measured))
    return competing
