"""Cross entropy over logits that are split along the vocabulary: the full logits are never built.

Three elements per token are sent: the largest logit, then the sum of exponentials together with the
target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from plait.comm.collectives import shard_range


def vocab_parallel_cross_entropy(
    logits: DTensor, targets: torch.Tensor, *, ignored: int
) -> torch.Tensor:
    """Sum over tokens of the cross entropy; 0-dimensional, the same on every rank of the tp axis.

    `logits` [..., vocab] over a one-dimensional mesh, split along the last dimension; any other way
    they are laid out, they are split so first. `targets` [...] int64, `ignored` ones count for
    nothing. Computed in float32, in float64 for float64 logits.
    """
    last = Shard(logits.ndim - 1)
    # an operator after the head (a log_softmax) may have gathered them, or made them parts of a
    # sum
    if logits.placements != (last,):
        logits = logits.redistribute(placements=[last])
    local = logits.to_local()
    group = logits.device_mesh.get_group()
    start, _ = shard_range(logits.shape[-1], group)
    wide = local if local.dtype == torch.float64 else local.float()
    return _CrossEntropy.apply(wide.flatten(0, -2), targets.flatten(), start, ignored, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        start: int,
        ignored: int,
        group: ProcessGroup,
    ) -> torch.Tensor:
        tokens, width = logits.shape
        top = logits.amax(-1) if width else logits.new_full((tokens,), float("-inf"))
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exponentials = torch.exp(logits - top[:, None])
        index = targets - start
        own = (index >= 0) & (index < width)
        index = index.masked_fill(~own, 0)
        sums = logits.new_zeros(2, tokens)
        sums[0] = exponentials.sum(-1)
        if width:
            sums[1] = (logits.gather(1, index[:, None])[:, 0] - top).masked_fill(~own, 0)
        dist.all_reduce(sums, group=group)
        counted = targets != ignored
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), index, own & counted, counted)
        return torch.where(counted, sums[0].log() - sums[1], 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, index, own, counted = ctx.saved_tensors
        local = probabilities * counted[:, None]
        if local.shape[1]:
            local.scatter_add_(1, index[:, None], -own.to(local.dtype)[:, None])
        return local * grad, None, None, None, None
