"""`plait plan infer`: where `plait generate` would put a model, the bytes of every tier, how fast it would generate, and what limits it.

Bytes and placement are those that `plait generate` decides with (`inference.deployment`). Times are measured on a few layers where the plan
is for this machine, and computed from a datasheet where `--gpu` names another one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from plait.cli.options import Adapters, Json, in_panel, one_adapter, refuse_given
from plait.cli.planning.tables import print_table
from plait.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from plait.inference.deployment import Deployment, Devices, Work
    from plait.inference.pass_times import PassTimes
    from plait.inference.prediction import Batches, CopyRates, Prediction
    from plait.inference.source import Source

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

MOST_TOKENS = 1 << 24

_EPILOG = """Examples:

plait plan infer --model trained --prompt-tokens 100 --new-tokens 50

plait plan infer --model trained --cpu-budget 2GiB --quant int8 --requests 16

plait plan infer --model llama-3-70b --gpu h100 --nproc-per-node 4 --requests 8"""


class Dtype(StrEnum):
    """Of the weights, and of the computation."""

    stored = "stored"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quant(StrEnum):
    """Of the linear layers' weights."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


_devices = in_panel("The devices")
Count = Annotated[int | None, _devices(min=1, metavar="N", help="Devices to use at most. (default: all)")]


@app.command(epilog=_EPILOG)
def infer(
    model: Annotated[str, typer.Option(metavar="NAME", help="A folder as for `plait generate`, a config.json, or a public model.")],
    adapter: Adapters = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, metavar="N", help="Of every prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, metavar="N", help="That every prompt gets.")] = 128,
    requests: Annotated[int, typer.Option(min=1, max=1 << 16, metavar="N", help="Prompts; all at once without --batch-size.")] = 1,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=1 << 16, metavar="N", help="Of them at once, batch after batch, as of generate. (default: all)")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(metavar="NAME", help="float32, bfloat16, float16; or as stored.")] = Dtype.stored,
    quant: Annotated[Quant, typer.Option(metavar="NAME", help="Linear layers in int8, int4; or none.")] = Quant.none,
    gpu: Annotated[str | None, _devices(metavar="NAME", help="h100, a100 and others. (default: this machine)")] = None,
    nproc_per_node: Count = None,
    tp: Annotated[int | None, _devices(min=1, metavar="N", help="Tensor parallelism. (default: the fewest devices)")] = None,
    pp: Annotated[int | None, _devices(min=1, metavar="N", help="Pipeline stages.")] = None,
    gpu_budget: Annotated[str | None, _devices(metavar="SIZE", help="Of a GPU's memory; other layers are streamed to it.")] = None,
    cpu_budget: Annotated[str | None, _devices(metavar="SIZE", help="Of host memory; what does not fit is read from disk.")] = None,
    offload_cache: Annotated[bool, _devices("--offload-cache", help="Keys and values in host memory.")] = False,
    disk: Annotated[float | None, _devices(metavar="GB/S", help="Of reading weights. (default: measured on the folder)")] = None,
    as_json: Json = False,
) -> None:
    """Where `plait generate` puts a model, the bytes of every tier, how fast it generates, and what limits it.

    Of this machine, a few layers with random weights are measured for seconds; of a --gpu the datasheet counts. Exit code 2, with the
    numbers, where nothing fits.
    """
    from plait.inference.capacity import check_positions
    from plait.inference.datasheet import devices_of
    from plait.inference.deployment import Work, deploy, deploy_streamed, devices_here
    from plait.inference.prediction import in_batches, predict
    from plait.inference.quantised import quantised_copy
    from plait.planner.hardware import device
    from plait.units import bytes_of

    if disk is not None and not 0 < disk < 10_000:
        raise InputError(f"--disk {disk}: must be above 0 and below 10,000 GB/s")
    asked_for = (("--gpu-budget", gpu_budget), ("--cpu-budget", cpu_budget))
    budgets = [None if value is None else bytes_of(value, name) for name, value in asked_for]
    if any(budgets):
        given = {"--tp": tp, "--pp": pp, "--nproc-per-node": nproc_per_node}
        refuse_given(given, "chooses a layout of several devices, and a budget streams weights to one", "leave one of them out")
    target = None if gpu is None else device(gpu)
    on = devices_here() if target is None else devices_of(target, nproc_per_node)
    if not on.on_gpu:
        refuse_given({"--tp": tp, "--pp": pp, "--nproc-per-node": nproc_per_node}, "is for GPUs", "name some with --gpu, or leave it out")
    source, unloaded = _model(model, one_adapter(adapter), dtype)
    check_positions(
        getattr(unloaded, "config", None),
        prompt_tokens + new_tokens,
        of=f"--prompt-tokens {prompt_tokens:,} and --new-tokens {new_tokens:,}",
        remedy="give smaller ones",
    )
    form = None if quant is Quant.none else quant.value
    counted = unloaded if form is None else quantised_copy(unloaded, form)
    at_once = min(batch_size or requests, requests)
    work = Work(source, counted, prompt_tokens + new_tokens, at_once, form is not None, offload_cache)
    if any(budgets):
        found = deploy_streamed(work, gpu_budget=budgets[0], cpu_budget=budgets[1], on=on)
    else:
        found = deploy(work, tp=tp, pp=pp, devices=nproc_per_node if target is None else None, on=on)
    lengths = {"prompt": prompt_tokens, "new": new_tokens, "requests": at_once}
    passes = _passes(work, unloaded, form, target, found, on, lengths)
    copies = _copies(work, unloaded, form, target, found, on, disk, lengths)
    predicted = predict(found, passes, copies, requests=at_once, new=new_tokens)
    batches = in_batches(predicted, requests=requests, at_once=at_once, new=new_tokens)
    if as_json:
        print(json.dumps(_as_json(found, passes, copies, predicted, batches), indent=1))
        return
    _show(model, work, unloaded, form, found, passes, copies, predicted, batches, lengths, on)


def _model(name: str, adapter: Path | None, dtype: Dtype) -> tuple[Source | None, nn.Module]:
    """A folder with weights, or a configuration, or a public model; on meta."""
    import torch

    from plait.inference.source import described, is_of_transformers, open_source
    from plait.inference.streamed import tensors_in_files
    from plait.model.described import require_transformers
    from plait.planner.models import named, names, to_config

    require_transformers("plait plan infer")
    wanted = None if dtype is Dtype.stored else getattr(torch, dtype.value)
    path = Path(name)
    only_described = is_of_transformers(path) and not any(path.glob("*.safetensors"))
    if path.is_dir() and not only_described:
        source = open_source(path, adapter)
        model = source.model(wanted)
        tensors_in_files(source, model)  # a file that was cut off is named before it is planned with
        return source, model
    if adapter is not None:
        raise InputError(f"--adapter {adapter}: needs a folder with weights as --model, and {name} has none")
    if only_described or path.is_file():
        return None, described(path, dtype=wanted)
    public = named(name)
    if public is None:
        from difflib import get_close_matches

        near = get_close_matches(name.lower(), names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"--model {name}: no such folder or file, and no public model; {hint}`plait plan models` lists them")
    return None, described(to_config(public, positions=1 << 20), dtype=wanted or torch.bfloat16)


def _passes(
    work: Work, unloaded: nn.Module, form: str | None, target: Any, found: Deployment, on: Devices, lengths: dict[str, int]
) -> PassTimes:
    from plait.cluster import accelerator
    from plait.inference.datasheet import pass_times
    from plait.inference.pass_times import measure_passes
    from plait.planner.hardware import device

    if target is None and found.tp * found.pp > 1:  # one process cannot measure several GPUs
        target = device(accelerator.model_name())
    if target is not None:
        return pass_times(work.model, target, found, **lengths)
    return measure_passes(unloaded, **lengths, quant=form, memory_bytes=on.memory_bytes)


def _copies(
    work: Work,
    unloaded: nn.Module,
    form: str | None,
    target: Any,
    found: Deployment,
    on: Devices,
    disk: float | None,
    lengths: dict[str, int],
) -> CopyRates:
    import torch

    from plait.cluster import accelerator
    from plait.inference.beside import measure_beside
    from plait.inference.copy_rates import measure_files, measure_handover, measure_host_copies
    from plait.inference.datasheet import copy_rates
    from plait.inference.prediction import Beside, CopyRates
    from plait.inference.stream import brought, comes_from_disk, is_read_straight
    from plait.inference.streamed import tensors_in_files, tensors_to_stream
    from plait.model.blocks import find_blocks

    account = found.account
    if disk is not None and not account.in_files:
        raise InputError("--disk: no weights are read from files in this plan; leave it out")
    beside = Beside(), Beside()
    files, how = None if disk is None else disk * 1e9, "as --disk says"
    if account.in_files and files is None:
        if target is not None or work.source is None:
            raise InputError("--disk: weights are read from files in this plan, and there are none to measure; say how many GB/s")
        tensors = list(tensors_in_files(work.source, work.model).values())
        stored, moved = tensors_to_stream(work.source, work.model, quantised=work.quantised)
        straight = not on.on_gpu and (bool(moved) or all(is_read_straight(work.model, block, stored) for block in find_blocks(work.model)))
        files, how = measure_files(tensors, total=account.in_files, places=account.slots, straight=straight)
        if not on.on_gpu and not comes_from_disk(account.in_files):
            beside = measure_beside(unloaded, tensors, places=account.slots, **lengths, quant=form, memory_bytes=on.memory_bytes)
            how += f"; while both go on, computing a token takes {beside[1].computing:.1f} x as long, reading {beside[1].reading:.1f} x"
    if target is not None:
        return copy_rates(target, files)
    handover = 0.0
    if account.streamed_layers and not on.on_gpu:
        handover = measure_handover(max(len(brought(work.model, block)) for block in find_blocks(work.model)))
    host = measure_host_copies(torch.device(accelerator.NAME)) if (account.streamed or account.cache_copied) and on.on_gpu else None
    return CopyRates(files, host, beside, handover, how if files is not None else "")


def _as_json(found: Deployment, passes: PassTimes, copies: CopyRates, predicted: Prediction, batches: Batches) -> dict[str, Any]:
    return {
        "placement": {"tp": found.tp, "pp": found.pp, "streamed": found.budget_bytes is not None, "why": found.why},
        "bytes": asdict(found.account),
        "predicted": asdict(predicted),
        "batches": asdict(batches),
        "rates": {"passes": asdict(passes), "copies": asdict(copies)},
    }


def _show(
    name: str,
    work: Work,
    unloaded: nn.Module,
    form: str | None,
    found: Deployment,
    passes: PassTimes,
    copies: CopyRates,
    predicted: Prediction,
    batches: Batches,
    lengths: dict[str, int],
    on: Devices,
) -> None:
    from plait.inference.capacity import compute_dtype
    from plait.inference.deployment import UNKNOWN
    from plait.inference.placement import WORKSPACE
    from plait.inference.quantised import sizes_of
    from plait.units import format_bytes, format_count

    console, account = Console(soft_wrap=True, highlight=False), found.account
    kind = str(compute_dtype(unloaded)).removeprefix("torch.")
    count = format_count(sum(p.numel() for p in unloaded.parameters()))
    print(f"{name}: {count} parameters, {kind}; {lengths['requests']} x ({lengths['prompt']:,} + {lengths['new']:,}) tokens")
    print(found.why)
    if form is not None:
        print(f"{form}: {sizes_of(unloaded, work.model)}")
    where = ("each GPU" if found.tp * found.pp > 1 else "the GPU") if on.on_gpu else "host memory"
    memory = "unknown" if account.memory >= UNKNOWN // 2 else format_bytes(account.memory)
    rows = [
        [where, "weights that stay", format_bytes(account.weights)],
        [where, f"places of {'quantised ' if form else ''}layers that are streamed", format_bytes(account.slots)],
        [where, "keys and values", format_bytes(account.cache)],
        [where, "activations", format_bytes(account.activations)],
        ["pinned host memory", "weights", format_bytes(account.on_host)],
        ["pinned host memory", "keys and values", format_bytes(account.cache_on_host)],
        ["files", "weights, read for every token", format_bytes(account.in_files)],
    ]
    print_table(console, ("tier", "what", "bytes"), [row for row in rows if row[2] != "0 B"])
    free = "" if account.activations else f"; {WORKSPACE:.0%} besides are left to activations"
    print(f"of {memory} that may be used on {where}{free}")
    times = [
        ["time to the first token", _time(predicted.first_seconds), predicted.first_limit],
        ["from token to token", _time(predicted.token_seconds), predicted.limit],
        ["tokens/s", f"{predicted.tokens_per_second:.3g}", f"{predicted.tokens_per_second_in_all:.3g} with the time to the first token"],
    ]
    if batches.count > 1:
        times += [
            ["first token of the last batch", _time(batches.last_first_seconds), f"{batches.count - 1} batches before it"],
            ["tokens/s of all batches", f"{batches.tokens_per_second:.3g}", f"{batches.count} batches one after another"],
            ["all answers", _time(batches.seconds), ""],
        ]
    print_table(console, ("predicted", "", "limited by"), times)
    print(f"computation: {passes.source}")
    if copies.source:
        print(f"copies: {copies.source}")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
