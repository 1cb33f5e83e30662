"""Command `plait`: a table of subcommands. The module of a subcommand is imported on its use.

`plait --help` reads only the table, so that it is quick and does not import torch. The message of a
`PlaitError` goes to standard error without a traceback, and the command exits with the exit code of
the error.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from plait.cli.terminal import close_stdout
from plait.errors import PlaitError
from plait.version import __version__

COMMANDS = {
    "plan": (
        "plait.cli.plan:app",
        "Find the layout that fits and is fastest, before you rent GPUs.",
    ),
    "calibrate": (
        "plait.cli.calibrate:app",
        "Fit the planner to this machine, or to a table of measured runs.",
    ),
    "train": ("plait.cli.train:app", "Train a model from one JSON file."),
    "launch": ("plait.cli.launch:app", "Run a script on every device of one or several machines."),
    "layout": (
        "plait.cli.layout:app",
        "Show the ranks on the machines, the shards of parameters and the memory of a rank.",
    ),
    "dryrun": (
        "plait.cli.plan:dryrun_app",
        "Build and step one rank of a layout without the other ranks and without GPUs.",
    ),
    "schedule": (
        "plait.cli.layout:schedule_app",
        "Draw a pipeline schedule: its timeline, its idle time and its activations in flight.",
    ),
    "verify": (
        "plait.cli.verify:app",
        "Check on small data that a layout computes what a single process computes.",
    ),
    "doctor": (
        "plait.cli.doctor:app",
        "Describe this environment, or measure the links between processes.",
    ),
    "checkpoint": ("plait.cli.checkpoint:app", "List, verify, compare and prune checkpoints."),
    "export": (
        "plait.cli.checkpoint:export_app",
        "Write a trained model as a folder that from_pretrained opens.",
    ),
    "generate": (
        "plait.cli.generate:app",
        "Generate text with a trained model on as many devices as it needs.",
    ),
    "import": (
        "plait.cli.checkpoint:import_app",
        "Convert a checkpoint of DeepSpeed or torch.distributed.checkpoint to one of Plait.",
    ),
    "config": (
        "plait.cli.config:app",
        "Explain or convert a configuration file, or print the schema.",
    ),
}
"""Typer app of each subcommand, as `module:name`, and the line of `plait --help`."""

NESTED_COMMANDS = {("plan", "infer"): "plait.cli.plan:infer_app"}
"""Apps of two-word subcommands whose first word is also a subcommand with a positional argument."""


def load_app(target: str) -> typer.Typer:
    """Import the app of a subcommand, given as `module:name`."""
    module, _, name = target.partition(":")
    app: typer.Typer = getattr(importlib.import_module(module), name)
    return app


def _hide_types_of_flags() -> None:
    """Hide the type of options without a value.

    Typer 0.29 shows `--fresh <bool>`, although it refuses `--fresh true`.
    """
    display_type = getattr(TyperOption, "display_type_rich", None)
    if display_type is None:
        return

    def display(option: TyperOption, ctx: Any) -> Any:
        if option.is_flag:
            return None
        return display_type(option, ctx=ctx)

    TyperOption.display_type_rich = display  # type: ignore[method-assign, assignment]


_hide_types_of_flags()


class _LazyCommand(TyperCommand):
    """Subcommand whose module is imported when its arguments are parsed."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        assert self.name is not None
        target = COMMANDS[self.name][0]
        nested = NESTED_COMMANDS.get((self.name, args[0])) if args else None
        if nested is not None:
            target = nested
            info_name = f"{info_name} {args[0]}"
            args = args[1:]
        return typer.main.get_command(load_app(target)).make_context(
            info_name, args, parent, token_normalize_func=_with_dashes, **extra
        )


def _with_dashes(name: str) -> str:
    """Replace underscores in an option by dashes: torchrun and DeepSpeed accept both."""
    return name.replace("_", "-")


class _Subcommands(TyperGroup):
    """Command group of `plait`, whose subcommands are the entries of COMMANDS."""

    def __init__(self, **settings: Any) -> None:
        settings["commands"] = {
            name: _LazyCommand(name=name, help=line) for name, (_, line) in COMMANDS.items()
        }
        super().__init__(**settings)


app = typer.Typer(
    cls=_Subcommands,
    name="plait",
    help="Train and run large models on many devices, from one JSON file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"plait {__version__}")
        raise typer.Exit


@app.callback()
def _plait(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with 0, the subcommand's exit code, or 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    # Characters that the terminal cannot encode are escaped. They would raise otherwise.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # Otherwise typer would print errors in its own form, and exit.
        code = typer.main.get_command(app).main(
            args=arguments, prog_name="plait", standalone_mode=False
        )
        # Errors of buffered output are raised here, not after this function has ended.
        sys.stdout.flush()
    except PlaitError as error:
        print("\n".join(f"plait: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        # rich and typer raise it if standard output is closed.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        sys.exit(close_stdout(end.__context__))
    except OSError as error:
        # Path.exists raises these two for a path of the user.
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES) and error.filename is not None:
            print(
                f"plait: {str(error.filename)[:100]!r}: {error.strerror}; pass another path",
                file=sys.stderr,
            )
            sys.exit(2)
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        sys.exit(close_stdout(error))
    except Exception as error:
        # Errors about the command line have this method. Any other error is a defect.
        if not hasattr(error, "format_message"):
            raise
        _refuse_command_line(error, arguments)
    sys.exit(code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    """Replace standard streams that the caller has closed, as some daemons do, by the null device.

    Python sets a closed stream to None.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _refuse_command_line(error: Any, arguments: Sequence[str]) -> NoReturn:
    """Print an error of typer in the form of all other messages, and exit."""
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help(), end="")
        sys.exit(error.exit_code)

    rule = error.format_message().rstrip(".")
    names = list(getattr(parameter, "opts", ()))
    if names and type(error).__name__ == "BadParameter":
        rule = _bad_parameter(error, names, arguments)
    elif _has_megatron_flags(arguments):
        rule = (
            "a run is a file; convert Megatron-LM's flags to a file with `plait config convert"
            " --out run.json -- FLAGS`"
        )
    command = context.command_path if context is not None else "plait"
    print(f"plait: {rule}; see `{command} --help`", file=sys.stderr)
    sys.exit(error.exit_code)


def _has_megatron_flags(arguments: Sequence[str]) -> bool:
    if arguments[:1] != ["train"] or "--" not in arguments:
        return False
    flags = arguments[arguments.index("--") + 1 :]
    return any(flag.startswith("--") for flag in flags)


def _bad_parameter(error: Any, names: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the message about a value that typer refuses."""
    rule = str(error.message).rstrip(".")
    rule = rule.replace("Input should be", "must be").replace("Value error, ", "")
    if any(name.startswith("-") for name in names):
        return f"{names[0]}{_option_value(names, arguments)}: {rule}"
    # typer does not say which of several arguments it refuses.
    shown = [f"{token[:100]!r}" for token in arguments if "\0" in token]
    return f"{error.param.metavar or names[0]}: {', '.join([rule, *shown])}"


def _option_value(names: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the last value of an option as ` = '0'`, or "" if it is not on the command line."""
    text = ""
    for token, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = token.partition("=")
        if _with_dashes(name) in names:
            text = f" = {(value if equals else following)[:100]!r}"
    return text
