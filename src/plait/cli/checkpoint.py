"""`plait checkpoint`: what a folder of checkpoints holds (`ls`), whether it is what was written
(`verify`), how two differ (`diff`), and deleting old ones (`prune`). Prints the results of
`plait.checkpoint.inspect`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from plait.cli.options import Json
from plait.cli.planning.tables import print_table
from plait.cli.progress import progress_bar
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
            "A run's folder, its checkpoints/, (verify, diff) one checkpoint, or such a URL"
            " (s3://...)."
        ),
    ),
]


@app.command("ls")
def ls_command(folder: Folder, as_json: Json = False) -> None:
    """List the checkpoints of FOLDER, the newest first; `*` is the one that a run goes on from.
    Exit code 4 if one is damaged.
    """
    from plait.checkpoint.inspect import checkpoints_of, rows
    from plait.checkpoint.places import place_of
    from plait.units import format_bytes

    found = rows(checkpoints_of(place_of(folder, "FOLDER")))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in found], indent=2))
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
            for row in found
        ]
        print_table(
            Console(), ("", "tag", "step", "size", "content", "written by", "manifest"), cells
        )
        if not found:
            typer.echo("no checkpoint")
    if any(row.problem for row in found):
        raise typer.Exit(CheckpointError.exit_code)


@app.command("verify")
def verify_command(folder: Folder) -> None:
    """Compare every byte of a checkpoint with its hash; of FOLDER the one that a run goes on from.
    Exit code 4 if it is damaged.
    """
    from plait.checkpoint.inspect import open_one, verify
    from plait.checkpoint.places import place_of

    found = open_one(place_of(folder, "FOLDER"))
    with progress_bar(f"verify {found.path.name}") as progress:
        verify(found, progress)
    typer.echo(
        f"{found.path}: every byte of {len(found.manifest.ranks)} files is what was written;"
        f" content hash {found.manifest.content}"
    )


@app.command("diff")
def diff_command(
    one: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder whose newest is meant."),
    ],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another.")],
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Compare the content hashes in the manifests, and read no tensor."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the tensors that two checkpoints, of whatever layouts, do not have bit for bit alike.
    Exit code 1 if there are any, 4 if their content hashes say otherwise: then a file is damaged.
    """
    from plait.checkpoint.inspect import content_difference, differences, open_one
    from plait.checkpoint.places import place_of

    opened = [open_one(place_of(one, "FOLDER")), open_one(place_of(other, "OTHER"))]
    by_hash = content_difference(*opened)
    found = by_hash if quick else list(differences(*opened))
    if bool(found) != bool(by_hash):
        first = f"{found[0].name} differs" if found else "all tensors are alike"
        raise CheckpointError(
            f"{first}, and the content hashes say otherwise: a file is damaged; run `plait"
            " checkpoint verify` on both"
        )
    if as_json:
        typer.echo(json.dumps([asdict(difference) for difference in found], indent=2))
    else:
        cells = [
            (
                difference.name,
                difference.what,
                f"{difference.elements:,}" if difference.elements else "",
            )
            for difference in found
        ]
        print_table(Console(), ("tensor", "largest difference", "elements"), cells)
        alike = (
            f"all tensors are alike, bit for bit: content hash {opened[0].manifest.content[:12]}"
        )
        typer.echo(
            ("the content hashes differ" if quick else f"{len(found)} tensors differ")
            if found
            else alike
        )
    if found:
        raise typer.Exit(1)


@app.command("prune")
def prune_command(
    folder: Folder,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many of the newest good ones stay.")
    ],
) -> None:
    """Delete old checkpoints and what unfinished saves have left; never the one that LATEST names.
    Refused while `plait train` runs in the folder.
    """
    from plait.checkpoint.inspect import checkpoints_of, prune
    from plait.checkpoint.places import place_of

    gone = prune(checkpoints_of(place_of(folder, "FOLDER")), keep=keep)
    typer.echo("\n".join(f"deleted {name}" for name in gone) or "nothing to delete")
