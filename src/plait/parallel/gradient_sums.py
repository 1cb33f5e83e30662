"""Sums of gradients that some ranks may not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from plait._torch.tensors import local_tensor
from plait.cluster import accelerator
from plait.cluster.process_groups import is_fake


def sum_gradients(
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    users: dist.ProcessGroup | None,
) -> None:
    """Sum the gradients of parameters over ranks, in place. Collective.

    A parameter that no rank used keeps no gradient. If any rank used it, all ranks get a gradient,
    as in one process.

    Args:
        parameters: Parameters, the same on all ranks.
        group: The ranks whose gradients are summed. None if there are no others.
        users: The ranks that may use a parameter. None if all of them use every parameter.
    """
    if not parameters:
        return
    used = [parameter.grad is not None for parameter in parameters]
    used_by_any = [True] * len(used)
    if users is not None:
        device = local_tensor(parameters[0].detach()).device
        flags = accelerator.tensor_of(used, dtype=torch.uint8, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=users)
        # Reading the flags waits for the device. A rank that used all parameters knows the result.
        if not all(used) and not is_fake():
            used_by_any = flags.tolist()

    sums = []
    for parameter, is_used in zip(parameters, used_by_any, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if group is not None:
            gradient = local_tensor(parameter.grad)
            # Grouped products leave the gradient transposed, and collectives need it contiguous.
            sent = gradient.contiguous()
            sums.append((gradient, sent, dist.all_reduce(sent, group=group, async_op=True)))
    for gradient, sent, work in sums:
        if work is not None:
            work.wait()
        if sent is not gradient:
            gradient.copy_(sent)
