"""`plait export`: a trained model as a folder that Transformers' from_pretrained opens. Runs
`plait.train.export`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.interrupts import ending_in_order
from plait.cli.progress import progress_bar
from plait.files import user_path

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    """Of the exported weights."""

    stored = "stored"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Format(StrEnum):
    """Of the exported folder."""

    hf = "hf"


@app.command()
def export_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="A run's folder, one of its checkpoints, or a URL (s3://...) of one.",
        ),
    ],
    to: Annotated[
        Format,
        typer.Option(
            metavar="FORMAT", help="hf: Transformers' config.json, safetensors and tokenizer."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="A new folder to write.")],
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="NAME", help="float32, bfloat16, float16; stored keeps the checkpoint's."
        ),
    ] = Dtype.stored,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help=(
                "Open the folder with Transformers; compare every tensor, logits, and 64 greedy"
                " tokens."
            ),
        ),
    ] = False,
) -> None:
    """Write the model of a run of `plait train`, whatever layout trained it, as config.json,
    safetensors and the tokenizer.

    One file of weights is in memory at a time; the checkpoint is verified first. Exit code 4 for a
    damaged checkpoint, and where --verify finds a difference: then there is no folder.
    """
    import torch

    from plait.checkpoint.inspect import open_one
    from plait.checkpoint.places import place_of
    from plait.train.export import export
    from plait.train.exported import Compared, compare_generated, compare_reloaded
    from plait.train.folder import GENERATION
    from plait.units import format_bytes

    out = user_path(out, "--out")
    found = open_one(place_of(source, "FOLDER"))
    above = (Path(source), *found.path.parents) if isinstance(found.path, Path) else ()
    run = next((folder for folder in above if (folder / "tokenizer").is_dir()), None)
    settings = run / GENERATION if run is not None and (run / GENERATION).is_file() else None
    compared: list[tuple[int, Compared]] = []

    def compare(folder: Path) -> None:
        compared.append((compare_reloaded(found, folder), compare_generated(found, folder)))

    with ending_in_order(), progress_bar(f"export {found.path.name}") as progress:
        done = export(
            found,
            out,
            dtype=None if dtype is Dtype.stored else getattr(torch, dtype.value),
            tokenizer=run / "tokenizer" if run is not None else None,
            generation=settings,
            verify=compare if verify else None,
            progress=progress,
        )
    typer.echo(
        f"wrote {done.folder}: step {done.step:,}, {done.tensors} tensors,"
        f" {format_bytes(done.size)}"
    )
    if done.dtype == torch.float32:
        typer.echo(
            "its weights are the float32 ones that the optimizer updates; --dtype bfloat16 writes"
            " half the bytes"
        )
    if run is None:
        typer.echo(
            "no tokenizer/ beside the checkpoint: save one into the folder, if it is to generate"
            " text"
        )
    for tensors, of_both in compared:
        typer.echo(f"Transformers opens it, and all {tensors} tensors are the checkpoint's")
        typer.echo(
            f"{of_both.tokens} greedy tokens are the same, and logits within {of_both.logits:.1e}"
        )
    typer.echo(f"serve it:  vllm serve {out}")
    typer.echo(f"           python -m sglang.launch_server --model-path {out}")
    typer.echo(f"           transformers serve {out}  (one device, to try the model)")
