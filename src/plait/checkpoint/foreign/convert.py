"""`plait import`: converts another library's checkpoint in a separate process.

The process handles one checkpoint and prints one line of JSON: `python -m
plait.checkpoint.foreign.convert SOURCE FOLDER TAG`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.checkpoint.folder import list_complete
from plait.checkpoint.foreign import dcp, deepspeed
from plait.checkpoint.foreign.content import save
from plait.checkpoint.places import place_of
from plait.errors import CheckpointError, InputError, PlaitError


@dataclass(frozen=True)
class ImportSummary:
    """Summary of an import, as the command prints it."""

    kind: str
    checkpoint: str
    steps: int
    tensors: int
    """Number of tensors of the model."""
    states: int
    """Number of tensors of the optimizer."""
    left_out: list[str]


def convert(source: Path, out: str, *, tag: str | None = None) -> ImportSummary:
    """Import a DeepSpeed or torch.distributed.checkpoint checkpoint.

    Args:
        source: Folder of the checkpoint.
        out: New folder or URL of a store.
        tag: Name of the new checkpoint. None names it after its step.

    Raises:
        InputError: `source` is not a known kind of checkpoint, or `out` contains checkpoints.
        CheckpointError: `source` cannot be read.
    """
    if not source.is_dir():
        raise InputError(
            f"{source}: is not a folder; name one that DeepSpeed or torch.distributed.checkpoint"
            " wrote"
        )
    if not deepspeed.is_deepspeed(source) and not dcp.is_dcp(source):
        raise InputError(
            f"{source}: contains neither *_optim_states.pt (DeepSpeed, ZeRO 1 to 3) nor .metadata"
            " (torch.distributed.checkpoint); name the folder that contains one of them"
        )
    if list_complete(place_of(out, "--out")):
        raise InputError(f"--out {out}: holds checkpoints; name a new folder")

    module = "plait.checkpoint.foreign.convert"
    command = [sys.executable, "-m", module, str(source), out, tag or ""]
    done = subprocess.run(command, capture_output=True, text=True)
    last_line = done.stdout.strip().rpartition("\n")[2]
    try:
        answer = json.loads(last_line)
    except ValueError:
        raise CheckpointError(
            f"{source}: the process that reads the checkpoint ended with exit code"
            f" {done.returncode}; if memory suffices, this is a bug in Plait: report it with this"
            f" output: {done.stderr.strip()[-500:]}"
        ) from None
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return ImportSummary(**answer)


def main(source: str, out: str, tag: str) -> None:
    """Convert a checkpoint in this process and print a line of JSON."""
    try:
        print(json.dumps(asdict(_convert(Path(source), out, tag))))
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
        # Readers index the file's data without checking every type.
        message = f"{source} has an unknown form: {type(error).__name__}: {str(error)[:300]}"
        print(json.dumps({"error": message}))


def _convert(folder: Path, out: str, tag: str) -> ImportSummary:
    read = deepspeed.read if deepspeed.is_deepspeed(folder) else dcp.read
    checkpoint = read(folder)
    if not any(name.startswith("model.") for name in checkpoint.tensors):
        raise CheckpointError(f"{folder}: contains no tensors of a model; name another folder")
    written = save(checkpoint, place_of(out), tag or f"step-{checkpoint.steps:08d}")
    states = sum(name.startswith("optimizer.") for name in checkpoint.tensors)
    return ImportSummary(
        checkpoint.kind,
        str(written),
        checkpoint.steps,
        len(checkpoint.tensors) - states,
        states,
        checkpoint.left_out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
