"""Command `plait config`: explains and converts configuration files, and prints their schema.

The results come from `plait.config`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from plait.cli.options import Json, Set, count, require_writable, write_text
from plait.cli.terminal import aligned
from plait.config.convert.conversion import convert
from plait.config.resolving.explain import Explanation, explain
from plait.config.resolving.json_schema import json_schema
from plait.config.schema.config import KeyReport, Status
from plait.errors import ConfigError, InputError
from plait.names import number_of

app = typer.Typer(
    help="Explain or convert a configuration file, or print the schema.",
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
        count(help="Number of processes. (default: run.processes, else the fewest possible)"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print every key of FILE with its meaning, and every resolved value with its source.

    Exit code 2 if FILE cannot be run.
    """
    explanation = explain(_parse_source(source), overrides or (), world_size=world_size)
    if as_json:
        problems = [
            {**asdict(problem), "message": str(problem)} for problem in explanation.problems
        ]
        typer.echo(json.dumps({**asdict(explanation), "problems": problems}, indent=2, default=str))
    else:
        console = Console()
        if console.is_terminal:
            _print_tables(explanation, console)
        else:
            _print_lines(explanation)
    # After the output, which shows what the other keys mean.
    if explanation.problems:
        raise ConfigError(*explanation.problems)


@app.command("convert")
def convert_command(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help=(
                "A file of DeepSpeed or Accelerate, the Trainer's fsdp_config, or, after `--`, the"
                " flags of Megatron."
            ),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="New file to write. (default: standard output)"),
    ] = None,
    overrides: Set = None,
) -> None:
    """Convert FILE to a file for `plait train` and `plait.initialize`.

    Prints the result for each key of FILE.
    """
    if out is not None and out.exists():
        raise InputError(f"--out {out}: exists; pass another name, or remove it first")
    require_writable("--out", out)
    conversion = convert(_parse_source(source), overrides or ())
    rows: list[tuple[str, ...]] = [("key", "value", "Plait's", "note")]
    rows += [(row.key, _format_value(row.value), *_converted_key(row)) for row in conversion.keys]
    for line in aligned(rows, max_widths={1: 40}):
        # Without --out, standard output contains only the file.
        typer.echo(line, err=out is None)
    if conversion.problems:
        raise ConfigError(*conversion.problems)
    text = json.dumps(conversion.tree, indent=2)
    if out is None:
        typer.echo(text)
        return
    write_text("--out", out, text + "\n")
    missing = [name for name in ("model", "data") if name not in conversion.tree]
    advice = f"see `plait config explain {out}`"
    if missing:
        sections = " and ".join(missing)
        advice = f"add the sections {sections} for `plait train {out}`, and {advice}"
    typer.echo(f"\nwrote {out}; {advice}")


def _converted_key(row: KeyReport) -> tuple[str, str]:
    """Return the table cells (Plait's key, note) for a key of the converted file."""
    if row.status in (Status.SUPPORTED, Status.RENAMED):
        note = row.meaning.removeprefix(row.path).strip(" ,")
        if note.startswith("("):
            note = note.removeprefix("(").removesuffix(")")
        return row.path or "-", note
    if row.status == Status.COMMENT:
        return "-", row.meaning
    return "-", f"{row.status}: {row.meaning}"


def _parse_source(source: list[str]) -> str | list[str]:
    """Return the name of the file as a string, or the Megatron-LM flags as a list."""
    if len(source) > 1 and not source[0].startswith("--"):
        raise typer.BadParameter(
            f"one FILE is read at a time, but {len(source)} are given: {' '.join(source)};"
            " pass one of them",
            param_hint="FILE",
        )
    return source if source[0].startswith("--") else source[0]


@app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of a configuration file for editors and other programs."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _titles(explanation: Explanation) -> tuple[str, str]:
    """Return (title of the table of keys, title of the table of resolved values)."""
    return (
        f"keys of {explanation.name}",
        f"resolved for {number_of(explanation.world_size or 1, 'process')} (set the number with"
        " --world-size)",
    )


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    # 1e5 of a JSON file is a float. Above 1e15 the digits would suggest precision.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, default=str)


def _print_tables(explanation: Explanation, console: Console) -> None:
    keys_title, values_title = _titles(explanation)
    table = Table("key", "value", "status", "meaning", title=keys_title, title_justify="left")
    for row in explanation.keys:
        table.add_row(
            row.key,
            _format_value(row.value),
            f"[{_COLOURS[row.status]}]{row.status}[/]",
            row.meaning,
        )
    console.print(table)
    if explanation.values:
        table = Table("value", "", "from", title=values_title, title_justify="left")
        for value in explanation.values:
            table.add_row(value.name, _format_value(value.value), value.source)
        console.print(table)


def _print_lines(explanation: Explanation) -> None:
    keys_title, values_title = _titles(explanation)
    typer.echo(keys_title)
    keys = [
        (row.key, _format_value(row.value), str(row.status), row.meaning)
        for row in explanation.keys
    ]
    for line in aligned(keys, indent="  ", max_widths={1: 40}):
        typer.echo(line)
    if explanation.values:
        typer.echo(f"\n{values_title}")
        values = [
            (value.name, _format_value(value.value), value.source) for value in explanation.values
        ]
        for line in aligned(values, indent="  ", max_widths={1: 40}):
            typer.echo(line)
