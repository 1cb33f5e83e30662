"""Losses as (sum, weight), and the cross entropy of causal language models.

Logits may be split along the vocabulary. `vocab_parallel_cross_entropy` never gathers them. For
each token, ranks exchange three elements: first the largest logit, then the sum of exponentials
together with the target's logit.

Note [Weight of a loss]
    The engine divides every sum by the global weight of the step, so that a micro-batch with few
    targets counts less than one with many. The division happens before the first backward, so
    `weight` must depend on the batch only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from plait._torch.passes import differentiable_once
from plait.comm.collectives import shard_range
from plait.errors import InputError
from plait.parallel.micro_batches import IGNORED, LABELS, SHIFTED, samples, shift_labels
from plait.sizes import wide_dtype


@runtime_checkable
class Loss(Protocol):
    """Loss of a training step. See Note [Weight of a loss]."""

    def __call__(self, output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return (sum of the losses of a micro-batch, weight of the micro-batch).

        The sum is over all targets, 0-dimensional and with gradient.
        """

    def weight(self, batch: Any) -> Any:
        """Return the weight of a micro-batch before its forward.

        It is a number or a 0-dimensional tensor.
        """


@dataclass(frozen=True)
class CausalLMLoss:
    """Next-token cross entropy from an output of Transformers.

    `output.logits` has shape [batch, seq, vocab]. `batch["labels"]` [batch, seq] int64 are shifted
    here (position t predicts label t + 1), and -100 is ignored. If `batch["shift_labels"]` exists,
    it is used instead. It contains labels that are already shifted, for the full sequence or a part
    of it.

    The loss is computed in float32, or in float64 for float64 logits. The weight is the number of
    targets. Logits that tensor parallelism has split along the vocabulary stay split. A subclass
    that overrides `__call__` receives full logits unless it sets `split_logits = True`.
    """

    split_logits: ClassVar[bool] = True
    """True if the loss accepts logits that are split along the vocabulary (a DTensor)."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # A loss that is not written for it would read this rank's part of the vocabulary only.
        if "__call__" in vars(cls) and "split_logits" not in vars(cls):
            cls.split_logits = False

    def __call__(
        self, output: Any, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self._targets(batch)
        return cross_entropy_sum(output.logits, targets), (targets != IGNORED).sum()

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the number of targets, int64."""
        if SHIFTED in batch:
            return (batch[SHIFTED] != IGNORED).sum()
        return (batch["labels"][..., 1:] != IGNORED).sum()

    @staticmethod
    def _targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # Shifting the labels, not the logits, leaves the large tensor uncopied.
        if SHIFTED in batch:
            return batch[SHIFTED]
        return shift_labels(batch[LABELS])


causal_lm_loss = CausalLMLoss()
"""Loss of the causal language models of Hugging Face."""


@dataclass(frozen=True)
class PerSample:
    """Loss that is a plain mean over samples.

    `total(output, batch)` returns the sum over the samples of a micro-batch. The weight is the
    number of samples, dim 0 of the batch's first tensor.
    """

    total: Callable[[Any, Any], torch.Tensor]

    def __call__(self, output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return self.total(output, batch), self.weight(batch)

    def weight(self, batch: Any) -> int:
        """Return the number of samples."""
        return samples(batch)


def per_sample(total: Callable[[Any, Any], torch.Tensor]) -> PerSample:
    """Create a loss from a function that sums over the samples of a micro-batch.

    Example:
        `per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum"))`

    Args:
        total: Function (output, batch) -> sum.
    """
    return PerSample(total)


@dataclass(frozen=True)
class WeightedLoss:
    """Loss from a function that returns (sum, weight) and one that returns only the weight.

    Args:
        total: Maps (output, batch) to (sum, weight). See `Loss.__call__`.
        weigh: Maps a batch to the weight of its loss, usually its number of targets.

    Example:
        `WeightedLoss(lambda output, batch: (output.square().sum(), len(batch)), len)`
    """

    total: Callable[[Any, Any], tuple[torch.Tensor, Any]]
    weigh: Callable[[Any], Any]

    def __call__(self, output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        return self.total(output, batch)

    def weight(self, batch: Any) -> Any:
        """Return the weight, which depends on the batch only."""
        return self.weigh(batch)


def checked_total(result: Any) -> tuple[torch.Tensor, Any]:
    """Check that the result of a loss function is (sum, weight), and return it.

    Raises:
        InputError: The result is not (sum, weight), for example a mean.
    """
    if (
        isinstance(result, tuple | list)
        and len(result) == 2
        and isinstance(result[0], torch.Tensor)
        and result[0].numel() == 1
    ):
        return result[0], result[1]
    description = type(result).__name__
    remedy = "return both"
    # The usual mistake is a loss of torch, which returns a mean.
    if isinstance(result, torch.Tensor):
        description = f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, torch.Tensor) or (isinstance(result, tuple) and len(result) == 1):
        remedy = "for a plain sum over samples, and not a mean, use plait.per_sample(...)"
    raise InputError(
        f"loss_fn returned {description}, and train_batch needs (sum of the losses, their number)"
        f" of a micro-batch; {remedy}"
    )


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropies over all targets, 0-dimensional.

    Args:
        logits: [..., vocab], full or split along the vocabulary (a DTensor).
        targets: [...] int64. `IGNORED` ones do not count.
    """
    if isinstance(logits, DTensor):
        return vocab_parallel_cross_entropy(logits, targets, ignored=IGNORED)
    # 16-bit logits would lose digits in the sum of exponentials.
    wide = logits.to(wide_dtype(logits.dtype))
    # [batch, seq, vocab] -> [tokens, vocab]
    return F.cross_entropy(
        wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def vocab_parallel_cross_entropy(
    logits: DTensor, targets: torch.Tensor, *, ignored: int
) -> torch.Tensor:
    """Return the sum of the tokens' cross entropies on every tensor-parallel rank. Collective.

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
    group = logits.device_mesh.get_group()
    start, _ = shard_range(logits.shape[-1], group)
    wide = logits.to_local().to(wide_dtype(logits.dtype))
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
    @differentiable_once("use parallel.loss_parallel = false")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, index, has_target, counted = ctx.saved_tensors
        # softmax - one-hot target, for counted tokens
        local = probabilities * counted[:, None]
        if local.shape[1]:
            local.scatter_add_(1, index[:, None], -has_target.to(local.dtype)[:, None])
        return local * grad, None, None, None, None
