"""Verb `plait checkpoint`: lists, verifies, compares and deletes checkpoints.

The operations are in `plait.checkpoint.inspect`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from plait.cli.options import Json
from plait.cli.tables import print_table
from plait.cli.terminal import progress_bar
from plait.errors import CheckpointError

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
    """List the checkpoints of FOLDER, the newest first. `*` marks the one that a run resumes from.
    Exit code 4 if one is damaged.
    """
    from plait.checkpoint.inspect import checkpoints_of, summarize
    from plait.checkpoint.places import place_of
    from plait.sizes import format_bytes

    checkpoints = summarize(checkpoints_of(place_of(folder, "FOLDER")))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in checkpoints], indent=2))
    else:
        cells = [
            (
                "*" if row.latest else "",
                row.tag,
                "-" if row.step is None else f"{row.step:,}",
                format_bytes(row.size),
                row.content[:12] or "-",
                row.layout or "-",
                row.problem or "good",
            )
            for row in checkpoints
        ]
        print_table(
            Console(), ("", "tag", "step", "size", "content", "written by", "manifest"), cells
        )
        if not checkpoints:
            typer.echo("no checkpoint")
    if any(row.problem for row in checkpoints):
        raise typer.Exit(CheckpointError.exit_code)


@app.command("verify")
def verify_command(folder: Folder) -> None:
    """Compare every byte of a checkpoint with its hash. In FOLDER it is the checkpoint that a run
    resumes from. Exit code 4 if it is damaged.
    """
    from plait.checkpoint.inspect import open_checkpoint, verify
    from plait.checkpoint.places import place_of

    checkpoint = open_checkpoint(place_of(folder, "FOLDER"))
    with progress_bar(f"verify {checkpoint.path.name}") as progress:
        verify(checkpoint, progress)
    typer.echo(
        f"{checkpoint.path}: every byte of {len(checkpoint.manifest.ranks)} files is what was"
        f" written; content hash {checkpoint.manifest.content}"
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
    """Print the tensors that are not bit for bit equal in two checkpoints of any layouts. Exit code
    1 if there are any, 4 if the content hashes contradict the tensors: a file is damaged then.
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
        differing = list(differences(*checkpoints))
    if bool(differing) != bool(hash_differences):
        result = "all tensors are equal"
        if differing:
            result = f"{differing[0].name} differs"
        raise CheckpointError(
            f"{result}, which contradicts the content hashes: a file is damaged; run `plait"
            " checkpoint verify` on both"
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
        typer.echo(f"{len(differing)} tensors differ")


@app.command("prune")
def prune_command(
    folder: Folder,
    keep: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of undamaged checkpoints to keep."),
    ],
) -> None:
    """Delete old checkpoints and the remains of unfinished saves, but never the checkpoint that
    LATEST names. Refused while `plait train` runs in the folder.
    """
    from plait.checkpoint.inspect import checkpoints_of, prune
    from plait.checkpoint.places import place_of

    deleted = prune(checkpoints_of(place_of(folder, "FOLDER")), keep=keep)
    typer.echo("\n".join(f"deleted {name}" for name in deleted) or "nothing to delete")
