"""The run as a file: `metrics.jsonl`, one JSON object an event, in the order of the steps.

A run that goes on from a checkpoint repeats the steps after it, so their old lines are dropped
first: every step is in the file once, with the numbers of the run that the checkpoints belong to.
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
    CommunicationDecided,
    Event,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)

NAMES: dict[type, str] = {
    RunStarted: "start",
    StepDone: "step",
    CommunicationDecided: "communication",
    Validated: "validation",
    CheckpointSaved: "checkpoint",
    Sampled: "sample",
    RunEnded: "end",
}
"""What the key `event` says for each kind of event; the other keys are the event's fields."""


class MetricsFile:
    """A listener that writes `path`. Give it to one rank only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: TextIO | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event.first_step)
        if self._stream is None:
            raise InputError(
                f"{self._path}: a run begins with RunStarted, and {type(event).__name__} came first"
            )
        # Flushed line by line, so that a run that is killed has told everything up to then.
        print(json.dumps(as_row(event), allow_nan=False), file=self._stream, flush=True)
        if isinstance(event, RunEnded):
            self.close()

    def close(self) -> None:
        """Close the file. A RunEnded does it too; this is for a run that failed."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _begin(self, first_step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.part")
        with open(partial, "w", encoding="utf-8") as kept:
            for row in read(self._path) if self._path.exists() else ():
                if _belongs_before(row, first_step):
                    print(json.dumps(row), file=kept)
        os.replace(partial, self._path)
        self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (open for as long as the run)


def as_row(event: Event) -> dict[str, Any]:
    """An event as JSON. Numbers that JSON has no word for (nan, inf) are null."""
    row = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(event).items()
    }
    if isinstance(event, StepDone):
        row["tokens_per_second"] = event.tokens / event.seconds if event.seconds else None
    return {"event": NAMES[type(event)], **row}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file. A last line that was cut off by a crash is left out; any other
    broken line is an InputError.
    """
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise InputError(
                        f"{path}, line {number}: not valid JSON ({error}); remove the line"
                    ) from error


def _belongs_before(row: dict[str, Any], first_step: int) -> bool:
    if row["event"] == "start":
        return bool(row["first_step"] < first_step)
    return bool(row["step"] <= first_step)
