"""The command: finds the GPUs, runs the rows, shows each result as it comes, and writes the document after each.

This process imports no torch and touches no device. The document is written again after every row, so that whatever ends the command, what
was found is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plait.cli.validating.show import Shown
from plait.cluster import accelerator
from plait.errors import DeviceError, InputError
from plait.files import write_whole
from plait.observe.files import require_writable
from plait.validation.catalogue import MOST_GPUS, Machine, rows_of
from plait.validation.document import document
from plait.validation.rows import Result, exit_code
from plait.validation.runner import Interrupted, Runner

_FACTS_SECONDS = 180


def validate(*, minutes: float, only: Sequence[str], out: Path, gpus: int | None, as_json: bool) -> int:
    """Run the rows and return the exit code. Raises InputError for what cannot be run, DeviceError without a GPU."""
    require_writable("--out", out, make_folder=True)
    facts = machine_facts()
    machine = machine_of(facts, gpus)
    rows = rows_of(machine, only)
    at, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    results: list[Result] = []

    def written() -> dict[str, Any]:
        found = document({**facts, "gpus_used": machine.gpus}, results, at=at, seconds=time.monotonic() - began, only=only)
        try:
            write_whole(out, json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise InputError(f"--out {out}: cannot be written ({error.strerror})") from None
        return found

    with Shown(len(rows), facts, machine.gpus, quiet=as_json) as shown:
        runner = Runner(_command, budget_seconds=60 * minutes, began=shown.began)
        try:
            for result in runner.run(rows, {"gpus": machine.gpus, "simulated": machine.simulated}):
                results.append(result)
                shown.ended(result)
                written()
        except Interrupted:
            written()
            shown.summary(results, out, time.monotonic() - began)
            raise
    found = written()
    if as_json:
        print(json.dumps(found, indent=1))
    shown.summary(results, out, time.monotonic() - began)
    return exit_code(results)


def machine_facts() -> dict[str, Any]:
    """What `machine` prints. Raises DeviceError where that fails, or where torch has no accelerator that Plait trains on."""
    command = [sys.executable, "-m", "plait.cli.validating.machine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FACTS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"torch did not find out within {_FACTS_SECONDS} s which GPUs there are; look whether `nvidia-smi` answers"
        ) from None
    if done.returncode:
        raise DeviceError(f"torch cannot look for GPUs: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not facts["devices"]:
        raise DeviceError(_without_devices(facts))
    return facts


def _without_devices(facts: dict[str, Any]) -> str:
    torch, other = facts["versions"].get("torch"), facts["accelerator"]
    if other is not None:
        return f"torch {torch} has the accelerator {other!r}, and Plait trains on {accelerator.NAME}; there is nothing to validate here"
    if facts["driver"] is not None:
        built = facts["built_for"]
        return (
            f"the driver {facts['driver']} answers, but torch {torch} (built for {built}) sees no GPU; docs/gpus.md has the line to install"
        )
    return f"torch {torch} (built for {facts['built_for']}) sees no GPU on this machine; there is nothing to validate without one"


def machine_of(facts: dict[str, Any], gpus: int | None) -> Machine:
    """What decides which rows run. Raises InputError for more GPUs than there are."""
    devices = facts["devices"]
    if gpus is not None and gpus > min(len(devices), MOST_GPUS):
        raise InputError(f"--nproc-per-node {gpus}: this machine has {len(devices)} GPUs, of which a validation uses at most {MOST_GPUS}")
    count = gpus or min(len(devices), MOST_GPUS)
    return Machine(
        gpus=count,
        memory_bytes=min(device["memory_bytes"] for device in devices[:count]),
        simulated=facts["simulated"],
        transformers=facts["installed"]["transformers"],
        deepspeed=facts["installed"]["deepspeed"],
    )


def _command(ranks: int, folder: Path) -> list[str]:
    """Ranks end when this process does, because their launcher's standard input ends then."""
    launch = [sys.executable, "-m", "plait", "launch", "--lifeline", "--nproc-per-node", str(ranks), "--grace", "3"]
    return [*launch, "-m", "plait.cli.validating.worker", str(folder)]
