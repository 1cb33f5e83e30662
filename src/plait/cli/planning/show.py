"""Output of `plait plan` and `plait calibrate`: tables on a terminal, and lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from plait.cli.terminal import print_table
from plait.planner import hardware
from plait.planner import models as catalogue
from plait.planner.calibrate import (
    Calibration,
    DeviceRates,
    MeasuredRuns,
    errors_with,
    leave_one_out_errors,
    uncalibrated,
)
from plait.planner.constants import Priors, coverage_of_intervals, fitted_priors
from plait.planner.explain import Comparison, describe, ties_of
from plait.planner.memory import MEMORY_TERMS
from plait.planner.search import LayoutChoice, Plan
from plait.planner.step_time import STEP_TERMS
from plait.sizes import GIB, format_count


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def print_plan(
    plan: Plan,
    notes: list[str],
    reasons: list[Comparison],
    neighbours: list[Comparison],
) -> None:
    """Print the layouts of a plan, their predictions and the comparisons.

    Args:
        plan: The plan.
        notes: Notes about defaults and overrides in the request.
        reasons: Comparisons that the user requested.
        neighbours: Comparisons with the layouts one step away.
    """
    console = _console()
    request = plan.request
    model = request.model.architecture
    print(f"{model.name}: {format_count(float(model.parameters))} parameters; {request.cluster}")
    print(
        f"batch {request.global_batch} x {request.sequence} tokens, {request.precision}; "
        f"{plan.candidates:,} layouts evaluated, {plan.fitting:,} fit"
    )
    for note in notes:
        print(f"note: {note}")

    _print_choices(plan, console)
    _print_terms(plan.best[0], console)
    for comparison in reasons:
        print(f"why not {comparison.reason}")
        if comparison.other is not None and comparison.other is not comparison.winner:
            rows = [
                [STEP_TERMS[name], f"{ours:.3g} s", f"{theirs:.3g} s"]
                for name, ours, theirs in comparison.differences[:6]
                # Smaller differences do not explain the choice.
                if abs(ours - theirs) > 1e-4
            ]
            print_table(console, ("term", "plan", describe(comparison.other.layout)), rows)
    if neighbours:
        print_table(
            console, ("one step away", "step", "layout", "because"), _neighbour_rows(neighbours)
        )

    left_out = [[exclusion.region, exclusion.rule] for exclusion in plan.excluded]
    left_out += [[shortage.region, str(shortage)] for shortage in plan.shortages]
    print_table(console, ("left out", "because"), left_out[:12])
    if len(left_out) > 12:
        print(f"and {len(left_out) - 12} more regions; --json lists them")


def _print_choices(plan: Plan, console: Console) -> None:
    capacity = float(plan.request.cluster.device.memory_bytes) / GIB
    rows = []
    for number, choice in enumerate(plan.best, start=1):
        rows.append(
            [
                str(number),
                describe(choice.layout),
                f"{choice.seconds:.4g} s ({choice.seconds_low:.3g} to {choice.seconds_high:.3g})",
                format_count(choice.tokens_per_second),
                f"{choice.mfu:.1%}",
                f"{choice.needed_bytes / GIB:.1f} (to {choice.needed_high_bytes / GIB:.1f}) of"
                f" {capacity:.1f} GiB",
            ]
        )
    print_table(console, ("", "layout", "step (90 %)", "tokens/s", "MFU", "memory (90 %)"), rows)
    print(f"{coverage_of_intervals(experts=bool(plan.request.model.architecture.experts))}\n")
    if plan.ties > 1:
        print(f"{ties_of(plan)}\n")


def _print_terms(choice: LayoutChoice, console: Console) -> None:
    """Print the terms of a layout's step time and memory."""
    times = [
        [STEP_TERMS[name], f"{value:.4g} s", f"{value / choice.seconds:.1%}"]
        for name, value in choice.terms.items()
        # Smaller terms would read 0.0 %.
        if value > 0.0005 * choice.seconds
    ]
    print_table(console, ("1: the step", "", ""), times)
    sizes = []
    for name, value in choice.memory_terms.items():
        if value > 0:
            sizes.append([MEMORY_TERMS[name], f"{value / GIB:.2f} GiB"])
    sizes += [
        ["allocated", f"{choice.allocated / GIB:.2f} GiB"],
        ["reserved", f"{choice.reserved / GIB:.2f} GiB"],
        ["with the context", f"{choice.needed_bytes / GIB:.2f} GiB"],
    ]
    print_table(console, (f"1: memory at its peak, {choice.moment}", ""), sizes)


def _neighbour_rows(neighbours: list[Comparison]) -> list[list[str]]:
    """Return a row per neighbour. Rows of a repeated layout refer to its first row."""
    rows = []
    first_queries: dict[str, str] = {}
    for comparison in neighbours:
        query = comparison.query
        other = comparison.other
        if other is None:
            rows.append([query, "-", "-", comparison.reason.removeprefix(f"{query} ")])
            continue
        layout = describe(other.layout)
        first_query = first_queries.setdefault(layout, query)
        if first_query != query:
            reason = f"the same layout as {first_query}"
        else:
            reason = comparison.reason.partition("): ")[2]
        rows.append([query, f"{other.seconds:.4g} s", layout, reason])
    return rows


def print_nothing_fits(plan: Plan) -> None:
    """Print to standard error that no layout fits, and the memory that the smallest ones lack."""
    request = plan.request
    print(
        f"plait: nothing fits: {request.model.architecture.name} on {request.cluster}",
        file=sys.stderr,
    )
    for shortage in sorted(plan.shortages, key=lambda shortage: shortage.needed_bytes)[:4]:
        print(f"plait: {shortage.region} {shortage}", file=sys.stderr)
    if plan.fitting:
        print(
            f"plait: {plan.fitting} layouts would fit by a margin smaller than the uncertainty of"
            " their memory",
            file=sys.stderr,
        )
    print(
        "plait: use more GPUs, GPUs with more memory, shorter samples (--seq), or a smaller model",
        file=sys.stderr,
    )


def names_as_json() -> dict[str, list[str]]:
    """Return the names of the public models and of the GPUs in the catalogue."""
    return {"models": list(catalogue.names()), "gpus": list(hardware.device_names())}


def print_names() -> None:
    """Print the public models and the GPUs in the catalogue with their sizes."""
    console = _console()
    models = []
    for name in catalogue.names():
        model = catalogue.named(name)
        assert model is not None
        models.append(
            [
                name,
                format_count(float(model.parameters)),
                f"{model.layers} x {model.hidden}, {model.heads} heads, vocabulary {model.vocab}",
            ]
        )
    print_table(console, ("model", "parameters", "shape"), models)
    devices = []
    for name in hardware.device_names():
        device = hardware.device(name)
        peak = max(device.flops.get(precision, 0) for precision in ("bf16", "fp16", "fp32"))
        devices.append(
            [
                name,
                device.title,
                f"{device.memory_bytes / GIB:.1f} GiB",
                f"{peak / 1e12:.4g} TFLOP/s",
                f"{device.devices_per_node} per node",
            ]
        )
    print_table(console, ("gpu", "", "memory", "16 bits", ""), devices)


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show the progress of measurements on standard error: a bar on a terminal, lines elsewhere.

    Args:
        total: Number of measurements.
        shown: Whether this process shows anything.

    Yields:
        A function that receives the name of each finished measurement.
    """
    if not shown:
        yield lambda _: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _ProgressPrinter(total)
        return
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    ) as bar:
        task = bar.add_task("starting", total=total)

        def finish(name: str) -> None:
            bar.update(task, advance=1, description=name)

        yield finish


class _ProgressPrinter:
    """Printer of a progress line about every ten seconds, and of one at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._count = 0
        self._started = time.monotonic()
        self._last_line = self._started

    def __call__(self, name: str) -> None:
        self._count += 1
        now = time.monotonic()
        if self._count in (1, self._total) or now - self._last_line >= 10:
            self._last_line = now
            print(
                f"plait: {self._count} of {self._total} measurements, {now - self._started:.0f} s:"
                f" {name}",
                file=sys.stderr,
                flush=True,
            )


def print_rates(rates: DeviceRates) -> None:
    """Print the measured rates of a device."""
    for name, value in rates.products.items():
        print(f"product {name:<22} {value / 1e9:10.1f} GFLOP/s")
    print(f"memory {'':<23} {rates.memory_bytes_per_second / 1e9:10.1f} GB/s")
    if rates.all_reduce is not None:
        fixed, per_byte = rates.all_reduce
        bandwidth = f" + {1 / per_byte / 1e9:.2f} GB/s" if per_byte else ""
        print(f"all-reduce {'':<19} {fixed * 1e6:10.0f} us{bandwidth}")
    print()


def print_calibration(
    calibration: Calibration, runs: MeasuredRuns, *, priors: Priors | None = None
) -> None:
    """Print the fitted constants with their uncertainties, and the errors of the fit.

    Args:
        calibration: The fitted constants.
        runs: Measured runs to which the constants were fitted.
        priors: Priors of the fit. None for the shipped constants.
    """
    shipped = fitted_priors().constants
    prior = (priors or fitted_priors()).constants
    rows = []
    undetermined = 0
    for fit in (calibration.time, calibration.memory):
        if not fit.rows:
            continue
        for name, deviation in zip(fit.names, np.sqrt(np.diag(fit.covariance)), strict=True):
            before = prior[name]
            value = float(fit.rates[name])
            is_shipped = before == shipped[name]
            # The fit neither narrowed nor moved the prior.
            if (
                is_shipped
                and deviation > 0.98 * before.width
                and abs(np.log(value / before.median)) < 0.02 * before.width
            ):
                undetermined += 1
                continue
            rows.append(
                [
                    name,
                    _with_uncertainty(shipped[name].median, shipped[name].width),
                    "" if is_shipped else _with_uncertainty(before.median, before.width),
                    _with_uncertainty(value, deviation),
                    shipped[name].meaning,
                ]
            )
    print_table(
        _console(),
        ["constant", "shipped", "rates measured", "fitted", "meaning"],
        rows,
    )
    if undetermined:
        print(f"{undetermined} constants that these runs do not determine stay as shipped\n")

    errors = [
        ("before", "with the shipped constants", errors_with(runs, uncalibrated())),
        ("after", "of the fitted layouts", errors_with(runs, calibration)),
        ("left out", "each layout by a fit to all others", leave_one_out_errors(runs, priors)),
    ]
    for name, meaning, (count, middle, largest) in errors:
        print(
            f"error {name:<9} median {middle:6.1%}, largest {largest:6.1%} over {count} layouts,"
            f" {meaning}"
        )


def _with_uncertainty(value: float, deviation: float) -> str:
    return f"{value:.3g} ±{100 * deviation:.0f} %"
