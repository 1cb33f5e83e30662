"""What every rank of a launch does: `python -m plait.cli.validating.worker FOLDER` runs the rows in FOLDER one after another, and the first
rank writes when each begins and what came of it (see `validation.runner`). A check that raises ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.validation.rows import Found, NotRun
from plait.validation.runner import EVENTS, ROWS


def main(folder: Path) -> None:
    """Every row."""
    given = json.loads((folder / ROWS).read_text(encoding="utf-8"))
    gpus, simulated = int(given["facts"]["gpus"]), bool(given["facts"]["simulated"])
    # Before CUDA starts. What splits blocks less wastes less of the memory that the largest model needs.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from plait.cluster.topology import place, share_gpus

    shared = share_gpus(gpus)
    here = place()
    from plait.validation.context import Context

    context = Context(here.rank, here.world_size, shared, simulated)
    write = _Writer(folder / EVENTS if here.rank == 0 else None)
    for row in given["rows"]:
        write(event="began", row=row["name"])
        module, function = row["check"].split(":")
        try:
            found: Found = getattr(import_module(f"plait.validation.{module}"), function)(context, row["settings"])
        except NotRun as reason:
            found = Found("not run", str(reason))
        write(event="ended", row=row["name"], outcome=found.outcome, reason=found.reason, numbers=dict(found.numbers))
    context.close()


class _Writer:
    """Lines of JSON, each written at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def __call__(self, **event: Any) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event, default=float) + "\n")


if __name__ == "__main__":
    from plait.cluster.ending import end_process

    main(Path(sys.argv[1]))
    end_process(0)
