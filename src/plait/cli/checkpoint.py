"""Commands for checkpoints: `plait checkpoint`, `plait export` and `plait import`.

The operations are in `plait.checkpoint.inspect`, `plait.train.export` and
`plait.checkpoint.foreign.convert`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from plait.cli.options import Json, WeightDtype
from plait.cli.terminal import exit_on_signals, print_table, progress_bar
from plait.errors import CheckpointError
from plait.files import user_path
from plait.names import number_of

app = typer.Typer(
    help="List, verify, compare and prune checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Folder = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help=(
            "Folder of a run, its checkpoints/, or (verify, diff) one checkpoint; also as a URL"
            " (s3://...)."
        ),
    ),
]


@app.command("ls")
def ls_command(folder: Folder, as_json: Json = False) -> None:
    """List the checkpoints of FOLDER, newest first.

    `*` marks the checkpoint that a run resumes from. Manifests are checked, and tensors are not:
    `plait checkpoint verify` reads those. Exit code 4 if a manifest is damaged.
    """
    from plait.checkpoint.inspect import checkpoints_of, summarize
    from plait.checkpoint.places import place_of
    from plait.sizes import format_bytes

    checkpoints = summarize(checkpoints_of(place_of(folder, "FOLDER")))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in checkpoints], indent=2))
    else:
        cells = []
        for row in checkpoints:
            cells.append(
                (
                    "*" if row.latest else "",
                    row.tag,
                    "-" if row.step is None else f"{row.step:,}",
                    format_bytes(row.size),
                    row.content[:12] or "-",
                    row.layout or "-",
                    row.problem or "good",
                )
            )
        print_table(
            Console(), ("", "tag", "step", "size", "content", "written by", "manifest"), cells
        )
        if not checkpoints:
            typer.echo("no checkpoint")
    if any(row.problem for row in checkpoints):
        raise typer.Exit(CheckpointError.exit_code)


@app.command("verify")
def verify_command(folder: Folder) -> None:
    """Compare every byte of a checkpoint with its hash.

    If FOLDER contains several checkpoints, the one that a run resumes from is compared. Exit code 4
    if the checkpoint is damaged.
    """
    from plait.checkpoint.inspect import open_checkpoint, verify
    from plait.checkpoint.places import place_of

    checkpoint = open_checkpoint(place_of(folder, "FOLDER"))
    with progress_bar(f"verify {checkpoint.path.name}") as progress:
        verify(checkpoint, progress)
    typer.echo(
        f"{checkpoint.path}: every byte of {number_of(len(checkpoint.manifest.ranks), 'file')} is"
        f" what was written; content hash {checkpoint.manifest.content}"
    )


@app.command("diff")
def diff_command(
    first: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder for its newest one."),
    ],
    second: Annotated[
        str, typer.Argument(metavar="OTHER", help="The checkpoint to compare it with.")
    ],
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Compare the content hashes in the manifests without reading tensors."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the tensors that differ bitwise between two checkpoints, whatever their layouts.

    Exit code 1 if tensors differ. Exit code 4 if the content hashes contradict the tensors, which
    means that a file is damaged.
    """
    from plait.checkpoint.inspect import content_difference, differences, open_checkpoint
    from plait.checkpoint.places import place_of

    checkpoints = [
        open_checkpoint(place_of(first, "FOLDER")),
        open_checkpoint(place_of(second, "OTHER")),
    ]
    hash_differences = content_difference(*checkpoints)
    differing = hash_differences
    if not quick:
        # Reads all tensors, although equal hashes would say enough: a file may be damaged.
        differing = list(differences(*checkpoints))
    if bool(differing) != bool(hash_differences):
        result = "all tensors are equal"
        if differing:
            result = f"{differing[0].name} differs"
        raise CheckpointError(
            f"{result}, which contradicts the content hashes: a file is damaged; run `plait"
            " checkpoint verify` on both checkpoints"
        )
    if as_json:
        typer.echo(json.dumps([asdict(difference) for difference in differing], indent=2))
    else:
        _print_differences(differing, quick=quick, content=checkpoints[0].manifest.content)
    if differing:
        raise typer.Exit(1)


def _print_differences(differing: list[Any], *, quick: bool, content: str) -> None:
    cells = []
    for difference in differing:
        elements = f"{difference.elements:,}" if difference.elements else ""
        cells.append((difference.name, difference.what, elements))
    print_table(Console(), ("tensor", "largest difference", "elements"), cells)
    if not differing:
        typer.echo(f"all tensors are equal, bit for bit: content hash {content[:12]}")
    elif quick:
        typer.echo("the content hashes differ")
    else:
        typer.echo(f"{number_of(len(differing), 'different tensor')}")


@app.command("prune")
def prune_command(
    folder: Folder,
    keep: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of undamaged checkpoints to keep."),
    ],
) -> None:
    """Delete old checkpoints and the remains of unfinished saves.

    The checkpoint that LATEST names is never deleted. The command is refused while `plait train`
    runs in the folder.
    """
    from plait.checkpoint.inspect import checkpoints_of, prune
    from plait.checkpoint.places import place_of

    deleted = prune(checkpoints_of(place_of(folder, "FOLDER")), keep=keep)
    typer.echo("\n".join(f"deleted {name}" for name in deleted) or "nothing to delete")


export_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@export_app.command()
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
    """Export the model of a `plait train` run to a folder that Transformers can load.

    The folder contains config.json, safetensors and the tokenizer. The run may have any layout.

    The checkpoint is verified first. One file of weights is in memory at a time. Exit code 4 if the
    checkpoint is damaged, or if --verify finds a difference. In both cases no folder is written.
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
        comparisons.append(
            (compare_reloaded(checkpoint, folder), compare_generated(checkpoint, folder))
        )

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


import_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@import_app.command()
def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Checkpoint of DeepSpeed (ZeRO 1 to 3) or torch.distributed.checkpoint.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="New folder for the checkpoint, or its URL in a store."
        ),
    ],
    tag: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the checkpoint. (default: step-NNNNNNNN)"),
    ] = None,
) -> None:
    """Convert a DeepSpeed or torch checkpoint to one that `engine.load_checkpoint` loads.

    The result contains the weights, the buffers and Adam's states. It loads on any layout.

    A separate process reads the files and runs no code that they name. Everything that is not
    converted is printed. Exit code 4 if the checkpoint cannot be read.
    """
    from plait.checkpoint.foreign.convert import convert

    # The exception of a signal also ends the process that reads.
    with exit_on_signals():
        converted = convert(source, out, tag=tag)
    typer.echo(
        f"wrote {converted.checkpoint}: {converted.kind}, step {converted.steps:,},"
        f" {converted.tensors} tensors and {converted.states} states"
    )
    for name in converted.left_out:
        typer.echo(f"not converted: {name}")
