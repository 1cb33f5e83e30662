"""Raw torch, written as its documentation recommends and with the settings that measured fastest here (see the README beside).

Everyone uses the fused AdamW and one foreach pass for clipping.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.training_step.baselines import Step
from benchmarks.training_step.workload import Workload, adamw_arguments, build_model


def ddp(workload: Workload) -> Step:
    """DistributedDataParallel: replicated states, gradients reduced in buckets while backward runs."""
    model = _replicated(workload)
    return _step(
        model, torch.optim.AdamW(model.parameters(), **adamw_arguments(workload)), workload
    )


def zero_redundancy(workload: Workload, *, parameters_as_bucket_view: bool = False) -> Step:
    """DDP for the gradients, optimizer states sharded parameter by parameter, updated parameters broadcast by their owners."""
    model = _replicated(workload)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=parameters_as_bucket_view,
        **adamw_arguments(workload),
    )
    return _step(model, optimizer, workload)


def fully_sharded(workload: Workload, *, freed: bool) -> Step:
    """FSDP2 a block. A block's parameters are freed after its forward (`freed`, ZeRO 3) or kept until its backward (ZeRO 2); those of the
    root, which both ends of a pass use, are kept either way, torch's default."""
    dist.init_process_group("gloo")
    model = build_model(workload)
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, reshard_after_forward=freed)
    fully_shard(model, reshard_after_forward=False)
    return _step(
        model, torch.optim.AdamW(model.parameters(), **adamw_arguments(workload)), workload
    )


def alone(workload: Workload) -> Step:
    """Every rank trains a model of its own: the same computation at the same time, and nothing is sent in a step."""
    dist.init_process_group("gloo")
    model = build_model(workload)
    return _step(
        model, torch.optim.AdamW(model.parameters(), **adamw_arguments(workload)), workload
    )


def _replicated(workload: Workload) -> nn.Module:
    dist.init_process_group("gloo")
    return DistributedDataParallel(
        build_model(workload),
        gradient_as_bucket_view=True,
        static_graph=True,
        broadcast_buffers=False,
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload) -> Step:
    parameters = list(model.parameters())

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        loss = model(**batch).loss
        loss.backward()
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        clip_grads_with_norm_(parameters, workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return step
