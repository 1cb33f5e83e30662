"""The layouts in plain torch: fused AdamW, foreach clipping, and no wait in a step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_counts.layouts import Layout
from benchmarks.steps.model_parallel_peers import (
    adamw,
    next_token_loss,
    pipeline_step,
    tensor_plan,
    update,
)
from benchmarks.steps.workload import build_model
from plait._torch.units import parameter_groups

Step = Callable[[dict[str, Tensor]], object]
"""Runs an optimizer step on the samples of a rank. Tensors that it returns are not read."""


@dataclass(frozen=True)
class Sharding:
    """Sharding units and precision of Plait, which plain torch uses too."""

    units: dict[str, bool]
    """Names of the modules that are units, children first, and whether they free their parameters
    after a forward."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def replicated(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    model = build_model(layout.workload).to(device)
    model = DistributedDataParallel(
        model, device_ids=[device.index], gradient_as_bucket_view=True, broadcast_buffers=False
    )
    return _data_parallel_step(model, layout, device)


def sharded(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    """Build `fully_shard` over one or two mesh dimensions."""
    model = build_model(layout.workload).to(device)
    mesh = init_device_mesh("cuda", (layout.ranks,))
    if "dp_replicate" in layout.parallel:
        sizes = (2, layout.ranks // 2)
        mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(sharding.param_dtype, sharding.reduce_dtype)
    for name, frees in sharding.units.items():
        module = model.get_submodule(name)
        fully_shard(module, mesh=mesh, reshard_after_forward=frees, mp_policy=policy)
    return _data_parallel_step(model, layout, device)


def _data_parallel_step(model: nn.Module, layout: Layout, device: torch.device) -> Step:
    groups = [list(model.parameters())]
    optimizer = adamw(groups, layout.workload)
    size = layout.workload.micro_batch

    def step(batch: dict[str, Tensor]) -> object:
        losses = []
        for start in range(0, layout.workload.samples, size):
            micro_batch = {name: rows.narrow(0, start, size) for name, rows in batch.items()}
            loss = model(**_on_device(micro_batch, device)).loss
            if layout.accumulation > 1:
                loss = loss / layout.accumulation
            loss.backward()
            losses.append(loss.detach())

        norm = update(optimizer, layout.workload.clip, groups)
        # The loss that is logged is that of all ranks.
        total = losses[0]
        if len(losses) > 1:
            total = torch.stack(losses).sum()
        dist.all_reduce(total)
        return total / dist.get_world_size(), norm

    return step


def tensor_parallel(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    """Build DTensor tensor parallelism with `parallelize_module`."""
    model = build_model(layout.workload).to(device)
    mesh = init_device_mesh("cuda", (layout.ranks,))
    sequence = bool(layout.parallel.get("sequence_parallel"))
    parallelize_module(model, mesh, tensor_plan(layout.workload.layers, sequence=sequence))
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        by_kind[isinstance(parameter, DTensor)].append(parameter)
    groups = list(filter(None, by_kind.values()))
    optimizer = adamw(groups, layout.workload)

    def step(batch: dict[str, Tensor]) -> object:
        inputs = _on_device(batch, device)
        # Transformers would count positions in the local part of the sequence.
        positions = torch.arange(inputs["input_ids"].shape[1], device=device)[None]
        with loss_parallel():
            logits = model(input_ids=inputs["input_ids"], position_ids=positions).logits
            loss = next_token_loss(logits, inputs["labels"])
            loss.backward()
        return loss.detach(), update(optimizer, layout.workload.clip, groups)

    return step


def pipeline(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    """Build torch's 1F1B schedule over two stages."""
    step = pipeline_step(layout.workload, device)
    return lambda batch: step(_on_device(batch, device))


def _on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {
        name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()
    }


def units_of(model: nn.Module) -> dict[str, bool]:
    """Return the names of the sharding units, children first, and whether each frees parameters."""
    units = {}
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, FSDPModule):
            groups = parameter_groups(module)
            units[name] = any(group.post_forward_mesh_info for group in groups)
    return units
