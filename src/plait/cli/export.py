"""Verb `plait export`: writes a trained model as a folder for Transformers' `from_pretrained`.

The export is in `plait.train.export`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import WeightDtype
from plait.cli.terminal import exit_on_signals, progress_bar
from plait.files import user_path

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def export_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run, one of its checkpoints, or a URL (s3://...) of either.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder to write.")],
    dtype: Annotated[
        WeightDtype,
        typer.Option(
            metavar="NAME",
            help="float32, bfloat16, float16, or stored for the dtype of the checkpoint.",
        ),
    ] = WeightDtype.stored,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help=(
                "Open the folder with Transformers and compare all tensors, the logits and 64"
                " greedy tokens."
            ),
        ),
    ] = False,
) -> None:
    """Write the model of a run of `plait train` on any layout as config.json, safetensors and
    tokenizer.

    The checkpoint is verified first. One file of weights is in memory at a time. Exit code 4 if the
    checkpoint is damaged, or if --verify finds a difference; no folder is written then.
    """
    # Imported here, so that `plait export --help` does not load torch.
    import torch

    from plait.checkpoint.inspect import open_checkpoint
    from plait.checkpoint.places import place_of
    from plait.sizes import format_bytes
    from plait.train.export import ExportComparison, compare_generated, compare_reloaded, export
    from plait.train.run_folder import GENERATION

    out = user_path(out, "--out")
    checkpoint = open_checkpoint(place_of(source, "FOLDER"))
    tokenizer = None
    generation = None
    # A run has its tokenizer in its folder, above the checkpoints. Object stores are not searched.
    if isinstance(checkpoint.path, Path):
        for folder in (Path(source), *checkpoint.path.parents):
            if (folder / "tokenizer").is_dir():
                tokenizer = folder / "tokenizer"
                if (folder / GENERATION).is_file():
                    generation = folder / GENERATION
                break
    comparisons: list[tuple[int, ExportComparison]] = []

    def compare(folder: Path) -> None:
        tensors = compare_reloaded(checkpoint, folder)
        comparisons.append((tensors, compare_generated(checkpoint, folder)))

    with exit_on_signals(), progress_bar(f"export {checkpoint.path.name}") as progress:
        exported = export(
            checkpoint,
            out,
            dtype=dtype.torch_dtype(),
            tokenizer=tokenizer,
            generation=generation,
            verify=compare if verify else None,
            progress=progress,
        )

    typer.echo(
        f"wrote {exported.folder}: step {exported.step:,}, {exported.tensors} tensors,"
        f" {format_bytes(exported.size)}"
    )
    if exported.dtype == torch.float32:
        typer.echo(
            "the weights are the float32 weights that the optimizer updates; --dtype bfloat16"
            " writes half the bytes"
        )
    if tokenizer is None:
        typer.echo(
            "there is no tokenizer/ next to the checkpoint; save one into the folder to generate"
            " text"
        )
    for tensors, comparison in comparisons:
        typer.echo(f"Transformers opens it, and all {tensors} tensors are the checkpoint's")
        typer.echo(
            f"{comparison.tokens} greedy tokens are equal, and logits agree within"
            f" {comparison.logits:.1e}"
        )
    typer.echo(f"serve it:  vllm serve {out}")
    typer.echo(f"           python -m sglang.launch_server --model-path {out}")
    typer.echo(f"           transformers serve {out}  (one device, to try the model)")
