"""The devices that a calibration is of, and what is printed of it."""

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

from plait.cli.planning.tables import print_table
from plait.cluster import accelerator
from plait.cluster.machines import Topology
from plait.cluster.topology import discover
from plait.planner.calibrate import Calibration, errors_left_out, errors_with, uncalibrated
from plait.planner.calibration_runs import DeviceRates
from plait.planner.constants import Knowledge, knowledge
from plait.planner.hardware import Cluster, cluster_of
from plait.planner.measured import MeasuredRuns


def default_cache() -> Path:
    """The folder for what is kept between runs, where no file names one."""
    return Path(os.environ.get("PLAIT_CACHE") or Path.home() / ".cache" / "plait").expanduser()


def live_devices() -> tuple[Topology, str]:
    """The machines of the processes that run now, and what their devices call themselves."""
    topology = discover()
    name = "cpu"
    if topology.device_type == accelerator.NAME:
        name = accelerator.model_name()
    return topology, name


def live_cluster() -> Cluster:
    """The devices of the processes that run now. Raises InputError for GPUs that are not in the
    catalogue.
    """
    return cluster_of(*live_devices())


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that counts to `total`; a line a measurement where that is no
    terminal.
    """
    if not shown:
        yield lambda _: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    ) as bar:
        task = bar.add_task("starting", total=total)

        def done(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield done


class _Lines:
    """A line about every ten seconds, and one at the end."""

    def __init__(self, total: int) -> None:
        self._total, self._count, self._began = total, 0, time.monotonic()
        self._told = self._began

    def __call__(self, what: str) -> None:
        self._count += 1
        now = time.monotonic()
        if self._count in (1, self._total) or now - self._told >= 10:
            self._told = now
            print(
                f"plait: {self._count} of {self._total} measurements, {now - self._began:.0f} s:"
                f" {what}",
                file=sys.stderr,
                flush=True,
            )


def print_rates(rates: DeviceRates) -> None:
    """What was measured of the device."""
    for name, value in rates.products.items():
        print(f"product {name:<22} {value / 1e9:10.1f} GFLOP/s")
    print(f"memory {'':<23} {rates.memory_bytes_per_second / 1e9:10.1f} GB/s")
    if rates.all_reduce is not None:
        fixed, per_byte = rates.all_reduce
        print(
            f"all-reduce {'':<19} {fixed * 1e6:10.0f} us"
            + (f" + {1 / per_byte / 1e9:.2f} GB/s" if per_byte else "")
        )
    print()


def print_calibration(
    found: Calibration, runs: MeasuredRuns, *, known: Knowledge | None = None
) -> None:
    """The constants that moved with their priors and uncertainties, and errors before, after, and
    with each row left out.
    """
    shipped = knowledge().constants
    prior = (known or knowledge()).constants
    rows = []
    kept = 0
    for fit in (found.time, found.memory):
        if not fit.rows:
            continue
        for name, deviation in zip(fit.names, np.sqrt(np.diag(fit.covariance)), strict=True):
            before = prior[name]
            value = float(fit.rates[name])
            if (
                before == shipped[name]
                and deviation > 0.98 * before.width
                and abs(np.log(value / before.median)) < 0.02 * before.width
            ):
                kept += 1
                continue
            measured = (
                ""
                if before == shipped[name]
                else f"{before.median:.3g} ±{100 * before.width:.0f} %"
            )
            shipped_text = f"{shipped[name].median:.3g} ±{100 * shipped[name].width:.0f} %"
            rows.append(
                [
                    name,
                    shipped_text,
                    measured,
                    f"{value:.3g} ±{100 * deviation:.0f} %",
                    shipped[name].meaning,
                ]
            )
    print_table(
        Console(soft_wrap=True, highlight=False),
        ["constant", "shipped", "rates measured", "fitted", "meaning"],
        rows,
    )
    if kept:
        print(f"{kept} constants that these runs do not determine stay as shipped\n")
    lines = [
        ("before", errors_with(runs, uncalibrated())),
        ("after", errors_with(runs, found)),
        ("left out", errors_left_out(runs, known)),
    ]
    words = {
        "before": "by the constants that ship",
        "after": "of the layouts fitted",
        "left out": "each layout by a fit to all others",
    }
    for name, (count, middle, largest) in lines:
        print(
            f"error {name:<9} median {middle:6.1%}, largest {largest:6.1%} over {count} layouts,"
            f" {words[name]}"
        )
