"""Where calibrations come from on the command line (a file, a table, a history, this machine), and what is printed of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from plait.cli.planning.tables import print_table
from plait.cluster import accelerator
from plait.cluster.machines import Topology
from plait.cluster.topology import discover
from plait.errors import InputError
from plait.planner.calibrate import Calibration, calibrate, errors_left_out, errors_with, uncalibrated
from plait.planner.calibration_file import Origin
from plait.planner.calibration_runs import DeviceRates
from plait.planner.constants import Knowledge, knowledge
from plait.planner.hardware import Cluster, cluster_of, device
from plait.planner.history import read, runs_of, same_machine
from plait.planner.possible import possible_rows
from plait.planner.runs import Runs, measured_seconds, read_runs

FEWEST_ROWS = 3
"""Fewer tell constants from chance too badly to write a file of them."""
_NEWEST = 200
"""Rows of a history that count."""
_SHOWN = 3
"""Of what a table has wrong, in the message of an error."""


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
    """The devices of the processes that run now. Raises InputError for GPUs that are not in the catalogue."""
    return cluster_of(*live_devices())


def runs_of_table(table: Path, gpu: str | None) -> tuple[Runs, Origin, list[str]]:
    """The rows of one device, where they are from, and a note for everything of the file that no run has measured, which is left out.
    Raises InputError for a file without enough rows, or with rows of several devices."""
    machine = ""
    if table.suffix == ".jsonl":
        history, left_out = read(table)
        names = sorted({row.gpu for row in history})
        wanted = _wanted(table, names, gpu, left_out)
        rows = [row for row in history if row.gpu == wanted]
        machines = sorted({row.machine for row in rows})
        if len(machines) > 1:
            raise InputError(f"{table}: its runs are of {len(machines)} processors ({'; '.join(machines)}); calibrate each on its own")
        machine = machines[0]
        runs = runs_of(rows)
    else:
        of: dict[str, list[Any]] = {}
        possible, problems = possible_rows(table)
        left_out = [f"left out: {problem}" for problem in problems]
        for row in possible:
            try:
                of.setdefault(str(device(row.get("gpu") or "").name), []).append(row)
            except InputError:
                continue
        wanted = _wanted(table, sorted(of), gpu, left_out)
        runs = read_runs(of[wanted])
    usable = {variant.row for variant in runs.variants if measured_seconds(runs.rows[variant.row]) is not None}
    if len(usable) < FEWEST_ROWS:
        reasons = "".join(f"; row {index + 1}: {reason}" for index, reason in list(runs.reasons.items())[:3])
        rule = f"{len(usable)} rows of {wanted} can be predicted and have a time, and a calibration needs at least {FEWEST_ROWS}"
        raise InputError(f"{table}: {rule}; measure more layouts{reasons}{_first(left_out)}")
    return runs, Origin(wanted, machine, {"from": table.name, "rows": len(usable)}), left_out


def _first(left_out: list[str]) -> str:
    """Of what is left out, the first for a message."""
    more = len(left_out) - _SHOWN
    return "".join(f"; {note}" for note in left_out[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


_FAR_OFF = 0.5
"""A median error of a fit from which on a table's times are hardly seconds of one step."""


def notes_on(table: Path, runs: Runs, found: Calibration) -> list[str]:
    """What to tell of a table that a calibration was fitted to: how many rows count, why others do not, times that fit none."""
    timed = {index for index, row in enumerate(runs.rows) if measured_seconds(row) is not None}
    used = timed - runs.reasons.keys()
    notes = [f"{len(used)} rows of {table} move the constants"]
    if len(used) < len(runs.rows):
        first = next(index for index in range(len(runs.rows)) if index not in used)
        why = runs.reasons.get(first, "no time of a step above 0, and no tokens/s that gives one")
        notes.append(f"{len(runs.rows) - len(used)} rows of {table} are left out; row {first + 1} of its device: {why}")
    middle = errors_with(runs, found)[1]
    if middle > _FAR_OFF:
        size = f"{100 * middle:.3g} %"
        notes.append(f"times of {table} are {size} off what the constants fitted to them say; step_time_s is seconds of one step")
    return notes


def _wanted(table: Path, names: list[str], gpu: str | None, left_out: list[str]) -> str:
    if not names:
        raise InputError(f"{table}: no row names a device of the catalogue; `plait plan models` prints their names{_first(left_out)}")
    if gpu is not None:
        wanted = str(device(gpu).name)
        if wanted not in names:
            raise InputError(f"--gpu {gpu}: {table} has rows of {', '.join(names)} only; name one of them, or measure on {wanted}")
        return wanted
    if len(names) > 1:
        raise InputError(f"{table}: has rows of {', '.join(names)}; choose with --gpu {names[0]}")
    return names[0]


def from_history(path: Path, *, gpu: str, machine: str) -> tuple[Calibration | None, list[str]]:
    """(constants from the runs of this device in a history, notes); None where it has none."""
    history, notes = read(path)
    rows = [row for row in history if same_machine(row, gpu=gpu, machine=machine)][-_NEWEST:]
    if not rows:
        return None, notes
    count = "1 measured run in {} moves" if len(rows) == 1 else f"{len(rows)} measured runs in {{}} move"
    return calibrate(runs_of(rows)), [*notes, f"{count.format(path)} the constants"]


# ---- on the screen -------------------------------------------------------------------------------------------------------------------


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that counts to `total`; a line a measurement where that is no terminal."""
    if not shown:
        yield lambda _: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"), console=console) as bar:
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
            print(f"plait: {self._count} of {self._total} measurements, {now - self._began:.0f} s: {what}", file=sys.stderr, flush=True)


def print_rates(rates: DeviceRates) -> None:
    """What was measured of the device."""
    for name, value in rates.products.items():
        print(f"product {name:<22} {value / 1e9:10.1f} GFLOP/s")
    print(f"memory {'':<23} {rates.memory_bytes_per_second / 1e9:10.1f} GB/s")
    if rates.all_reduce is not None:
        fixed, per_byte = rates.all_reduce
        print(f"all-reduce {'':<19} {fixed * 1e6:10.0f} us" + (f" + {1 / per_byte / 1e9:.2f} GB/s" if per_byte else ""))
    print()


def print_calibration(found: Calibration, runs: Runs, *, known: Knowledge | None = None) -> None:
    """The constants that moved with their priors and uncertainties, and errors before, after, and with each row left out."""
    shipped, prior = knowledge().constants, (known or knowledge()).constants
    rows, kept = [], 0
    for fit in (found.time, found.memory):
        if not fit.rows:
            continue
        for name, deviation in zip(fit.names, np.sqrt(np.diag(fit.covariance)), strict=True):
            before, value = prior[name], float(fit.rates[name])
            if before == shipped[name] and deviation > 0.98 * before.width and abs(np.log(value / before.median)) < 0.02 * before.width:
                kept += 1
                continue
            measured = "" if before == shipped[name] else f"{before.median:.3g} ±{100 * before.width:.0f} %"
            shipped_text = f"{shipped[name].median:.3g} ±{100 * shipped[name].width:.0f} %"
            rows.append([name, shipped_text, measured, f"{value:.3g} ±{100 * deviation:.0f} %", shipped[name].meaning])
    print_table(Console(soft_wrap=True, highlight=False), ["constant", "shipped", "rates measured", "fitted", "meaning"], rows)
    if kept:
        print(f"{kept} constants that these runs do not determine stay as shipped\n")
    lines = [("before", errors_with(runs, uncalibrated())), ("after", errors_with(runs, found)), ("left out", errors_left_out(runs, known))]
    words = {"before": "by the constants that ship", "after": "of the rows fitted", "left out": "each row by a fit to all others"}
    for name, (count, middle, largest) in lines:
        print(f"error {name:<9} median {middle:6.1%}, largest {largest:6.1%} over {count} rows, {words[name]}")
