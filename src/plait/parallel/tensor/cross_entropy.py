"""Cross entropy over logits that are split along the vocabulary, without the full logits.

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
from plait.units import wide_dtype


def vocab_parallel_cross_entropy(
    logits: DTensor, targets: torch.Tensor, *, ignored: int
) -> torch.Tensor:
    """Return the sum of the cross entropy over tokens, the same on every rank of tp. Collective.

    It is computed in float32, or in float64 for float64 logits.

    Args:
        logits: [..., vocab] over a one-dimensional mesh. Logits with another placement are first
            split along the last dimension.
        targets: [...] int64.
        ignored: Target of tokens that do not count.

    Returns:
        A 0-dimensional tensor.
    """
    last = Shard(logits.ndim - 1)
    # An operator after the head (a log_softmax) may have gathered them, or made them partial sums.
    if logits.placements != (last,):
        logits = logits.redistribute(placements=[last])
    local = logits.to_local()
    group = logits.device_mesh.get_group()
    start, _ = shard_range(logits.shape[-1], group)
    wide = local.to(wide_dtype(local.dtype))
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
        # With more ranks than vocabulary rows, a rank may have none.
        top = logits.new_full((tokens,), float("-inf"))
        if width:
            top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exponentials = torch.exp(logits - top[:, None])

        index = targets - start
        is_local = (index >= 0) & (index < width)
        index = index.masked_fill(~is_local, 0)
        # [2, tokens]: the sum of exponentials, and the target's logit from the rank that has it.
        sums = logits.new_zeros(2, tokens)
        sums[0] = exponentials.sum(-1)
        if width:
            target_logits = logits.gather(1, index[:, None])[:, 0] - top
            sums[1] = target_logits.masked_fill(~is_local, 0)
        dist.all_reduce(sums, group=group)

        counted = targets != ignored
        probabilities = exponentials.div_(sums[0][:, None])
        ctx.save_for_backward(probabilities, index, is_local & counted, counted)
        return torch.where(counted, sums[0].log() - sums[1], 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, index, has_target, counted = ctx.saved_tensors
        # softmax - one-hot target, for counted tokens
        local = probabilities * counted[:, None]
        if local.shape[1]:
            local.scatter_add_(1, index[:, None], -has_target.to(local.dtype)[:, None])
        return local * grad, None, None, None, None
