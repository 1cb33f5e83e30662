"""Commands that plan: `plait plan`, `plait plan infer` and `plait dryrun`.

`plait plan` finds the fastest layout that fits, and explains it (`plait.planner`). If no GPU is
named, it plans for the devices of this machine. `plait plan infer` prints the placement that `plait
generate` would choose, the memory that it needs, and a lower bound of the time per token
(`inference.deployment`).

`plait dryrun` builds and steps one rank of a layout without the other ranks. The engine itself
runs, and the results are printed next to the planner's prediction. The layout is that of FILE if
FILE fixes one, and otherwise the best one of a plan. Fake tensors need no memory and no GPU;
`--on-device` runs the kernels on this machine's GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from plait.cli.options import (
    Adapters,
    Batch,
    Fix,
    Gpu,
    Json,
    MemoryGib,
    Model,
    Network,
    NprocPerNode,
    PlannedNnodes,
    PrecisionName,
    Seq,
    WeightDtype,
    WorldSize,
    device_option,
    in_panel,
    parse_budget,
    refuse_options,
    single_adapter,
)
from plait.cli.terminal import print_table
from plait.errors import InputError
from plait.files import not_writable
from plait.names import did_you_mean, similar_names

if TYPE_CHECKING:
    from torch import nn

    from plait.cli.planning.query import PlanQuery
    from plait.inference.deployment import BandwidthBound, Deployment, Devices
    from plait.inference.source import Source
    from plait.planner.calibrate import Calibration
    from plait.planner.explain import Comparison
    from plait.planner.search import Plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LIST_NAMES = "models"
"""Argument that prints the names of models and GPUs."""


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|models|infer]",
            help="A training configuration to plan for. `models` lists the models and GPUs.",
        ),
    ] = None,
    model: Model = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: PrecisionName = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Plan for blocks that torch.compile compiles.")
    ] = False,
    fix: Fix = None,
    gpu: Gpu = None,
    world_size: WorldSize = None,
    nnodes: PlannedNnodes = None,
    nproc_per_node: NprocPerNode = None,
    memory_gib: MemoryGib = None,
    network: Network = None,
    why: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B",
            help="Compare with the best layout that has A=B, or with `neighbours`. Repeatable.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Number of layouts to show.")
    ] = 5,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of constants that `plait calibrate` wrote.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the best layout as a file for `plait train`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search all layouts of a model on a cluster, and print which fit, how fast they are, and why.

    Exit code 1 if no layout fits. See also `plan infer`.
    """
    from plait.cli.planning.query import read_calibration, read_request
    from plait.cli.planning.show import (
        names_as_json,
        print_names,
        print_nothing_fits,
        print_plan,
    )
    from plait.planner import explain, output
    from plait.planner import search as searching
    from plait.planner.techniques import parse_fixed

    # A file of this name takes precedence.
    if file == Path(_LIST_NAMES) and not file.exists():
        if as_json:
            print(json.dumps(names_as_json()))
        else:
            print_names()
        return
    _refuse_misspelt_name(file)
    # Wrong options are refused before the search, which can take long.
    _check_out(file, out)
    why = why or []
    requested = [text for text in why if text != "neighbours"]
    for text in requested:
        parse_fixed([text])
    query = read_request(
        file=file,
        model=model,
        world_size=world_size,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        gpu=gpu,
        batch=batch,
        seq=seq,
        precision=precision,
        compiled=compiled,
        memory_gib=memory_gib,
        network=network,
        fix=fix,
    )
    request = query.request
    fixed = query.fixed
    calibration = read_calibration(calibrate, request)
    result = searching.plan(request, fixed=fixed, calibration=calibration, best=top)
    if not result.best:
        print_nothing_fits(result)
        raise typer.Exit(1)

    if query.base:
        output.check_runs(request, output.config_of(request, result.best[0], query.base))
    reasons = _compare(result, requested, fixed, calibration)
    neighbours: list[Comparison] = []
    if "neighbours" in why:
        neighbours = _compare(result, explain.neighbours(result), fixed, calibration)

    written = None
    if out is not None:
        written = output.write(result, out, query.base)
    if as_json:
        print(json.dumps(_to_json(result, query, [*reasons, *neighbours]), indent=1, default=float))
        return
    print_plan(result, query.notes, reasons, neighbours)
    if written is not None:
        print(f"wrote {written[0]} (run it with `plait train {written[0]}`) and {written[1]}")


def _compare(
    result: Plan,
    texts: Sequence[str],
    fixed: Mapping[str, int],
    calibration: Calibration | None,
) -> list[Comparison]:
    """Compare the best layout with the best one for each of `texts`, such as `tp=4`."""
    from plait.planner import explain
    from plait.planner.techniques import parse_fixed

    return [
        explain.why(result, parse_fixed([text]), text, fixed=fixed, calibration=calibration)
        for text in texts
    ]


def _to_json(result: Plan, query: PlanQuery, reasons: list[Comparison]) -> dict[str, Any]:
    from plait.planner import output

    answers = []
    for reason in reasons:
        other = output.choice_as_json(reason.other) if reason.other else None
        answers.append({"query": reason.query, "reason": reason.reason, "other": other})
    return output.plan_as_json(result) | {
        "config": output.config_of(query.request, result.best[0], query.base),
        "sidecar": output.sidecar_of(result, result.best[0]),
        "why": answers,
        "notes": query.notes,
    }


def _refuse_misspelt_name(file: Path | None) -> None:
    """Raise InputError if a missing file without a suffix resembles `models` or `infer`."""
    if file is None or file.suffix or file.exists():
        return
    matches = similar_names(str(file), (_LIST_NAMES, "infer"))
    if matches:
        raise InputError(f"{file}: there is no such file; did you mean `plait plan {matches[0]}`?")


def _check_out(file: Path | None, out: Path | None) -> None:
    """Check --out before the search. A manually edited file is not replaced."""
    if out is None:
        return
    if out.suffix != ".json":
        raise InputError(
            f"--out {out}: the configuration is written as JSON; pass a name that ends in .json"
        )
    from plait.planner.output import is_unchanged

    try:
        exists = out.exists()
    except OSError as error:
        raise not_writable(f"--out {out}", error) from None
    if exists and not is_unchanged(out):
        is_input = ""
        if file is not None and file.exists() and out.samefile(file):
            is_input = ", is the file to plan for"
        raise InputError(
            f"--out {out}: exists{is_input}, and either was not written by `plait plan` or was"
            " edited afterwards; use another name, or delete it first"
        )


infer_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MAX_TOKENS = 1 << 24

_INFER_EPILOG = """Examples:

plait plan infer --model trained --prompt-tokens 100 --new-tokens 50

plait plan infer --model trained --cpu-budget 2GiB --batch-size 16

plait plan infer --model llama-3-70b --gpu h100 --nproc-per-node 4 --batch-size 8"""


@infer_app.command(epilog=_INFER_EPILOG)
def infer(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A folder as for `plait generate`, a config.json, or a public model.",
        ),
    ],
    adapter: Adapters = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=_MAX_TOKENS, metavar="N", help="Tokens of each prompt.")
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option(min=1, max=_MAX_TOKENS, metavar="N", help="Tokens of each answer.")
    ] = 128,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 16, metavar="N", help="Number of prompts that are decoded together."
        ),
    ] = 1,
    dtype: Annotated[
        WeightDtype,
        typer.Option(metavar="NAME", help="float32, bfloat16, float16, or stored."),
    ] = WeightDtype.stored,
    gpu: Annotated[
        str | None,
        device_option(metavar="NAME", help="h100, a100 and others. (default: this machine's)"),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        device_option(min=1, metavar="N", help="Largest number of devices to use. (default: all)"),
    ] = None,
    tp: Annotated[
        int | None,
        device_option(min=1, metavar="N", help="Tensor-parallel degree. (default: fewest devices)"),
    ] = None,
    pp: Annotated[
        int | None,
        device_option(min=1, metavar="N", help="Pipeline stages. (default: fewest devices)"),
    ] = None,
    gpu_budget: Annotated[
        str | None,
        device_option(
            metavar="SIZE", help="GPU memory to use. Layers that do not fit are streamed."
        ),
    ] = None,
    cpu_budget: Annotated[
        str | None,
        device_option(metavar="SIZE", help="Host memory to use. Other layers are read from disk."),
    ] = None,
    offload_cache: Annotated[
        bool, device_option("--offload-cache", help="Keep the KV cache of a GPU in host memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the placement that `plait generate` chooses for a model.

    It also prints the bytes of every memory tier, and a lower bound of the time per token.

    If no placement fits, the command prints the required and available memory, and exits with 2.
    """
    from plait.inference.capacity import check_positions, compute_dtype
    from plait.inference.deployment import (
        InferenceWork,
        bandwidth_bound,
        catalogued_gpu,
        deploy,
        deploy_streamed,
        devices_of,
        local_devices,
    )
    from plait.planner.hardware import device
    from plait.sizes import dtype_name, format_count

    gpu_bytes = parse_budget(gpu_budget, "--gpu-budget")
    cpu_bytes = parse_budget(cpu_budget, "--cpu-budget")
    has_budget = bool(gpu_bytes or cpu_bytes)
    layout_options = {"--tp": tp, "--pp": pp, "--nproc-per-node": nproc_per_node}
    if has_budget:
        refuse_options(
            layout_options,
            "chooses a layout of several devices, and a budget streams weights to one",
            "leave one of them out",
        )
    if gpu is None:
        named_gpu = None
        devices = local_devices()
    else:
        named_gpu = device(gpu)
        devices = devices_of(named_gpu, nproc_per_node)
    if not devices.on_gpu:
        refuse_options(layout_options, "is for GPUs", "name some with --gpu, or leave it out")
    source, unloaded = _open_model(model, single_adapter(adapter), dtype)
    check_positions(
        getattr(unloaded, "config", None),
        prompt_tokens + new_tokens,
        content=f"--prompt-tokens {prompt_tokens:,} and --new-tokens {new_tokens:,}",
        remedy="pass smaller ones",
    )
    work = InferenceWork(source, unloaded, prompt_tokens + new_tokens, batch_size, offload_cache)
    if has_budget:
        deployment = deploy_streamed(
            work, gpu_budget=gpu_bytes, cpu_budget=cpu_bytes, machine=devices
        )
    else:
        # The devices of a named GPU have been limited to --nproc-per-node already.
        deployment = deploy(
            work,
            tp=tp,
            pp=pp,
            devices=nproc_per_node if named_gpu is None else None,
            machine=devices,
        )

    bound_gpu = named_gpu
    if bound_gpu is None and devices.on_gpu:
        bound_gpu = catalogued_gpu()
    bound = None
    if bound_gpu is not None:
        bound = bandwidth_bound(deployment.estimate, bound_gpu)
    if as_json:
        print(json.dumps(_deployment_as_json(deployment, bound), indent=1))
        return

    count = format_count(sum(p.numel() for p in unloaded.parameters()))
    kind = dtype_name(compute_dtype(unloaded))
    print(
        f"{model}: {count} parameters, {kind}; {batch_size} x ({prompt_tokens:,} + {new_tokens:,})"
        " tokens"
    )
    print(deployment.why)
    _print_bytes(deployment, devices)
    _print_bound(deployment, bound, batch_size)


def _open_model(
    name: str, adapter: Path | None, dtype: WeightDtype
) -> tuple[Source | None, nn.Module]:
    """Return (source of the weights, model on the meta device).

    The source is None if `name` is a configuration or a public model.
    """
    import torch

    from plait.inference.source import is_of_transformers, model_of_config, open_source
    from plait.inference.streamed_model import tensors_in_files
    from plait.model.described import require_transformers
    from plait.planner.models import named, names, to_config

    require_transformers("plait plan infer")
    torch_dtype = dtype.torch_dtype()
    path = Path(name)
    has_only_config = is_of_transformers(path) and not any(path.glob("*.safetensors"))
    if path.is_dir() and not has_only_config:
        source = open_source(path, adapter)
        model = source.model(torch_dtype)
        # Reads the headers, which raises for a truncated file.
        tensors_in_files(source, model)
        return source, model
    if adapter is not None:
        raise InputError(
            f"--adapter {adapter}: needs a folder with weights as --model, but {name} has none;"
            " leave --adapter out, or pass the folder of the model"
        )
    if has_only_config or path.is_file():
        return None, model_of_config(path, dtype=torch_dtype)
    public = named(name)
    if public is None:
        hint = did_you_mean(name, names(), cutoff=0.4)
        raise InputError(
            f"--model {name}: no such folder or file, and no public model; {hint}`plait plan"
            " models` lists them"
        )
    # Learned positions are weights, so a model that has them keeps their number.
    config = to_config(public, positions=public.positions or 1 << 20)
    return None, model_of_config(config, dtype=torch_dtype or torch.bfloat16)


def _deployment_as_json(deployment: Deployment, bound: BandwidthBound | None) -> dict[str, Any]:
    return {
        "placement": {
            "tp": deployment.tp,
            "pp": deployment.pp,
            "streamed": deployment.budget_bytes is not None,
            "why": deployment.why,
        },
        "bytes": asdict(deployment.estimate),
        "bound": None if bound is None else asdict(bound),
    }


def _print_bytes(deployment: Deployment, devices: Devices) -> None:
    from plait.inference.deployment import UNKNOWN, WORKSPACE
    from plait.sizes import format_bytes

    estimate = deployment.estimate
    tier = "host memory"
    if devices.on_gpu:
        tier = "the GPU"
    if devices.on_gpu and deployment.tp * deployment.pp > 1:
        tier = "each GPU"
    rows = [
        [tier, "resident weights", format_bytes(estimate.weights)],
        [tier, "slots of streamed layers", format_bytes(estimate.slots)],
        [tier, "KV cache", format_bytes(estimate.cache)],
        [tier, "activations", format_bytes(estimate.activations)],
        ["pinned host memory", "weights", format_bytes(estimate.on_host)],
        ["pinned host memory", "KV cache", format_bytes(estimate.cache_on_host)],
        ["files", "weights, read for every token", format_bytes(estimate.in_files)],
    ]
    print_table(
        Console(soft_wrap=True, highlight=False),
        ("tier", "content", "bytes"),
        [row for row in rows if row[2] != "0 B"],
    )

    memory = format_bytes(estimate.memory)
    if estimate.memory >= UNKNOWN // 2:
        memory = "unknown"
    reserve = ""
    if not estimate.activations:
        reserve = f"; {WORKSPACE:.0%} more is left for activations"
    print(f"{memory} may be used on {tier}{reserve}")


def _print_bound(deployment: Deployment, bound: BandwidthBound | None, batch_size: int) -> None:
    from plait.sizes import format_bytes

    if bound is None:
        print(
            "bound: none, because the planner's catalogue does not list this machine's memory; name"
            " a GPU with --gpu"
        )
    else:
        rate = batch_size / bound.token_seconds
        print(
            f"bound: at least {1000 * bound.token_seconds:.3g} ms per token, at most {rate:.3g}"
            f" tokens/s, by {bound.limit}"
        )
    if deployment.estimate.in_files:
        print(
            f"       plus the time to read {format_bytes(deployment.estimate.in_files)} from files"
            " for every token"
        )


dryrun_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_dryrun_option = in_panel("The dry run")
_DRYRUN_EPILOG = (
    "Example: plait dryrun --model llama-3-70b --world-size 1024 --gpu h100 --rank 1023"
)


@dryrun_app.command(epilog=_DRYRUN_EPILOG)
def dryrun(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="A training configuration. An incomplete layout is planned."
        ),
    ] = None,
    model: Model = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: PrecisionName = None,
    fix: Fix = None,
    gpu: Gpu = None,
    world_size: WorldSize = None,
    nnodes: PlannedNnodes = None,
    nproc_per_node: NprocPerNode = None,
    rank: Annotated[
        int | None,
        _dryrun_option(
            metavar="R", min=0, help="Rank to run. (default: the one with the most memory)"
        ),
    ] = None,
    full_step: Annotated[
        bool,
        _dryrun_option(
            "--full-step", help="Run all micro-batches, not only enough to reach the peak memory."
        ),
    ] = False,
    on_device: Annotated[
        bool, _dryrun_option("--on-device", help="Run the kernels on this machine's GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build and step one rank of a layout without the other ranks and without GPUs.

    The command prints the rank's memory, traffic and operators. Exit code 1 if no layout fits.
    """
    from plait.cli.planning.dry_run import dry_run, print_dry_run
    from plait.cli.planning.query import has_complete_layout, read_request
    from plait.cli.planning.show import print_nothing_fits
    from plait.planner import output
    from plait.planner import search as searching
    from plait.planner.explain import describe

    query = read_request(
        file=file,
        model=model,
        world_size=world_size,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        gpu=gpu,
        batch=batch,
        seq=seq,
        precision=precision,
        fix=fix,
        keeps_layout=True,
    )
    if has_complete_layout(file, query.tree):
        layout = f"{file} fixes its layout, which is run as it is; nothing was searched"
        tree = query.base
    else:
        plan = searching.plan(query.request, fixed=query.fixed, best=1)
        if not plan.best:
            print_nothing_fits(plan)
            raise typer.Exit(1)
        layout = f"the best of {plan.candidates:,} layouts: {describe(plan.best[0].layout)}"
        tree = output.config_of(query.request, plan.best[0], query.base)

    result = dry_run(query.request, tree, rank=rank, full_step=full_step, on_device=on_device)
    if as_json:
        print(
            json.dumps(
                {**result.as_json(), "layout": layout, "notes": [*query.notes, *result.notes]},
                indent=1,
                default=float,
            )
        )
        return
    print(layout)
    for note in query.notes:
        print(f"note: {note}")
    print_dry_run(result)
