"""The command `plait`: a table of verbs, each in its own module that is imported only when it is used.

`plait --help` reads the table alone, so it is quick and imports no torch. A PlaitError is the user's to mend: its message goes to standard
error, without a traceback, and its exit code is returned.
"""

from __future__ import annotations

import importlib
import io
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from plait import __version__
from plait.errors import PlaitError

VERBS = {
    "plan": ("plait.cli.plan", "Find the layout that fits and is fastest, before a GPU is booked."),
    "calibrate": ("plait.cli.calibrate", "Fit the planner to this machine, or to a table of measured runs."),
    "train": ("plait.cli.train", "Train a model as one JSON file says."),
    "launch": ("plait.cli.launch", "Run a script on every device of one or several machines."),
    "layout": ("plait.cli.layout", "Show the ranks on the machines, the split of every parameter, the bytes of a rank."),
    "dryrun": ("plait.cli.dryrun", "Build and step one rank of a layout without its peers, and without GPUs."),
    "schedule": ("plait.cli.schedule", "Draw a pipeline schedule: who computes what when, what is idle, what is held."),
    "verify": ("plait.cli.verify", "Show that a layout computes what one process computes, on small data."),
    "doctor": ("plait.cli.doctor", "Say what this environment has; measure the links between its processes."),
    "config": ("plait.cli.config", "Explain a configuration file, or print the schema."),
}
"""Verb to the module with its `app` (a Typer) and the line that `plait --help` shows."""


class _Verb(TyperCommand):
    """A verb that is not loaded yet: enough for a line of help. The real one takes over when its arguments are parsed."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        app: typer.Typer = importlib.import_module(VERBS[self.name][0]).app
        return typer.main.get_command(app).make_context(info_name, args, parent, token_normalize_func=_with_dashes, **extra)


def _with_dashes(name: str) -> str:
    """torchrun and DeepSpeed write `--nproc_per_node`, too."""
    return name.replace("_", "-")


class _Verbs(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": {name: _Verb(name=name, help=line) for name, (_, line) in VERBS.items()}})


app = typer.Typer(
    cls=_Verbs,
    name="plait",
    help="Train and run large models across many devices, from one JSON file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"plait {__version__}")
        raise typer.Exit


@app.callback()
def _plait(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 2 for a wrong command line or configuration, or what the verb returns."""
    for stream in (sys.stdout, sys.stderr):  # a name or a value that the terminal cannot show is escaped and ends nothing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        typer.main.get_command(app).main(args=None if arguments is None else list(arguments), prog_name="plait")
    except PlaitError as error:
        print("\n".join(f"plait: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
