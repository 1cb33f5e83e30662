"""The command `plait`: a table of verbs, each in its own module that is imported only when it is
used.

`plait --help` reads the table alone, so it is quick and imports no torch. A PlaitError is the
user's to mend: its message goes to standard error, without a traceback, and its exit code is
returned.
"""

from __future__ import annotations

import errno
import importlib
import io
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from plait.cli.stdout import close_stdout
from plait.errors import PlaitError
from plait.version import __version__

VERBS = {
    "plan": ("plait.cli.plan", "Find the layout that fits and is fastest, before you rent GPUs."),
    "calibrate": (
        "plait.cli.calibrate",
        "Fit the planner to this machine, or to a table of measured runs.",
    ),
    "train": ("plait.cli.train", "Train a model from one JSON file."),
    "launch": ("plait.cli.launch", "Run a script on every device of one or several machines."),
    "layout": (
        "plait.cli.layout",
        "Show the ranks on the machines, the split of every parameter, the bytes of a rank.",
    ),
    "dryrun": (
        "plait.cli.dryrun",
        "Build and step one rank of a layout without its peers, and without GPUs.",
    ),
    "schedule": (
        "plait.cli.schedule",
        "Draw a pipeline schedule: its timeline, idle time and activations in flight.",
    ),
    "verify": (
        "plait.cli.verify",
        "Show that a layout computes what one process computes, on small data.",
    ),
    "doctor": (
        "plait.cli.doctor",
        "Describe this environment; measure the links between its processes.",
    ),
    "checkpoint": ("plait.cli.checkpoint", "List, verify, compare and prune checkpoints."),
    "export": ("plait.cli.export", "Write a trained model as a folder that from_pretrained opens."),
    "generate": (
        "plait.cli.generate",
        "Generate text from a trained model, on as many devices as it needs.",
    ),
    "import": (
        "plait.cli.import_",
        "Write a checkpoint of DeepSpeed or torch.distributed.checkpoint as one of Plait's.",
    ),
    "config": ("plait.cli.config", "Explain a configuration file, or print the schema."),
}
"""Verb to the module with its `app` (a Typer) and the line that `plait --help` shows."""

SECOND = {("plan", "infer"): "plait.cli.planning.infer"}
"""Verbs with a second word, of a verb that takes a file or a name there, too."""


def _without_type_of_flags() -> None:
    """Show no type for options that take no value: Typer 0.29 shows `--force <bool>`, and `--force
    true` is refused.
    """
    shown = getattr(TyperOption, "display_type_rich", None)
    if shown is None:
        return

    def display(option: TyperOption, ctx: Any) -> Any:
        return None if option.is_flag else shown(option, ctx=ctx)

    TyperOption.display_type_rich = display  # type: ignore[method-assign, assignment]


_without_type_of_flags()


class _Verb(TyperCommand):
    """A verb that is not loaded yet: enough for a line of help. The real one takes over when its
    arguments are parsed.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        assert self.name is not None
        second = SECOND.get((self.name, args[0])) if args else None
        if second is not None:
            inner: typer.Typer = importlib.import_module(second).app
            command = typer.main.get_command(inner)
            return command.make_context(
                f"{info_name} {args[0]}",
                args[1:],
                parent,
                token_normalize_func=_with_dashes,
                **extra,
            )
        app: typer.Typer = importlib.import_module(VERBS[self.name][0]).app
        return typer.main.get_command(app).make_context(
            info_name, args, parent, token_normalize_func=_with_dashes, **extra
        )


def _with_dashes(name: str) -> str:
    """torchrun and DeepSpeed write `--nproc_per_node`, too."""
    return name.replace("_", "-")


class _Verbs(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **{
                **settings,
                "commands": {
                    name: _Verb(name=name, help=line) for name, (_, line) in VERBS.items()
                },
            }
        )


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
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 2 for a wrong command line or configuration, or what the verb
    returns.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # a name or a value that the terminal cannot show is escaped and ends nothing
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = typer.main.get_command(app).main(
            args=given, prog_name="plait", standalone_mode=False
        )
        sys.stdout.flush()
    except PlaitError as error:
        print("\n".join(f"plait: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:  # rich and typer end so where standard output is closed
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        sys.exit(close_stdout(end.__context__))
    except OSError as error:
        # Path.exists raises these
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES) and error.filename is not None:
            print(
                f"plait: {str(error.filename)[:100]!r}: {error.strerror}; give another path",
                file=sys.stderr,
            )
            sys.exit(2)
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        sys.exit(close_stdout(error))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _refuse_command_line(error, given)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_command_line(error: Any, given: Sequence[str]) -> NoReturn:
    """Tell what typer found wrong with the command line, in the form of every other message."""
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help(), end="")
        sys.exit(error.exit_code)
    rule = error.format_message().rstrip(".")
    if (
        given[:1] == ["train"]
        and "--" in given
        and any(token.startswith("--") for token in given[given.index("--") + 1 :])
    ):
        rule = (
            "a run is a file; write Megatron-LM's flags to one by `plait config convert --out"
            " run.json -- FLAGS`"
        )
    names = list(getattr(parameter, "opts", ()))
    if names and type(error).__name__ == "BadParameter":
        rule = (
            str(error.message)
            .rstrip(".")
            .replace("Input should be", "must be")
            .replace("Value error, ", "")
        )
        option = any(name.startswith("-") for name in names)
        if not option:  # which of the arguments it was, typer does not say
            rule = ", ".join([rule, *(f"{token[:100]!r}" for token in given if "\0" in token)])
        if option:
            subject = f"{names[0]}{_given_to(names, given)}"
        else:
            subject = parameter.metavar or names[0]
        rule = f"{subject}: {rule}"
    print(
        f"plait: {rule}; see `{context.command_path if context is not None else 'plait'} --help`",
        file=sys.stderr,
    )
    sys.exit(error.exit_code)


def _given_to(names: Sequence[str], given: Sequence[str]) -> str:
    """` = '0'`, what stands after an option on the command line."""
    found = ""
    for token, following in zip(given, [*given[1:], ""], strict=True):
        name, equals, value = token.partition("=")
        if _with_dashes(name) in names:
            found = f" = {(value if equals else following)[:100]!r}"
    return found
