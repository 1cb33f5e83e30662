"""Data parallelism in plain torch, as its documentation recommends and with the fastest settings.

Every engine uses the fused AdamW and clips in one foreach pass.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.steps.baselines import Step
from benchmarks.steps.model_parallel_peers import adamw, update
from benchmarks.steps.workload import Workload, build_model, optimizer_arguments


def ddp(workload: Workload) -> Step:
    return _step(_replicated(workload), workload)


def ddp_powersgd(workload: Workload) -> Step:
    """Build DistributedDataParallel with PowerSGD of rank 4 after ten steps."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_model(workload), broadcast_buffers=False)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook)
    return _step(model, workload)


def zero_redundancy(workload: Workload) -> Step:
    """Build DistributedDataParallel with ZeroRedundancyOptimizer."""
    model = _replicated(workload)
    arguments = optimizer_arguments(workload)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, fused=True, **arguments
    )
    return _step(model, workload, optimizer)


def fully_sharded(workload: Workload, *, freed: bool) -> Step:
    """Build `fully_shard` over every block.

    Args:
        workload: The model and its hyperparameters.
        freed: Whether parameters of a block are freed after its forward (ZeRO 3), or kept until its
            backward (ZeRO 2). Those of the root are kept, which is torch's default.
    """
    dist.init_process_group("gloo")
    model = build_model(workload)
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, reshard_after_forward=freed)
    fully_shard(model, reshard_after_forward=False)
    return _step(model, workload)


def alone(workload: Workload) -> Step:
    """Build a model per rank that sends nothing in a step."""
    dist.init_process_group("gloo")
    return _step(build_model(workload), workload)


def _replicated(workload: Workload) -> nn.Module:
    dist.init_process_group("gloo")
    model = build_model(workload)
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )


def _step(
    model: nn.Module, workload: Workload, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    groups = [list(model.parameters())]
    optimizer = optimizer or adamw(groups, workload)

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        loss = model(**batch).loss
        loss.backward()
        norm = update(optimizer, workload.clip, groups)
        return loss.item(), norm.item()

    return step
