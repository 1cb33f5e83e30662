"""`plait plan infer`: where `plait generate` would put a model, the bytes of every tier, and a
bound of its speed.

Bytes and placement are those that `plait generate` decides with (`inference.deployment`). The bound
counts bytes and bandwidths alone (`inference.bandwidth`).
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

    from plait.inference.bandwidth import BandwidthBound
    from plait.inference.deployment import Deployment, Devices
    from plait.inference.source import Source

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

MOST_TOKENS = 1 << 24

_EPILOG = """Examples:

plait plan infer --model trained --prompt-tokens 100 --new-tokens 50

plait plan infer --model trained --cpu-budget 2GiB --batch-size 16

plait plan infer --model llama-3-70b --gpu h100 --nproc-per-node 4 --batch-size 8"""


class Dtype(StrEnum):
    """Of the weights, and of the computation."""

    stored = "stored"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


_devices = in_panel("The devices")
Count = Annotated[
    int | None, _devices(min=1, metavar="N", help="Devices to use at most. (default: all)")
]


@app.command(epilog=_EPILOG)
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
        int, typer.Option(min=1, max=MOST_TOKENS, metavar="N", help="Of every prompt.")
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, metavar="N", help="That every prompt gets.")
    ] = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, max=1 << 16, metavar="N", help="Prompts that are decoded at once.")
    ] = 1,
    dtype: Annotated[
        Dtype, typer.Option(metavar="NAME", help="float32, bfloat16, float16; or as stored.")
    ] = Dtype.stored,
    gpu: Annotated[
        str | None, _devices(metavar="NAME", help="h100, a100 and others. (default: this machine)")
    ] = None,
    nproc_per_node: Count = None,
    tp: Annotated[
        int | None,
        _devices(min=1, metavar="N", help="Tensor parallelism. (default: the fewest devices)"),
    ] = None,
    pp: Annotated[int | None, _devices(min=1, metavar="N", help="Pipeline stages.")] = None,
    gpu_budget: Annotated[
        str | None,
        _devices(metavar="SIZE", help="Of a GPU's memory; other layers are streamed to it."),
    ] = None,
    cpu_budget: Annotated[
        str | None,
        _devices(metavar="SIZE", help="Of host memory; what does not fit is read from disk."),
    ] = None,
    offload_cache: Annotated[
        bool, _devices("--offload-cache", help="Keys and values in host memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print where `plait generate` puts a model, the bytes of every tier, and a lower bound of the
    time per token.

    Exit code 2, with the numbers, where nothing fits.
    """
    from plait.inference.bandwidth import bandwidth_bound, catalogued_gpu, devices_of
    from plait.inference.capacity import check_positions, compute_dtype
    from plait.inference.deployment import Work, deploy, deploy_streamed, devices_here
    from plait.planner.hardware import device
    from plait.units import bytes_of, format_count

    asked_for = (("--gpu-budget", gpu_budget), ("--cpu-budget", cpu_budget))
    budgets = [None if value is None else bytes_of(value, name) for name, value in asked_for]
    if any(budgets):
        given = {"--tp": tp, "--pp": pp, "--nproc-per-node": nproc_per_node}
        refuse_given(
            given,
            "chooses a layout of several devices, and a budget streams weights to one",
            "leave one of them out",
        )
    target = None if gpu is None else device(gpu)
    on = devices_here() if target is None else devices_of(target, nproc_per_node)
    if not on.on_gpu:
        refuse_given(
            {"--tp": tp, "--pp": pp, "--nproc-per-node": nproc_per_node},
            "is for GPUs",
            "name some with --gpu, or leave it out",
        )
    source, unloaded = _model(model, one_adapter(adapter), dtype)
    check_positions(
        getattr(unloaded, "config", None),
        prompt_tokens + new_tokens,
        of=f"--prompt-tokens {prompt_tokens:,} and --new-tokens {new_tokens:,}",
        remedy="give smaller ones",
    )
    work = Work(source, unloaded, prompt_tokens + new_tokens, batch_size, offload_cache)
    if any(budgets):
        found = deploy_streamed(work, gpu_budget=budgets[0], cpu_budget=budgets[1], on=on)
    else:
        found = deploy(
            work, tp=tp, pp=pp, devices=nproc_per_node if target is None else None, on=on
        )

    known = target
    if known is None and on.on_gpu:
        known = catalogued_gpu()
    bound = None if known is None else bandwidth_bound(found.account, known)
    if as_json:
        print(json.dumps(_as_json(found, bound), indent=1))
        return

    count = format_count(sum(p.numel() for p in unloaded.parameters()))
    kind = str(compute_dtype(unloaded)).removeprefix("torch.")
    print(
        f"{model}: {count} parameters, {kind}; {batch_size} x ({prompt_tokens:,} + {new_tokens:,})"
        " tokens"
    )
    print(found.why)
    _show_bytes(found, on)
    _show_bound(found, bound, batch_size)


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
        # a file that was cut off is named before it is planned with
        tensors_in_files(source, model)
        return source, model
    if adapter is not None:
        raise InputError(
            f"--adapter {adapter}: needs a folder with weights as --model, and {name} has none"
        )
    if only_described or path.is_file():
        return None, described(path, dtype=wanted)
    public = named(name)
    if public is None:
        from difflib import get_close_matches

        near = get_close_matches(name.lower(), names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"--model {name}: no such folder or file, and no public model; {hint}`plait plan"
            " models` lists them"
        )
    return None, described(to_config(public, positions=1 << 20), dtype=wanted or torch.bfloat16)


def _as_json(found: Deployment, bound: BandwidthBound | None) -> dict[str, Any]:
    return {
        "placement": {
            "tp": found.tp,
            "pp": found.pp,
            "streamed": found.budget_bytes is not None,
            "why": found.why,
        },
        "bytes": asdict(found.account),
        "bound": None if bound is None else asdict(bound),
    }


def _show_bytes(found: Deployment, on: Devices) -> None:
    from plait.inference.deployment import UNKNOWN
    from plait.inference.placement import WORKSPACE
    from plait.units import format_bytes

    account = found.account
    where = "host memory"
    if on.on_gpu:
        where = "each GPU" if found.tp * found.pp > 1 else "the GPU"
    rows = [
        [where, "weights that stay", format_bytes(account.weights)],
        [where, "places of layers that are streamed", format_bytes(account.slots)],
        [where, "keys and values", format_bytes(account.cache)],
        [where, "activations", format_bytes(account.activations)],
        ["pinned host memory", "weights", format_bytes(account.on_host)],
        ["pinned host memory", "keys and values", format_bytes(account.cache_on_host)],
        ["files", "weights, read for every token", format_bytes(account.in_files)],
    ]
    console = Console(soft_wrap=True, highlight=False)
    print_table(console, ("tier", "what", "bytes"), [row for row in rows if row[2] != "0 B"])

    memory = "unknown" if account.memory >= UNKNOWN // 2 else format_bytes(account.memory)
    free = "" if account.activations else f"; {WORKSPACE:.0%} more is left to activations"
    print(f"{memory} may be used on {where}{free}")


def _show_bound(found: Deployment, bound: BandwidthBound | None, batch_size: int) -> None:
    from plait.units import format_bytes

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
    if found.account.in_files:
        print(
            f"       and the time to read {format_bytes(found.account.in_files)} from files for"
            " every token"
        )
