"""`plait doctor --validate`: finds the GPUs, runs the checks, shows and writes each result.

The command itself does not touch a device, because a driver can hang or end a process that queries
it. A separate process (`python -m plait.cli.validating.command`) queries the devices and prints the
properties of the machine as one JSON object. The JSON report is rewritten after every check, so
that it has all results so far, however the command ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from plait.cli.options import require_writable
from plait.cluster import accelerator
from plait.cluster.environment import facts as environment_facts
from plait.cluster.topology import device_count
from plait.errors import DeviceError, InputError
from plait.files import not_writable, write_atomically
from plait.names import number_of
from plait.sizes import format_bytes
from plait.validation.catalogue import (
    FACTS_PLANNED_SECONDS,
    MOST_GPUS,
    PACKAGES_OF_PEERS,
    Machine,
    planned_seconds,
    rows_of,
)
from plait.validation.context import SIMULATED
from plait.validation.rows import Result, Row, counts, document, exit_code, summary_of
from plait.validation.runner import LAUNCH_PLANNED_SECONDS, Interrupted, Runner, batches

_COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}

DEFAULT_MINUTES = 8.0
_FACTS_SECONDS = 180
_LISTED_MEMORY_BYTES = 80 * 2**30
"""Memory of the GPUs that `--list` assumes."""


def validate(
    *,
    minutes: float,
    only: Sequence[str],
    out: Path,
    gpus: int | None,
    as_json: bool,
) -> int:
    """Run the checks and return the exit code.

    Args:
        minutes: Time budget. Checks that do not fit into the remaining time are not run.
        only: Patterns of the names of checks. Empty for the default checks.
        out: Path of the JSON report. The calibration is written next to it.
        gpus: Number of GPUs to use. None uses all, up to MOST_GPUS.
        as_json: Whether to print the report to standard output at the end.

    Raises:
        InputError: An option is not valid.
        DeviceError: There is no GPU.
    """
    # The budget includes the search for the GPUs.
    started = time.monotonic()
    require_writable("--out", out, make_folder=True)
    facts = machine_facts()
    machine = machine_of(facts, gpus)
    rows = rows_of(machine, only)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    results: list[Result] = []
    launch_facts = {
        "gpus": machine.gpus,
        "simulated": machine.simulated,
        "calibration": str(out.with_suffix(".calibration.json").absolute()),
    }

    def write_document() -> dict[str, Any]:
        content = document(
            {**facts, "gpus_used": machine.gpus},
            results,
            at=at,
            seconds=time.monotonic() - started,
            only=only,
        )
        try:
            write_atomically(out, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise not_writable(f"--out {out}", error) from None
        return content

    with Screen(len(rows), facts, machine.gpus, quiet=as_json) as screen:
        screen.plan(planned_seconds(rows), minutes)
        budget = 60 * minutes - (time.monotonic() - started)
        runner = Runner(_launch_command, budget_seconds=budget, began=screen.began)
        try:
            for result in runner.run(rows, launch_facts):
                results.append(result)
                screen.ended(result)
                write_document()
        except Interrupted:
            # Rows that did not run have results as well.
            write_document()
            screen.summary(results, out, time.monotonic() - started)
            raise
    content = write_document()
    if as_json:
        print(json.dumps(content, indent=1))
    screen.summary(results, out, time.monotonic() - started)
    return exit_code(results)


def list_rows(*, only: Sequence[str], gpus: int | None) -> str:
    """Return the table of checks with their planned seconds, without using the devices."""
    count = gpus or 1
    if not 1 <= count <= MOST_GPUS:
        raise InputError(
            f"--nproc-per-node {count}: a validation uses 1 to {MOST_GPUS} GPUs; pass one of these"
        )
    peers = tuple(name for name in PACKAGES_OF_PEERS if find_spec(name) is not None)
    machine = Machine(
        count,
        _LISTED_MEMORY_BYTES,
        transformers=find_spec("transformers") is not None,
        installed_peers=peers,
    )
    return table_of_rows(rows_of(machine, only), count)


def machine_facts() -> dict[str, Any]:
    """Return `validation_facts` of this machine, from a separate process.

    Raises:
        DeviceError: The process failed, or torch sees no accelerator that Plait trains on.
    """
    command = [sys.executable, "-m", "plait.cli.validating.command"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_FACTS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"torch did not detect the GPUs within {_FACTS_SECONDS} s; check whether `nvidia-smi`"
            " responds"
        ) from None
    if process.returncode:
        last_lines = " | ".join(process.stderr.strip().splitlines()[-3:])
        raise DeviceError(
            f"torch cannot detect GPUs: {last_lines}; check whether `nvidia-smi` responds"
        )
    # The last line, because libraries may print lines before it.
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    if not facts["devices"]:
        raise DeviceError(_why_no_devices(facts))
    return facts


def _why_no_devices(facts: dict[str, Any]) -> str:
    torch = facts["versions"].get("torch")
    other = facts["accelerator"]
    built = facts["built_for"]
    if other is not None:
        return (
            f"torch {torch} has the accelerator {other!r}, and Plait trains on {accelerator.NAME};"
            " there is nothing to validate here"
        )
    if facts["driver"] is not None:
        return (
            f"the driver {facts['driver']} answers, but torch {torch} (built for {built}) sees no"
            " GPU; docs/how-to/gpus.md has the line to install"
        )
    return (
        f"torch {torch} (built for {built}) sees no GPU on this machine; there is nothing to"
        " validate without one"
    )


def machine_of(facts: dict[str, Any], gpus: int | None) -> Machine:
    """Return the facts that determine which checks run.

    Raises:
        InputError: `gpus` is larger than the number of GPUs that can be used.
    """
    devices = facts["devices"]
    most = min(len(devices), MOST_GPUS)
    if gpus is not None and not 1 <= gpus <= most:
        raise InputError(
            f"--nproc-per-node {gpus}: this machine has {number_of(len(devices), 'GPU')}, of which"
            f" a validation uses at most {MOST_GPUS}; pass 1 to {most}"
        )
    count = gpus or most
    return Machine(
        gpus=count,
        # Rows must fit on every GPU that is used.
        memory_bytes=min(device["memory_bytes"] for device in devices[:count]),
        simulated=facts["simulated"],
        transformers=facts["installed"]["transformers"],
        installed_peers=tuple(name for name in PACKAGES_OF_PEERS if facts["installed"].get(name)),
    )


def _launch_command(ranks: int, folder: Path) -> list[str]:
    """Return the command of a launch, whose ranks end when this process ends (--lifeline)."""
    launch = [sys.executable, "-m", "plait", "launch", "--lifeline"]
    options = ["--nproc-per-node", str(ranks), "--grace", "3"]
    return [*launch, *options, "-m", "plait.cli.validating.worker", str(folder)]


class Screen:
    """Terminal output of a validation while its checks run.

    With `quiet`, lines go to standard error, because standard output is the JSON report.
    """

    def __init__(self, rows: int, facts: Mapping[str, Any], gpus: int, *, quiet: bool) -> None:
        """Print a line about the machine. `rows` is the number of checks of the validation."""
        self._console = Console(stderr=quiet, soft_wrap=True, highlight=False)
        self._stream = sys.stderr if quiet else sys.stdout
        self._rows = rows
        self._ended = 0
        self._bar: Progress | None = None
        self._print(_machine_line(facts, gpus))

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=self._rows)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def plan(self, seconds: float, minutes: float) -> None:
        """Show the planned time and the budget."""
        self._print(
            f"{self._rows} rows, planned for {seconds:.0f} s on an H100, budget {minutes:g} minutes"
        )

    def began(self, row: Row) -> None:
        """Show the title of the check that starts, if the output is a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, description=row.title)

    def ended(self, result: Result) -> None:
        """Show the result of a check."""
        self._ended += 1
        note = result.reason or summary_of(result.name, result.numbers)
        line = f"{result.outcome:<8} {result.name:<26} {result.seconds:6.1f} s  {result.title}"
        if note:
            line += f": {note}"
        if self._bar is None:
            self._print(line)
            return
        self._bar.update(self._task, completed=self._ended)
        self._bar.console.print(line, style=_COLOURS[result.outcome], markup=False)

    def summary(self, results: Sequence[Result], out: Path, seconds: float) -> None:
        """Show the number of checks per verdict, and the path of the report."""
        number = counts(results)
        self._print(
            f"\n{number['passed']} passed, {number['failed']} failed, {number['not run']} not run"
            f" in {seconds:.0f} s"
        )
        self._print(f"{out} has the numbers; docs/how-to/gpus.md says where to send it")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _machine_line(facts: Mapping[str, Any], gpus: int) -> str:
    devices = facts["devices"]
    kinds = [
        f"{device['name']}, {format_bytes(device['memory_bytes'])}" for device in devices[:gpus]
    ]
    versions = facts["versions"]
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    return (
        f"{gpus} of {number_of(len(devices), 'GPU')} ({', '.join(dict.fromkeys(kinds))}){driver}, "
        f"torch {versions.get('torch')}, plait {versions.get('plait')}"
    )


def table_of_rows(rows: Sequence[Row], gpus: int) -> str:
    """Return the planned seconds of the checks and their sum, as lines of text."""
    launches = sum(any(not row.unavailable for row in batch) for batch in batches(rows))
    start = f"  {FACTS_PLANNED_SECONDS:5.0f} s  versions and devices"
    launch = (
        f"  {launches * LAUNCH_PLANNED_SECONDS:5.0f} s  start of {number_of(launches, 'launch')}"
    )
    lines = ["planned seconds on an H100, the most valuable rows first", start, launch]
    for row in rows:
        planned = "      -" if row.unavailable else f"  {row.planned_seconds:5.0f} s"
        note = f" (not run: {row.unavailable})" if row.unavailable else ""
        lines.append(f"{planned}  {row.name:<26} {row.title}{note}")
    lines.append(f"  {planned_seconds(rows):5.0f} s  in all, with {number_of(gpus, 'GPU')}")
    return "\n".join(lines)


_VARIABLE_PREFIXES = ("OMP_NUM_THREADS", "GLOO_")
"""Prefixes of variables that change how the checks run, besides those of the accelerator.

Other variables are private to the user and are not part of the report.
"""
_PRIVATE_FACTS = ("interpreter", "free_bytes_here")
_TIMEOUT_SECONDS = 20


def validation_facts() -> dict[str, Any]:
    """Return the facts of the machine, its devices and the installed packages."""
    import torch

    environment = environment_facts(os.environ, folder=Path.cwd())
    kind = None
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
    count = device_count()
    names = [accelerator.model_name(index) for index in range(count)]
    devices = [
        {"name": name, "memory_bytes": accelerator.capacity_bytes(index)}
        for index, name in enumerate(names)
    ]
    return {
        "plait": {"version": environment["versions"].get("plait"), **_revision()},
        "versions": environment["versions"],
        "built_for": environment["gpus"]["built_for"],
        "communication": environment["communication"],
        "machine": {
            name: value
            for name, value in environment["machine"].items()
            if name not in _PRIVATE_FACTS
        },
        "accelerator": kind.type if kind is not None else None,
        "devices": devices,
        "described": [environment["gpus"][f"gpu {index}"] for index in range(count)],
        "driver": _driver(),
        "links_of_devices": _topology(),
        "simulated": any(SIMULATED in name for name in names),
        "installed": {
            name: find_spec(name) is not None for name in ("transformers", *PACKAGES_OF_PEERS)
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith((*accelerator.SETTINGS, *_VARIABLE_PREFIXES))
        },
    }


def _revision() -> dict[str, Any]:
    """Return the git revision of a working copy. A wheel has only its version."""
    # The root of a working copy, in which this file is src/plait/cli/validating/command.py.
    folder = Path(__file__).resolve().parents[4]
    if not (folder / ".git").exists():
        return {"from": "a wheel", "revision": None, "changed": None}
    revision = _output_of("git", "-C", str(folder), "rev-parse", "HEAD")
    return {
        "from": "a working copy",
        "revision": revision,
        "changed": bool(_output_of("git", "-C", str(folder), "status", "--porcelain")),
    }


def _driver() -> str | None:
    output = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


def _topology() -> list[str]:
    """Return the table of nvidia-smi about the links between the devices."""
    lines = (_output_of("nvidia-smi", "topo", "-m") or "").splitlines()
    # The legend below the table is left out.
    return [line.rstrip() for line in lines if line.startswith(("GPU", "\t", " "))]


def _output_of(*command: str) -> str | None:
    """Return the output of a program, or None if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


if __name__ == "__main__":
    # The process that `machine_facts` has started.
    print(json.dumps(validation_facts()), flush=True)
