"""Devices of the running processes, and the output of a calibration."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from plait.cli.tables import print_table
from plait.cluster import accelerator
from plait.cluster.machines import Topology
from plait.cluster.topology import discover
from plait.planner.calibrate import (
    Calibration,
    DeviceRates,
    MeasuredRuns,
    errors_left_out,
    errors_with,
    uncalibrated,
)
from plait.planner.constants import Knowledge, knowledge
from plait.planner.hardware import Cluster, cluster_of


def default_cache() -> Path:
    """Return the cache folder for runs whose file does not name one."""
    return Path(os.environ.get("PLAIT_CACHE") or Path.home() / ".cache" / "plait").expanduser()


def live_devices() -> tuple[Topology, str]:
    """Return the machines of the running processes, and the name that their devices report."""
    topology = discover()
    name = "cpu"
    if topology.device_type == accelerator.NAME:
        name = accelerator.model_name()
    return topology, name


def live_cluster() -> Cluster:
    """Return the devices of the running processes for the planner.

    Raises:
        InputError: The catalogue lacks these GPUs.
    """
    return cluster_of(*live_devices())


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
    """Prints a line about every ten seconds, and one at the end."""

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
    calibration: Calibration, runs: MeasuredRuns, *, known: Knowledge | None = None
) -> None:
    """Print the fitted constants with their uncertainties, and the errors of the fit.

    Args:
        calibration: The fitted constants.
        runs: Measured runs that they were fitted to.
        known: Knowledge before the fit. None for the shipped constants.
    """
    shipped = knowledge().constants
    prior = (known or knowledge()).constants
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
        Console(soft_wrap=True, highlight=False),
        ["constant", "shipped", "rates measured", "fitted", "meaning"],
        rows,
    )
    if undetermined:
        print(f"{undetermined} constants that these runs do not determine stay as shipped\n")

    errors = [
        ("before", "with the shipped constants", errors_with(runs, uncalibrated())),
        ("after", "of the fitted layouts", errors_with(runs, calibration)),
        ("left out", "each layout by a fit to all others", errors_left_out(runs, known)),
    ]
    for name, meaning, (count, middle, largest) in errors:
        print(
            f"error {name:<9} median {middle:6.1%}, largest {largest:6.1%} over {count} layouts,"
            f" {meaning}"
        )


def _with_uncertainty(value: float, deviation: float) -> str:
    return f"{value:.3g} ±{100 * deviation:.0f} %"
