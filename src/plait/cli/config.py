"""`plait config`: what a configuration file means (`explain`), one of another program as Plait's
(`convert`), and what one may contain (`schema`). Prints the results of `plait.config`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from plait.cli.options import Json, Set, count
from plait.cli.planning.tables import aligned
from plait.config.convert.conversion import convert
from plait.config.resolving.degrees import processes
from plait.config.resolving.explain import Explanation, explain
from plait.config.resolving.json_schema import json_schema
from plait.config.schema.provenance import Row, Status
from plait.errors import ConfigError, InputError
from plait.observe.files import require_writable, write_text

app = typer.Typer(
    help=(
        "What a configuration file means, one of another program as Plait's, and what one may"
        " contain."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_COLOURS = {
    "supported": "green",
    "renamed": "green",
    "ignored": "yellow",
    "refused": "red",
    "comment": "dim",
}


@app.command("explain")
def explain_command(
    source: Annotated[list[str], typer.Argument(metavar="FILE", help="A JSON or YAML file.")],
    overrides: Set = None,
    world_size: Annotated[
        int | None,
        count(help="Number of processes. Default: run.processes, or as few as the degrees allow."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print every key of FILE with its meaning, and every resolved value with its source. Exit code
    2 if FILE cannot be run.
    """
    explanation = explain(_one_source(source), overrides or (), world_size=world_size)
    if as_json:
        problems = [
            {**asdict(problem), "message": str(problem)} for problem in explanation.problems
        ]
        typer.echo(json.dumps({**asdict(explanation), "problems": problems}, indent=2, default=str))
    elif (console := Console()).is_terminal:
        _print_tables(explanation, console)
    else:
        _print_lines(explanation)
    if explanation.problems:
        raise ConfigError(*explanation.problems)


@app.command("convert")
def convert_command(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help=(
                "A file of DeepSpeed, of Accelerate, or the Trainer's fsdp_config; or, after `--`,"
                " Megatron's flags."
            ),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A new file to write. (default: standard output)"),
    ] = None,
    overrides: Set = None,
) -> None:
    """Write FILE as a file for `plait train` and `plait.initialize`, and print what became of each
    of its keys.
    """
    if out is not None and out.exists():
        raise InputError(f"--out {out}: exists; give another name, or remove it first")
    require_writable("--out", out)
    conversion = convert(_one_source(source), overrides or ())
    rows: list[tuple[str, ...]] = [("key", "value", "Plait's", "note")]
    rows += [(row.key, _shown(row.value), *_became(row)) for row in conversion.keys]
    for line in aligned(rows, most={1: 40}):
        typer.echo(line, err=out is None)  # standard output has the file
    if conversion.problems:
        raise ConfigError(*conversion.problems)
    text = json.dumps(conversion.tree, indent=2)
    if out is None:
        typer.echo(text)
        return
    write_text("--out", out, text + "\n")
    missing = [name for name in ("model", "data") if name not in conversion.tree]
    adding = (
        f"add the sections {' and '.join(missing)} for `plait train {out}`, and " if missing else ""
    )
    typer.echo(f"\nwrote {out}; {adding}see `plait config explain {out}`")


def _became(row: Row) -> tuple[str, str]:
    """(our field, note) of one key of theirs."""
    if row.status in (Status.SUPPORTED, Status.RENAMED):
        note = row.meaning.removeprefix(row.path).strip(" ,")
        return row.path or "-", (
            note.removeprefix("(").removesuffix(")") if note.startswith("(") else note
        )
    return "-", f"{row.status}: {row.meaning}" if row.status != Status.COMMENT else row.meaning


def _one_source(source: list[str]) -> str | list[str]:
    """The file, or the flags."""
    if len(source) > 1 and not source[0].startswith("--"):
        raise typer.BadParameter(
            f"one FILE is read at a time and {len(source)} are given: {' '.join(source)}",
            param_hint="FILE",
        )
    return source if source[0].startswith("--") else source[0]


@app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of a configuration file, for editors and other programs."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _titles(explanation: Explanation) -> tuple[str, str]:
    return (
        f"keys of {explanation.name}",
        f"resolved for {processes(explanation.world_size or 1)} (--world-size sets how many)",
    )


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return (
        "-"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, default=str)
    )


def _print_tables(explanation: Explanation, console: Console) -> None:
    for_keys, for_values = _titles(explanation)
    table = Table("key", "value", "status", "meaning", title=for_keys, title_justify="left")
    for row in explanation.keys:
        table.add_row(
            row.key, _shown(row.value), f"[{_COLOURS[row.status]}]{row.status}[/]", row.meaning
        )
    console.print(table)
    if explanation.values:
        table = Table("value", "", "from", title=for_values, title_justify="left")
        for value in explanation.values:
            table.add_row(value.name, _shown(value.value), value.source)
        console.print(table)


def _print_lines(explanation: Explanation) -> None:
    for_keys, for_values = _titles(explanation)
    typer.echo(for_keys)
    rows: list[tuple[str, ...]] = [
        (row.key, _shown(row.value), str(row.status), row.meaning) for row in explanation.keys
    ]
    for line in aligned(rows, indent="  ", most={1: 40}):
        typer.echo(line)
    if explanation.values:
        typer.echo(f"\n{for_values}")
        for line in aligned(
            [(value.name, _shown(value.value), value.source) for value in explanation.values],
            indent="  ",
            most={1: 40},
        ):
            typer.echo(line)
