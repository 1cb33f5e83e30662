"""Verb `plait plan infer`: the placement that `plait generate` would choose, and its bytes.

Placement and bytes come from the code that `plait generate` decides with (`inference.deployment`).
The bound of the speed depends only on bytes and bandwidths (`inference.deployment`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from plait.cli.options import (
    Adapters,
    Json,
    WeightDtype,
    in_panel,
    parse_budget,
    refuse_options,
    single_adapter,
)
from plait.cli.tables import print_table
from plait.errors import InputError
from plait.names import did_you_mean
from plait.sizes import dtype_name

if TYPE_CHECKING:
    from torch import nn

    from plait.inference.deployment import BandwidthBound, Deployment, Devices
    from plait.inference.source import Source

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MAX_TOKENS = 1 << 24

_EPILOG = """Examples:

plait plan infer --model trained --prompt-tokens 100 --new-tokens 50

plait plan infer --model trained --cpu-budget 2GiB --batch-size 16

plait plan infer --model llama-3-70b --gpu h100 --nproc-per-node 4 --batch-size 8"""


_devices = in_panel("The devices")


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
        _devices(metavar="NAME", help="h100, a100 and others. (default: this machine's)"),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        _devices(min=1, metavar="N", help="Largest number of devices to use. (default: all)"),
    ] = None,
    tp: Annotated[
        int | None,
        _devices(min=1, metavar="N", help="Tensor-parallel degree. (default: fewest devices)"),
    ] = None,
    pp: Annotated[
        int | None,
        _devices(min=1, metavar="N", help="Pipeline stages. (default: fewest devices)"),
    ] = None,
    gpu_budget: Annotated[
        str | None,
        _devices(metavar="SIZE", help="GPU memory to use. Layers that do not fit are streamed."),
    ] = None,
    cpu_budget: Annotated[
        str | None,
        _devices(metavar="SIZE", help="Host memory to use. Other layers are read from disk."),
    ] = None,
    offload_cache: Annotated[
        bool, _devices("--offload-cache", help="Keep the KV cache of a GPU in host memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the placement that `plait generate` chooses for a model, the bytes of every memory
    tier, and a lower bound of the time per token.

    Exit code 2, with the numbers, if nothing fits.
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
    from plait.sizes import format_count

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
        remedy="give smaller ones",
    )
    work = InferenceWork(source, unloaded, prompt_tokens + new_tokens, batch_size, offload_cache)
    if has_budget:
        deployment = deploy_streamed(work, gpu_budget=gpu_bytes, cpu_budget=cpu_bytes, on=devices)
    else:
        # The devices of a named GPU have been limited to --nproc-per-node already.
        limit = nproc_per_node if named_gpu is None else None
        deployment = deploy(work, tp=tp, pp=pp, devices=limit, on=devices)

    bound_gpu = named_gpu
    if bound_gpu is None and devices.on_gpu:
        bound_gpu = catalogued_gpu()
    bound = None
    if bound_gpu is not None:
        bound = bandwidth_bound(deployment.estimate, bound_gpu)
    if as_json:
        print(json.dumps(_as_json(deployment, bound), indent=1))
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
    """Return the weights and the model on the meta device.

    A configuration and a public model have no weights.
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
            f"--adapter {adapter}: needs a folder with weights as --model, and {name} has none"
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
    config = to_config(public, positions=1 << 20)
    return None, model_of_config(config, dtype=torch_dtype or torch.bfloat16)


def _as_json(deployment: Deployment, bound: BandwidthBound | None) -> dict[str, Any]:
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
    console = Console(soft_wrap=True, highlight=False)
    print_table(console, ("tier", "content", "bytes"), [row for row in rows if row[2] != "0 B"])

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
