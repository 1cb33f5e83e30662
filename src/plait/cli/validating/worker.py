"""Program of each rank of a validation: `python -m plait.cli.validating.worker FOLDER`.

See Note [Turns] in `validation.runner`. With one rank, a check that raises is reported as failed,
and the process continues if the device still works. With several ranks, the other ranks would wait
for the rank that raised, so an error ends the launch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.validation.rows import NotRun, Verdict
from plait.validation.runner import END_TURN, EVENTS, ROWS, TURNS

if TYPE_CHECKING:
    from plait.validation.context import Context

_POLL_SECONDS = 0.02
_FRAMES = 12
"""Number of stack frames of an error that are kept in the report."""


def main(folder: Path) -> None:
    """Run checks in the order in which the parent process schedules them, until the last one."""
    content = json.loads((folder / ROWS).read_text(encoding="utf-8"))
    facts = content["facts"]
    # Before CUDA starts. Segments that grow lose less memory between blocks of different models.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from plait.cluster.topology import place, share_gpus

    shares_gpu = share_gpus(int(facts["gpus"]))
    process = place()
    from plait.validation.context import Context

    calibration = facts.get("calibration")
    context = Context(
        process.rank,
        process.world_size,
        shares_gpu,
        bool(facts["simulated"]),
        calibration=Path(calibration) if calibration else None,
    )
    events = _Events(folder / EVENTS if process.rank == 0 else None)
    for index in _turns(folder / TURNS):
        run_row(context, content["rows"][index], events)
    context.close()


def _turns(path: Path) -> Iterator[int]:
    """Yield the indices of checks as the parent process writes them."""
    position = 0
    while True:
        # The last part may be incomplete.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        if position == len(lines):
            time.sleep(_POLL_SECONDS)
            continue
        turn = lines[position]
        position += 1
        if turn == END_TURN:
            return
        yield int(turn)


def run_row(context: Context, row: dict[str, Any], events: _Events) -> None:
    """Run one check and report its verdict.

    Raises:
        Exception: Any error of a check with several ranks, or one after which the device fails.
    """
    name = row["name"]
    events(event="began", row=name)
    context.progress = lambda numbers: events(event="progress", row=name, numbers=dict(numbers))
    context.row_deadline = time.monotonic() + row["planned_seconds"]
    module, function = row["check"].split(":")
    try:
        check = getattr(import_module(f"plait.validation.{module}"), function)
        result: Verdict = check(context, row["settings"])
    except NotRun as reason:
        result = Verdict("not run", str(reason))
    except Exception as error:
        if context.world > 1:
            raise
        result = _verdict_of_error(error)
    # The handler has ended, so the error and its frames no longer keep tensors alive.
    context.release_memory()
    if result.outcome == "failed" and context.world == 1:
        _refuse_broken_device(context)
    events(
        event="ended",
        row=name,
        outcome=result.outcome,
        reason=result.reason,
        numbers=dict(result.numbers),
    )


def _verdict_of_error(error: Exception) -> Verdict:
    lines = str(error).strip().splitlines() or [""]
    frames = [
        f"{_without_folders(frame.filename)}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    ]
    return Verdict("failed", f"{type(error).__name__}: {lines[0][:1000]}", {"stack": frames})


def _without_folders(filename: str) -> str:
    """Return a file name without the folders above its package.

    Reports must not contain paths of the user.
    """
    for folder in ("site-packages/", "src/", "python3."):
        if folder in filename:
            return filename.rsplit(folder, 1)[1]
    return Path(filename).name


def _refuse_broken_device(context: Context) -> None:
    """Raise if the device no longer works, for example after an illegal memory access.

    CUDA reports such an error from every later call, so the remaining checks need a new process.
    """
    import torch

    torch.zeros(1, device=context.device).item()


class _Events:
    """JSON lines file that is flushed after every line."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def __call__(self, **event: Any) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                # Checks report scalars of numpy and torch as well, which JSON does not have.
                file.write(json.dumps(event, default=float) + "\n")


if __name__ == "__main__":
    from plait.cluster.process_groups import end_process

    main(Path(sys.argv[1]))
    end_process(0)
