"""Metrics file of a run: `metrics.jsonl`, one JSON object per event, in the order of the steps.

A run that is resumed from a checkpoint repeats the steps after the checkpoint. The old lines of
these steps are removed first, so that the file contains every step once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from plait.errors import InputError
from plait.events import (
    CheckpointSaved,
    CommunicationSelected,
    Event,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
)

_EVENT_NAMES: dict[type, str] = {
    RunStarted: "start",
    StepDone: "step",
    CommunicationSelected: "communication",
    Validated: "validation",
    CheckpointSaved: "checkpoint",
    RunEnded: "end",
}
"""Values of the key `event`. The other keys of a row are the fields of the event."""


class MetricsFile:
    """Listener that writes the events of a run to a file. Only one rank may create it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: TextIO | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event.first_step)
        if self._stream is None:
            raise InputError(
                f"{self._path}: {type(event).__name__} came before RunStarted, with which a run"
                " begins; emit RunStarted first"
            )
        # Every line is flushed, so that the file of a killed run is complete up to its end.
        print(json.dumps(_to_row(event), allow_nan=False), file=self._stream, flush=True)
        if isinstance(event, RunEnded):
            self.close()

    def close(self) -> None:
        """Close the file if the run failed. The event RunEnded closes it otherwise."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _begin(self, first_step: int) -> None:
        """Open the file, and drop the rows of steps that will be repeated."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.part")
        rows = read_metrics(self._path) if self._path.exists() else iter(())
        with open(partial, "w", encoding="utf-8") as stream:
            for row in rows:
                if _precedes(row, first_step):
                    print(json.dumps(row), file=stream)
        # The old file stays complete if this process ends while it writes.
        os.replace(partial, self._path)
        self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (open during the run)


def _to_row(event: Event) -> dict[str, Any]:
    """Return an event as JSON. NaN and infinity, which JSON lacks, become null."""
    row = {"event": _EVENT_NAMES[type(event)], **asdict(event)}
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[name] = None
    if isinstance(event, StepDone):
        row["tokens_per_second"] = event.tokens / event.seconds if event.seconds else None
    return row


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file.

    A last line that is incomplete because of a crash is skipped.

    Raises:
        InputError: Another line is not valid JSON.
    """
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                # Only a process that ended while it wrote leaves a line without its end.
                if line.endswith(b"\n"):
                    raise InputError(
                        f"{path}, line {number}: not valid JSON ({error}); remove the line"
                    ) from error


def _precedes(row: dict[str, Any], first_step: int) -> bool:
    # The new run writes the start at this step, so an older one is dropped.
    if row["event"] == "start":
        return bool(row["first_step"] < first_step)
    return bool(row["step"] <= first_step)
