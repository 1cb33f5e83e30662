"""Tensor parallelism and pipelines for `throughput`: Plait, and the hand-written Llama with torch.

Two ranks split the model, and the remaining ranks are replicas of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from plait.validation.context import Context
from plait.validation.models import Workload
from plait.validation.peers import (
    LEARNING_RATE,
    Batch,
    Llama,
    TimedTrainer,
    TrainerFactory,
    device_mesh,
    hand_written,
    next_token_loss,
    plait_trainer,
)

SPLIT = 2
"""Number of ranks that a model is split over."""


def torch_tensor_parallel(context: Context, workload: Workload) -> TimedTrainer:
    """Return the hand-written Llama with DTensor's tensor parallelism and FSDP2 over replicas."""
    mesh = device_mesh(context, (context.world // SPLIT, SPLIT), ("dp", "tp"))
    model = hand_written(context, workload)
    of_block = {
        **{name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")},
        **{name: RowwiseParallel() for name in ("output", "down")},
    }
    for block in model.layers:
        parallelize_module(block, mesh["tp"], of_block)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    _shard(model, model.layers, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, foreach=False)

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)
        loss.backward()
        _clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return TimedTrainer(step)


def torch_pipeline(context: Context, workload: Workload) -> TimedTrainer:
    """Return the hand-written Llama in a 1F1B pipeline of torch, with FSDP2 over replicas."""
    mesh = device_mesh(context, (context.world // SPLIT, SPLIT), ("dp", "pp"))
    rank = mesh["pp"].get_local_rank()
    module = HandWrittenStage(hand_written(context, workload), rank, SPLIT)
    _shard(module, module.layers, mesh["dp"])
    stage = PipelineStage(module, rank, SPLIT, context.device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, workload.accumulation, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: Batch) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        _clip(list(module.parameters()), mesh["pp"])
        optimizer.step()
        optimizer.zero_grad()
        if not losses:
            return torch.zeros((), device=context.device)
        return torch.stack([loss.detach() for loss in losses]).mean()

    return TimedTrainer(step)


class HandWrittenStage(nn.Module):
    """An equal part of the layers of a hand-written Llama, with the embedding or the head."""

    def __init__(self, model: Llama, index: int, stages: int) -> None:
        super().__init__()
        per_stage = -(-len(model.layers) // stages)
        self.layers = model.layers[index * per_stage : (index + 1) * per_stage]
        self.rotary = model.rotary
        self.embedding = model.embedding if index == 0 else None
        self.norm = model.norm if index == stages - 1 else None
        self.head = model.head if index == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states, or logits in the last stage."""
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = self.rotary(x.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def _shard(model: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _clip(parameters: list[nn.Parameter], stages: DeviceMesh | None = None) -> None:
    """Clip the global gradient norm to 1.

    Parameters on different meshes (tensor parallelism splits some only) have no common foreach
    norm, so each mesh has its own, and the squares are added.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    squares = []
    for group in by_mesh.values():
        norm = get_total_norm([p.grad for p in group if p.grad is not None], foreach=True)
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2)
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages.get_group())
    for group in by_mesh.values():
        clip_grads_with_norm_(group, 1.0, total.sqrt(), foreach=True)


def _plait(degrees: Callable[[int], Mapping[str, int]]) -> TrainerFactory:
    """Return Plait's factory for the degrees of parallelism of a number of ranks."""

    def build(context: Context, workload: Workload) -> TimedTrainer:
        return plait_trainer(context, workload, {"parallel": dict(degrees(context.world))})

    return build


TRAINERS: Mapping[str, TrainerFactory] = {
    "plait-tp": _plait(lambda world: {"tp": SPLIT, "dp_replicate": world // SPLIT}),
    "torch-tp": torch_tensor_parallel,
    "plait-pp": _plait(lambda world: {"pp": SPLIT, "dp_replicate": world // SPLIT}),
    "torch-pp": torch_pipeline,
}
