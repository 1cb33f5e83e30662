"""`plait verify FILE`: does the layout in FILE compute what one process computes? Shown on the
user's model, made small, and small data.

The command checks its arguments, starts the processes, computes the references in its own process
and compares. Under a launcher (several machines) each process runs the layout and rank 0 compares.
What is compared, and how, is in `plait.verify`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import launch
from plait.cli.launching.settings import Settings
from plait.cli.options import PROCESSES, Json, Set, count
from plait.cluster import accelerator
from plait.cluster.launchers import claim
from plait.cluster.topology import cpu_count, device_count, place
from plait.errors import InputError

if TYPE_CHECKING:
    from plait.verify.plan import Pass, Plan
    from plait.verify.report import Report
    from plait.verify.run import Traces

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_BY_ITSELF = 8
"""The default number of processes, where there are fewer devices and cores."""


class Engine(StrEnum):
    """What runs the layout."""

    plait = "plait"
    deepspeed = "deepspeed"
    accelerate = "accelerate"


class Dtype(StrEnum):
    """Which comparisons."""

    float64 = "float64"
    configured = "configured"
    both = "both"


class Device(StrEnum):
    """Where the processes run."""

    auto = "auto"
    cpu = "cpu"
    gpu = accelerator.NAME


_PASSES: dict[Dtype, tuple[Pass, ...]] = {
    Dtype.float64: ("float64",),
    Dtype.configured: ("configured",),
    Dtype.both: ("float64", "configured"),
}


@app.command()
def verify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The JSON or YAML file that describes the run; a DeepSpeed file too.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A folder, config.json, hub name or package.module:function."
        ),
    ] = None,
    set_: Set = None,
    nproc_per_node: Annotated[
        int | None, count(*PROCESSES, help="Processes. (default: what FILE's degrees need)")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.")] = 3,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="NAME",
            help="float64, configured or both. (default: both; deepspeed: configured)",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="X", help="In float64. (default: 1e-10; 1e-7 where the model rounds)"),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(metavar="NAME", help="plait; or deepspeed, accelerate, in float32.")
    ] = Engine.plait,
    device: Annotated[
        Device,
        typer.Option(
            metavar="NAME", help=f"auto (GPUs where there are enough), cpu or {accelerator.NAME}."
        ),
    ] = Device.auto,
    all_: Annotated[
        bool, typer.Option("--all", help="A line for every tensor, not for every block.")
    ] = False,
    as_json: Json = False,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds after which a wait is ended.")
    ] = 600,
) -> None:
    """Compare the layout in FILE with one process: losses, gradient norms, every gradient, every
    parameter after some steps.

    The model is made small first. Exit code 0 if all is equal, 3 with the first parameter that
    differs, 2 for what cannot be run.
    """
    from plait.verify.run import compare, run_watched

    if tolerance is not None and not 0 < tolerance < math.inf:
        raise InputError(f"--tolerance {tolerance}: not a positive number; use for example 1e-10")
    if not 0 < timeout < math.inf:
        raise InputError(
            f"--timeout {timeout}: not a positive number of seconds; use for example 600"
        )
    if device is Device.cpu:
        os.environ[accelerator.VISIBLE] = ""  # before torch looks
    _import_from_here()
    launched = claim(os.environ) is not None
    plan = _plan(
        file,
        list(set_ or ()),
        model=model,
        processes=nproc_per_node,
        steps=steps,
        dtype=dtype,
        engine=engine,
        device=device,
    )
    _set_environment(plan)
    judges = not launched or place().rank == 0
    if judges and not as_json:
        _tell(plan)
    traces = run_watched(plan, seconds=timeout) if launched else _start(plan, seconds=timeout)
    if not judges:
        return
    _finish(compare(plan, traces, tolerance=tolerance), everything=all_, as_json=as_json)


def _plan(
    file: Path,
    overrides: list[str],
    *,
    model: str | None,
    processes: int | None,
    steps: int,
    dtype: Dtype | None,
    engine: Engine,
    device: Device,
) -> Plan:
    from plait.config.resolving.resolve import load
    from plait.verify.plan import prepare

    config = load(file, overrides)
    gpus = device_count()
    launched = claim(os.environ)
    if launched is not None:
        processes = launched.world_size
        gpus = launched.world_size if gpus else 0
    chosen = dtype or (Dtype.configured if engine is Engine.deepspeed else Dtype.both)
    return prepare(
        config,
        model=model,
        processes=processes,
        most_processes=max(gpus, cpu_count(), _BY_ITSELF),
        steps=steps,
        passes=_PASSES[chosen],
        engine=engine.value,
        device=device.value,
        gpus=gpus,
        deepspeed=_tree(file, overrides) if config.is_deepspeed else None,
    )


def _tree(file: Path, overrides: list[str]) -> dict[str, Any]:
    """The file's own keys with the overrides, for the engine that it was written for."""
    from plait.config.dialects.overrides import apply_override
    from plait.config.reading.source import parse_override, read

    tree = read(file).tree
    for text in overrides:
        apply_override(tree, *parse_override(text))
    return tree


def _import_from_here() -> None:
    """`--model package.module:function` is looked for in the current folder first, as `python -m`
    does; the processes do it too.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _set_environment(plan: Plan) -> None:
    if plan.device == "cpu":
        os.environ[accelerator.VISIBLE] = ""
        if plan.engine == "deepspeed":
            os.environ["DS_ACCELERATOR"] = "cpu"


def _start(plan: Plan, *, seconds: float) -> Traces:
    """Start the processes, and read what rank 0 wrote."""
    from plait.verify.run import PLAN, TRACES

    with tempfile.TemporaryDirectory(prefix="plait-verify-") as name:
        folder = Path(name)
        (folder / PLAN).write_bytes(pickle.dumps(plan))
        code = launch.run(
            ["plait.verify.run", name, str(seconds)], Settings(plan.world_size, grace_seconds=10)
        )
        if code:  # the launcher has told why
            raise typer.Exit(code)
        traces: Traces = pickle.loads((folder / TRACES).read_bytes())
    return traces


def _tell(plan: Plan) -> None:
    told = ""
    for topic, line in plan.lines:
        typer.echo(f"{topic if topic != told else '':<8}{line}")
        told = topic


def _finish(report: Report, *, everything: bool, as_json: bool) -> None:
    from plait.verify.report import lines, raise_unless_equal

    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        typer.echo("\n".join(lines(report, everything=everything)))
    raise_unless_equal(report)
    if not as_json:
        count = sum(len(section.rows) for section in report.sections)
        typer.echo(f"\nequal: {count:,} numbers and tensors of the layout are those of one process")


if __name__ == "__main__":
    app()
