"""Calibration: layouts to measure, the fit of the planner's constants, and the calibration file.

The fit finds the most probable logarithms of the constants under normal priors and heavy-tailed
noise. It also returns their covariance, from which intervals are computed. The method is a
Gauss-Newton iteration with reweighted residuals (Student's t, 4 degrees of freedom), which limits
the influence of outliers. A row is one measured run. With few rows the priors dominate. Without
rows the result equals the priors.

`calibration_layouts` returns a few layouts that differ enough to determine each constant
separately. The engine measures these runs. `runs_of` converts the measurements to the argument of
`calibrate`, and `priors_from_rates` converts measured rates of the device to priors of the fit.

`save_calibration` and `load_calibration` write and read a JSON file: the constants of one kind of
device, their uncertainty, and their origin. `refuse_other` rejects the file of another device (or
of another processor if the device is a CPU), because its constants would silently be wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.files import write_atomically_in_folder
from plait.planner import hardware
from plait.planner.architecture import Architecture
from plait.planner.constants import (
    CONSTANTS,
    MEMORY_CONSTANTS,
    Constant,
    Priors,
    Rates,
    fitted_priors,
)
from plait.planner.hardware import DEVICE_FAMILIES, PRECISIONS, DeviceSpec, stack
from plait.planner.job import RECOMPUTE, SCHEDULES, Job, Layouts, plait
from plait.planner.memory import memory_by_rates
from plait.planner.step_time import BASE, INSIDE_STEP, step_seconds

Array = NDArray[np.float64]
_FREEDOM = 4.0
_STEP = 1e-3
_ROUNDS = 25


@dataclass(frozen=True)
class Fit:
    """Fitted constants with the covariance of their logarithms."""

    names: tuple[str, ...]
    """Constants that were fitted."""
    rates: Rates
    """Values of all constants."""
    covariance: Array
    """Covariance of the logarithms, in the order of `names`."""
    spread: float
    """Standard deviation of log(measured / predicted) that the constants do not explain."""
    rows: int = 0
    """Number of measured rows."""


def unfitted(names: Sequence[str], priors: Priors, *, spread: float) -> Fit:
    """Return the priors as a `Fit` without any measured rows."""
    widths = LogRatios(tuple(names), priors.constants).widths
    return Fit(tuple(names), priors.rates, np.diag(widths**2), spread)


def fit(
    predict: Callable[[Rates], Array],
    measured: Array,
    names: Sequence[str],
    *,
    priors: Mapping[str, Constant],
    spread: float,
) -> Fit:
    """Fit the constants `names` to measured rows, starting at their priors.

    Args:
        predict: Returns the predicted logarithms of the measured values, one per row.
        measured: Logarithms of the measured values.
        names: Constants to fit. All other constants keep the medians of their priors.
        priors: Priors of all constants.
        spread: Noise of a row: the standard deviation of its logarithm.
    """
    log_ratios = LogRatios(tuple(names), priors)
    theta, covariance = most_probable(
        lambda theta: predict(log_ratios.rates(theta)),
        lambda theta, predicted: log_ratios.jacobian(predict, theta, predicted),
        measured,
        np.zeros(len(names)),
        widths=log_ratios.widths,
        bounds=log_ratios.bounds,
        spread=spread,
    )
    return Fit(log_ratios.names, log_ratios.rates(theta), covariance, spread, len(measured))


@dataclass(frozen=True)
class LogRatios:
    """Conversion between constants and the vector theta of the fit.

    An entry of theta is the logarithm of (constant / median of its prior).
    """

    names: tuple[str, ...]
    priors: Mapping[str, Constant]

    @property
    def widths(self) -> Array:
        """Standard deviations of the priors."""
        return np.array([self.priors[name].width for name in self.names])

    @property
    def bounds(self) -> tuple[Array, Array]:
        """Lower and upper limits of theta, beyond which constants are physically impossible."""
        least = []
        most = []
        for name in self.names:
            constant = self.priors[name]
            least.append(_log(constant.least / constant.median))
            most.append(_log(constant.most / constant.median))
        return np.array(least), np.array(most)

    def rates(self, theta: Array) -> Rates:
        """Return all constants at theta."""
        values = {name: constant.median for name, constant in self.priors.items()}
        for index, name in enumerate(self.names):
            values[name] *= float(np.exp(theta[index]))
        return Rates(values)

    def jacobian(self, predict: Callable[[Rates], Array], theta: Array, predicted: Array) -> Array:
        """Return the derivatives of the predictions with respect to theta [rows, constants]."""
        derivatives = np.zeros((len(predicted), len(self.names)))
        for index in range(len(self.names)):
            moved = theta.copy()
            moved[index] += _STEP
            derivatives[:, index] = (predict(self.rates(moved)) - predicted) / _STEP
        return derivatives


def most_probable(
    predict_at: Callable[[Array], Array],
    jacobian_at: Callable[[Array, Array], Array],
    measured: Array,
    start: Array,
    *,
    widths: Array,
    bounds: tuple[Array, Array],
    spread: float,
    weights: Array | float = 1.0,
) -> tuple[Array, Array]:
    """Return the most probable theta and its covariance, by Gauss-Newton with damping.

    Args:
        predict_at: Returns the predictions at a theta [rows].
        jacobian_at: Returns their derivatives [rows, len(theta)], from a theta and its predictions.
        measured: Measured values [rows].
        start: Theta at which the iteration starts.
        widths: Standard deviations of normal priors around 0.
        bounds: Lower and upper limits of theta.
        spread: Noise of a row: the standard deviation of its measured value.
        weights: Weights of the rows.

    Returns:
        Theta [constants] and its covariance [constants, constants].
    """

    def scale_of(residual: Array) -> Array:
        # Student's t gives rows far from their prediction a small weight.
        scale: Array = weights * (_FREEDOM + 1) / (_FREEDOM + (residual / spread) ** 2) / spread**2
        return scale

    def objective(theta: Array, predicted: Array) -> float:
        residual = (measured - predicted) / spread
        rows = weights * (_FREEDOM + 1) / 2 * np.log1p(residual**2 / _FREEDOM)
        return float(np.sum(rows) + 0.5 * np.sum((theta / widths) ** 2))

    theta = start
    damping = 1e-3
    predicted = predict_at(theta)
    best = objective(theta, predicted)
    for _ in range(_ROUNDS):
        jacobian = jacobian_at(theta, predicted)
        residual = measured - predicted
        scale = scale_of(residual)
        # Gauss-Newton leaves out the second derivatives of the predictions, so this is positive
        # definite.
        hessian = jacobian.T @ (jacobian * scale[:, None]) + np.diag(1 / widths**2)
        gradient = jacobian.T @ (residual * scale) - theta / widths**2
        for _ in range(6):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            # No constant changes by more than a factor of two (exp 0.7) in one step.
            step *= min(1.0, 0.7 / max(np.abs(step).max(), 1e-12))
            proposal = np.clip(theta + step, *bounds)
            proposal_predicted = predict_at(proposal)
            value = objective(proposal, proposal_predicted)
            if value < best:
                damping = max(damping / 4, 1e-6)
                break
            # More damping makes the next step shorter, and closer to the direction of the gradient.
            damping *= 6
        else:
            break
        gain = best - value
        best = value
        theta = proposal
        predicted = proposal_predicted
        if gain < 1e-4:
            break

    jacobian = jacobian_at(theta, predicted)
    scale = scale_of(measured - predicted)
    # The posterior is treated as normal around its maximum (Laplace's approximation).
    covariance = np.linalg.inv(jacobian.T @ (jacobian * scale[:, None]) + np.diag(1 / widths**2))
    return theta, np.asarray(covariance, dtype=np.float64)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def sensitivity(predict: Callable[[Rates], Array], fitted: Fit, names: Sequence[str]) -> Array:
    """Return the derivatives of predicted logarithms with respect to logarithms of constants.

    Args:
        predict: Returns the predicted logarithms [rows].
        fitted: Fit at whose constants the derivatives are taken.
        names: Constants for which derivatives are computed. All other derivatives are 0.

    Returns:
        Array [rows, constants].
    """
    base = predict(fitted.rates)
    values = fitted.rates.values
    derivatives = np.zeros((len(base), len(fitted.names)))
    for index, name in enumerate(fitted.names):
        if name in names:
            moved = Rates({**values, name: values[name] * np.exp(_STEP)})
            derivatives[:, index] = (predict(moved) - base) / _STEP
    return derivatives


def deviation(predict: Callable[[Rates], Array], fitted: Fit, job: Job) -> Array:
    """Return the standard deviation [rows] of log(measured / predicted), including noise."""
    derivative = sensitivity(predict, fitted, relevant(fitted.names, job))
    return np.sqrt(
        np.einsum("ij,jk,ik->i", derivative, fitted.covariance, derivative) + fitted.spread**2
    )


MEMORY_NAMES = tuple(f"memory:{name}" for name in MEMORY_CONSTANTS)


def time_of(job: Job) -> Callable[[Rates], Array]:
    """Return a function that predicts the logarithms of seconds per step."""
    return lambda rates: np.log(np.asarray(step_seconds(job, rates).seconds, dtype=float))


def memory_of(job: Job, kinds: Sequence[str]) -> Callable[[Rates], Array]:
    """Return a function that predicts the logarithm of each run's peak memory.

    Args:
        job: The measured runs, one per row.
        kinds: Kind of memory that each run measured: "allocated", "reserved" or "total".
    """
    chosen = np.array([("allocated", "reserved", "total").index(kind) for kind in kinds])
    memory_at = memory_by_rates(job)

    def predict(rates: Rates) -> Array:
        memory = memory_at(rates)
        by_kind = np.broadcast_arrays(memory.allocated, memory.reserved, memory.total)
        return np.log(np.choose(chosen, by_kind).astype(float))

    return predict


_OF_GPUS = ("ramp", "contention")
"""Constants that do not apply to CPUs, in addition to those that have a variant for CPUs."""


def relevant(names: Sequence[str], job: Job) -> tuple[str, ...]:
    """Return the names of constants that apply to a job's devices, precisions and frameworks."""
    families = {DEVICE_FAMILIES[index] for index in np.unique(job.device.family)}
    kinds = set(np.unique(np.asarray(job.framework.name)))
    precisions = {PRECISIONS[index] for index in np.unique(job.precision)}

    def concerns(name: str) -> bool:
        head, _, suffix = name.partition(".")
        if families == {"cpu"} and (f"{name}.cpu" in CONSTANTS or name in _OF_GPUS):
            return False
        if head == "stack":
            return suffix in kinds
        if suffix in DEVICE_FAMILIES:
            return suffix in families
        return head != "gemm" or suffix in precisions

    return tuple(name for name in names if concerns(name))


@dataclass(frozen=True)
class Calibration:
    """Fitted constants for one device and framework."""

    time: Fit
    memory: Fit


def uncalibrated(priors: Priors | None = None) -> Calibration:
    """Return the constants of the package, with the uncertainty for unknown machines."""
    priors = priors or fitted_priors()
    time = unfitted(priors.time_names, priors, spread=priors.time_spread)
    return Calibration(time, unfitted(MEMORY_NAMES, priors, spread=priors.memory_spread))


def calibrate(
    runs: MeasuredRuns, *, priors: Priors | None = None, within: float = 0.04
) -> Calibration:
    """Fit the constants to measured runs of one device and framework.

    Args:
        runs: At least one run.
        priors: Priors of the constants. None uses those of the package.
        within: Assumed noise of repeated runs: the standard deviation of the logarithm.
    """
    priors = priors or fitted_priors()
    base = uncalibrated(priors)

    time = base.time
    timed = np.flatnonzero(np.isfinite(runs.seconds))
    if len(timed):
        job = runs.job.take(timed)
        measured = np.log(runs.seconds[timed])
        time = fit(
            time_of(job),
            measured,
            relevant(priors.time_names, job),
            priors=priors.constants,
            spread=within,
        )
        time = replace(
            time, spread=_remaining(time, time_of(job), measured, within, base.time.spread)
        )

    memory = base.memory
    sized = [index for index, peak in enumerate(runs.peaks) if peak is not None]
    if sized:
        peaks = [peak for peak in runs.peaks if peak is not None]
        measured = np.log([nbytes for nbytes, _ in peaks])
        predict = memory_of(runs.job.take(np.array(sized)), [kind for _, kind in peaks])
        memory = fit(predict, measured, MEMORY_NAMES, priors=priors.constants, spread=within)
        memory = replace(
            memory, spread=_remaining(memory, predict, measured, within, base.memory.spread)
        )

    return Calibration(time, memory)


def _remaining(
    fitted: Fit, predict: Callable[[Rates], Array], measured: Array, within: float, between: float
) -> float:
    """Return the expected noise of rows that are not in the fit.

    The result lies between the residual error of the fitted rows and the usual noise (`between`).
    The more rows were fitted, the closer the result is to the residual error.
    """
    residual = measured - predict(fitted.rates)
    # Limited, so that a single outlier does not decide.
    robust = float(np.sqrt(np.mean(np.clip(residual, -3 * between, 3 * between) ** 2)))
    n = len(measured)
    # The usual noise counts like four further rows.
    return max(within, float(np.sqrt((n * robust**2 * 1.5 + 4 * (0.7 * between) ** 2) / (n + 4))))


def merged_rates(calibration: Calibration) -> Rates:
    """Return the time constants of the time fit and the memory constants of the memory fit."""
    memory = {name: calibration.memory.rates[name] for name in MEMORY_NAMES}
    return Rates({**calibration.time.rates.values, **memory})


def errors_with(runs: MeasuredRuns, calibration: Calibration) -> tuple[int, float, float]:
    """Return (number of timed runs, median error, largest error).

    The error of a run is |predicted / measured - 1| for its seconds per step.
    """
    errors = np.abs(_ratios(runs, calibration) - 1)
    errors = errors[np.isfinite(errors)]
    return len(errors), float(np.median(errors)), float(errors.max())


def leave_one_out_errors(
    runs: MeasuredRuns, priors: Priors | None = None
) -> tuple[int, float, float]:
    """Return the statistics of `errors_with` under leave-one-out cross-validation.

    Each run is predicted by a fit to all other runs. The statistics estimate the errors for layouts
    that were not measured.
    """
    errors = []
    for index in np.flatnonzero(np.isfinite(runs.seconds)):
        others = np.delete(np.arange(len(runs.seconds)), index)
        fitted = uncalibrated(priors)
        if len(others):
            fitted = calibrate(runs.take(others), priors=priors)
        errors.append(abs(_ratios(runs, fitted)[index] - 1))

    return len(errors), float(np.median(errors)), float(np.max(errors))


def _ratios(runs: MeasuredRuns, calibration: Calibration) -> Array:
    """Return predicted / measured seconds [runs]; NaN for runs without measured seconds."""
    predicted = np.asarray(step_seconds(runs.job, merged_rates(calibration)).seconds, dtype=float)
    return np.broadcast_to(predicted, runs.seconds.shape) / runs.seconds


RATE_WIDTH = 0.15
"""Uncertainty of a rate that was measured outside a step: the standard deviation of its logarithm.
"""


@dataclass(frozen=True)
class DeviceRates:
    """Measured rates of one process while all processes of the machine are busy."""

    products: Mapping[str, float]
    """FLOP/s by `rows x inner x columns`, in the precision of the runs."""
    memory_bytes_per_second: float
    """Bandwidth of an addition, which reads two tensors and writes one."""
    all_reduce: tuple[float, float] | None = None
    """(seconds, seconds per byte) of an all-reduce over all processes. None for one process."""


def priors_from_rates(
    priors: Priors, device: DeviceSpec, rates: DeviceRates, *, processes: int, precision: str
) -> Priors:
    """Return priors in which measured rates replace the medians of `priors`.

    Args:
        priors: Priors for any machine.
        device: Device of the machine.
        rates: Measured rates.
        processes: Number of processes that ran on the machine during the measurement.
        precision: Precision of the measured matrix multiplications.
    """
    family = DEVICE_FAMILIES[int(device.family)]
    suffix = ""
    crowd = 1.0
    if family == "cpu":
        # Processes share the memory, and the constants are those of a single process.
        suffix = ".cpu"
        crowd = processes ** priors.constants["crowding.cpu"].median
    measured = {
        f"gemm.{family}": (
            max(rates.products.values()) * crowd / float(device.flops[precision] * device.power)
        ),
        f"memory{suffix}": rates.memory_bytes_per_second * crowd / float(device.memory_bandwidth),
    }
    if rates.all_reduce is not None and processes <= int(device.domain):
        fixed, per_byte = rates.all_reduce
        # `step_time.collective_seconds`, solved for its constants.
        ring = 2 * (processes - 1) / processes
        share = ring * (processes + 0.5) / processes / float(device.link_bandwidth)
        if per_byte > 0:
            measured[f"link{suffix}"] = share / per_byte
        if fixed > 0:
            measured[f"latency{suffix}"] = fixed / (BASE + 2 * (processes - 1) * INSIDE_STEP)

    constants = dict(priors.constants)
    for name, value in measured.items():
        constants[name] = replace(
            constants[name], median=float(value), width=max(RATE_WIDTH, 0.4 * constants[name].width)
        )
    return replace(priors, constants=constants)


def calibration_layouts(processes: int, *, batch: int, heads: int) -> list[dict[str, Any]]:
    """Return a few layouts that differ in micro-batch size, ZeRO stage, tp, pp and recomputation.

    Args:
        processes: Number of processes.
        batch: Samples per step, a multiple of 4 x `processes`.
        heads: Attention heads. With an odd number no layout uses tp.
    """
    full = RECOMPUTE.index("full")
    operators = RECOMPUTE.index("operators")
    per_rank = batch // processes
    layouts = [
        _layout(batch, replicate=processes, micro=per_rank),
        _layout(batch, replicate=processes, micro=1),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=full),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=operators),
    ]
    if processes > 1:
        layouts += [
            _layout(batch, shard=processes, stage=1, micro=per_rank // 2),
            _layout(batch, shard=processes, stage=2, micro=1),
            _layout(batch, shard=processes, stage=3, micro=per_rank),
            _layout(batch, shard=processes, stage=3, micro=1),
        ]

    if processes % 2 == 0:
        half = processes // 2
        if heads % 2 == 0:
            layouts += [
                _layout(batch, replicate=half, tp=2, micro=batch // half),
                _layout(batch, replicate=half, tp=2, micro=2),
            ]
        for micro_batches in (2, 4):
            micro = batch // half // micro_batches
            layouts.append(_layout(batch, replicate=half, pp=2, micro=micro))

    # With few processes or a small batch, some of these are the same layout.
    unique = {tuple(sorted(layout.items())): layout for layout in layouts}
    return list(unique.values())


def _layout(
    batch: int,
    *,
    micro: int,
    replicate: int = 1,
    shard: int = 1,
    tp: int = 1,
    pp: int = 1,
    stage: int = 0,
    recompute: int = 0,
) -> dict[str, Any]:
    micro = max(1, micro)
    return {
        "pp": pp,
        "schedule": SCHEDULES.index("1f1b" if pp > 1 else "none"),
        "tp": tp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "stage": stage,
        "recompute": recompute,
        "micro_batch": micro,
        "accumulation": batch // (replicate * shard * micro),
    }


@dataclass(frozen=True)
class Measured:
    """Training run of a calibration, with its measured time and memory.

    Attributes:
        gpu: Name of the device in `data/hardware.yaml`.
        machine: Processor and threads per process if the device is a CPU. Empty for GPUs.
        devices: Number of processes.
        devices_per_node: Number of processes per machine.
        precision: Name in `hardware.PRECISIONS`.
        compiled: Whether blocks were compiled.
        sequence: Tokens per sample.
        architecture: Fields of `Architecture`.
        layout: Fields of `Layouts`. `schedule` and `recompute` are names instead of indices.
        seconds: Measured seconds per step.
        bytes: Peak allocated bytes of the rank with the highest peak. None if the memory was not
            measured by torch's allocator.
        predicted_seconds: Seconds per step predicted with the constants of the package.
        predicted_bytes: Peak bytes predicted with the constants of the package.
        steps: Number of timed steps.
        at: Time of the measurement, ISO 8601.
    """

    gpu: str
    machine: str
    devices: int
    devices_per_node: int
    precision: str
    compiled: bool
    sequence: int
    architecture: Mapping[str, Any]
    layout: Mapping[str, Any]
    seconds: float
    bytes: float | None = None
    predicted_seconds: float | None = None
    predicted_bytes: float | None = None
    steps: int = 0
    at: str = ""


@dataclass(frozen=True)
class MeasuredRuns:
    """Measured runs as one job, for `calibrate`.

    Attributes:
        job: Job whose arrays have one entry per run.
        seconds: Seconds per step [runs]; NaN if not measured.
        peaks: (peak bytes, kind) per run, or None if not measured. Kinds are allocated, reserved
            and total.
    """

    job: Job
    seconds: NDArray[np.float64]
    peaks: Sequence[tuple[float, str] | None]

    def take(self, indices: NDArray[np.int64]) -> MeasuredRuns:
        """Return the runs at `indices`."""
        return MeasuredRuns(
            self.job.take(indices), self.seconds[indices], [self.peaks[index] for index in indices]
        )


def facts_of(model: Architecture) -> dict[str, Any]:
    """Return the fields of an Architecture as JSON values."""
    values = asdict(model)
    for name, value in values.items():
        if hasattr(value, "item"):
            values[name] = value.item()
    return values


def layout_facts(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layout whose schedule and recomputation mode are names instead of indices."""
    values = asdict(Layouts()) | dict(layout)
    return values | {
        "schedule": SCHEDULES[int(values["schedule"])],
        "recompute": RECOMPUTE[int(values["recompute"])],
    }


def runs_of(measured: Iterable[Measured]) -> MeasuredRuns:
    """Convert measured runs, at least one, to arrays with one entry per run."""
    runs = list(measured)
    models = [Architecture(**run.architecture) for run in runs]
    devices = [
        hardware.cluster(run.gpu, run.devices, devices_per_node=run.devices_per_node).device
        for run in runs
    ]
    job = Job(
        model=stack(models),
        device=stack(devices),
        framework=stack([plait(precision=run.precision, compiled=run.compiled) for run in runs]),
        layouts=Layouts.of([_layout_of_run(run) for run in runs]),
        sequence=np.array([run.sequence for run in runs]),
        precision=np.array([PRECISIONS.index(run.precision) for run in runs]),
        has_exact_blocks=all(
            not run.compiled and model.is_counted for run, model in zip(runs, models, strict=True)
        ),
    )
    peaks = [None if run.bytes is None else (run.bytes, "allocated") for run in runs]
    return MeasuredRuns(job, np.array([run.seconds for run in runs], dtype=float), peaks)


def _layout_of_run(run: Measured) -> dict[str, Any]:
    schedule = SCHEDULES.index(run.layout["schedule"])
    recompute = RECOMPUTE.index(run.layout["recompute"])
    return {**run.layout, "schedule": schedule, "recompute": recompute}


FORMAT = "plait calibration 1"


@dataclass(frozen=True)
class CalibrationOrigin:
    """Device on which a calibration was measured."""

    gpu: str
    machine: str = ""
    """Processor and threads per process, if the device is a CPU."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Description: time and source of the calibration."""


def save_calibration(path: Path, calibration: Calibration, origin: CalibrationOrigin) -> None:
    """Write a calibration to a file. Raises InputError if the file cannot be written."""
    content = {
        "format": FORMAT,
        "gpu": origin.gpu,
        "machine": origin.machine,
        "facts": dict(origin.facts),
        "time": _fit_facts(calibration.time),
        "memory": _fit_facts(calibration.memory),
    }
    write_atomically_in_folder(path, json.dumps(content, indent=1) + "\n")


def load_calibration(path: Path) -> tuple[Calibration, CalibrationOrigin]:
    """Read a calibration and its origin from a file.

    Raises:
        InputError: The file is missing, or is not a calibration of this version's constants.
    """

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; name a file that `plait calibrate` wrote"
        ) from None
    except ValueError as error:
        raise InputError(
            f"{path}: not JSON ({error}); name a file that `plait calibrate` wrote"
        ) from None

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(
            f"{path}: its format is not {FORMAT!r}; write a calibration with `plait calibrate`"
        )
    try:
        calibration = Calibration(_fit(content["time"]), _fit(content["memory"]))
        return calibration, CalibrationOrigin(content["gpu"], content["machine"], content["facts"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); recreate it with `plait"
            " calibrate`"
        ) from None


def refuse_other(path: Path, origin: CalibrationOrigin, *, gpu: str, machine: str) -> None:
    """Raise InputError if a calibration is for a different device than the plan."""
    if origin.gpu != gpu:
        raise InputError(
            f"{path}: is a calibration of {origin.gpu}, but the plan is for {gpu}; run `plait"
            " calibrate` on that device, or leave --calibrate out"
        )

    if gpu == "cpu" and origin.machine != machine:
        raise InputError(
            f"{path}: is a calibration of {origin.machine!r}, but this machine is {machine!r}; run"
            " `plait calibrate` on this machine"
        )


def _fit_facts(fitted: Fit) -> dict[str, Any]:
    priors = fitted_priors().constants
    deviations = np.sqrt(np.diag(fitted.covariance))
    return {
        "constants": {
            name: {
                "value": float(fitted.rates[name]),
                "deviation": float(deviation),
                "shipped": priors[name].median,
                "shipped_deviation": priors[name].width,
                "meaning": priors[name].meaning,
            }
            for name, deviation in zip(fitted.names, deviations, strict=True)
        },
        "covariance": fitted.covariance.tolist(),
        "spread": fitted.spread,
        "rows": fitted.rows,
    }


def _fit(content: Mapping[str, Any]) -> Fit:
    priors = fitted_priors()
    names = tuple(content["constants"])
    unknown = [name for name in names if name not in priors.constants]
    if unknown:
        raise ValueError(f"this version has no constant {', '.join(unknown)}")
    covariance = np.array(content["covariance"], dtype=np.float64)
    if covariance.shape != (len(names), len(names)):
        raise ValueError(
            f"the covariance has the shape {covariance.shape}, but there are {len(names)} constants"
        )
    values = {
        **priors.rates.values,
        **{name: float(entry["value"]) for name, entry in content["constants"].items()},
    }
    if not all(np.isfinite(value) and value > 0 for value in values.values()):
        raise ValueError("a constant is not a positive number")
    spread = float(content["spread"])
    if not (
        np.isfinite(covariance).all() and (np.diag(covariance) >= 0).all() and 0 <= spread < np.inf
    ):
        raise ValueError("the covariance or the spread is negative or not finite")
    return Fit(names, Rates(values), covariance, spread, int(content["rows"]))
