"""`plait import`: reads another library's checkpoint in a process of its own, and writes it as one
of Plait's.

The process is started anew for the one checkpoint: `python -m plait.checkpoint.foreign.convert
SOURCE FOLDER TAG`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.checkpoint.folder import complete
from plait.checkpoint.foreign import dcp, deepspeed
from plait.checkpoint.foreign.content import Foreign, save
from plait.checkpoint.places import place_of
from plait.errors import CheckpointError, InputError, PlaitError


@dataclass(frozen=True)
class Imported:
    """What was written."""

    kind: str
    checkpoint: str
    steps: int
    tensors: int
    """Of the model."""
    states: int
    """Of the optimizer."""
    left_out: list[str]


def convert(source: Path, out: str, *, tag: str | None = None) -> Imported:
    """Import the checkpoint in `source` into the folder or store `out`. Raises InputError where
    `source` is of no known kind or `out` holds checkpoints, CheckpointError where it cannot be
    read.
    """
    if not source.is_dir():
        raise InputError(
            f"{source}: is no folder; name one that DeepSpeed or torch.distributed.checkpoint wrote"
        )
    if not deepspeed.is_deepspeed(source) and not dcp.is_dcp(source):
        raise InputError(
            f"{source}: holds neither *_optim_states.pt (DeepSpeed, ZeRO 1 to 3) nor .metadata"
            " (torch.distributed.checkpoint)"
        )
    if complete(place_of(out, "--out")):
        raise InputError(f"--out {out}: holds checkpoints; name a new folder")
    command = [
        sys.executable,
        "-m",
        "plait.checkpoint.foreign.convert",
        str(source),
        out,
        tag or "",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        said = json.loads(last)
    except ValueError:
        raise CheckpointError(
            f"{source}: the process that reads it ended with {done.returncode}:"
            f" {done.stderr.strip()[-500:]}"
        ) from None
    if "error" in said:
        raise CheckpointError(said["error"])
    return Imported(**said)


def main(source: str, out: str, tag: str) -> None:
    """In the process: prints one line of JSON."""
    try:
        folder = Path(source)
        found: Foreign = (
            deepspeed.read(folder) if deepspeed.is_deepspeed(folder) else dcp.read(folder)
        )
        if not any(name.startswith("model.") for name in found.tensors):
            raise CheckpointError(f"{folder}: no tensors of a model were found")
        written = save(found, place_of(out), tag or f"step-{found.steps:08d}")
        states = sum(name.startswith("optimizer.") for name in found.tensors)
        print(
            json.dumps(
                asdict(
                    Imported(
                        found.kind,
                        str(written),
                        found.steps,
                        len(found.tensors) - states,
                        states,
                        found.left_out,
                    )
                )
            )
        )
    except PlaitError as error:
        print(json.dumps({"error": str(error)}))
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        RecursionError,
    ) as error:
        print(
            json.dumps(
                {
                    "error": (
                        f"{source} is of no form that is known: {type(error).__name__}:"
                        f" {str(error)[:300]}"
                    )
                }
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
