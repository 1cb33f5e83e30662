"""Losses as (sum, weight): the only form whose global mean is the same on every layout.

The engine divides by the global weight, so that a micro-batch with few targets counts for few.
`weight` must be known from the batch alone, because the division happens before the first backward.
Not here: the averaging itself (see engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from plait.errors import InputError
from plait.parallel.micro_batches import IGNORED, LABELS, SHIFTED, samples, shifted
from plait.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy


@runtime_checkable
class Loss(Protocol):
    """What `train_batch` needs to know about a loss."""

    def __call__(self, output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        """(sum of the losses of all targets of a micro-batch: 0-dimensional with gradient, its
        weight).
        """

    def weight(self, batch: Any) -> Any:
        """The weight of a micro-batch, a number or a 0-dimensional tensor, before any forward."""


@dataclass(frozen=True)
class CausalLMLoss:
    """Next-token cross entropy from a Transformers output.

    `output.logits` [batch, seq, vocab]; `batch["labels"]` [batch, seq] int64, shifted here
    (position t predicts label t + 1), -100 ignored; `batch["shift_labels"]`, where it is given, are
    the shifted ones, of all of the sequence or a part of it. Computed in float32 (float64 for
    float64 logits); the weight is the number of targets. Logits that tensor parallelism left split
    along the vocabulary stay so; a subclass that computes the loss itself is given full ones,
    unless it says `split_logits = True`.
    """

    split_logits: ClassVar[bool] = True
    """Whether the loss takes logits that are split along the vocabulary (a DTensor)."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__call__" in vars(cls) and "split_logits" not in vars(cls):
            cls.split_logits = False

    def __call__(
        self, output: Any, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self._targets(batch)
        return cross_entropy_sum(output.logits, targets), (targets != IGNORED).sum()

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Number of targets, int64."""
        if SHIFTED in batch:
            return (batch[SHIFTED] != IGNORED).sum()
        return (batch["labels"][..., 1:] != IGNORED).sum()

    @staticmethod
    def _targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # Shifting the labels, not the logits, leaves the large tensor uncopied.
        return batch[SHIFTED] if SHIFTED in batch else shifted(batch[LABELS])


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies of `logits` [..., vocab], gathered or split along the vocabulary,
    for `targets` [...] int64.
    """
    if isinstance(logits, DTensor):
        return vocab_parallel_cross_entropy(logits, targets, ignored=IGNORED)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


causal_lm_loss = CausalLMLoss()
"""The loss of Hugging Face causal language models."""


@dataclass(frozen=True)
class PerSample:
    """A loss that is a plain mean over samples: `total(output, batch)` returns the sum over the
    samples of a micro-batch, and the weight is the number of samples (dim 0 of the batch's first
    tensor).
    """

    total: Callable[[Any, Any], torch.Tensor]

    def __call__(self, output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return self.total(output, batch), self.weight(batch)

    def weight(self, batch: Any) -> int:
        """Number of samples."""
        return samples(batch)


def per_sample(total: Callable[[Any, Any], torch.Tensor]) -> PerSample:
    """Make a Loss from a function that sums a loss over the samples of a micro-batch, e.g.
    `per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum"))`."""
    return PerSample(total)


@dataclass(frozen=True)
class Weighted:
    """A Loss from two functions: `total(output, batch) -> (sum, weight)` and `weigh(batch) ->
    weight`.
    """

    total: Callable[[Any, Any], tuple[torch.Tensor, Any]]
    weigh: Callable[[Any], Any]

    def __call__(self, output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        return self.total(output, batch)

    def weight(self, batch: Any) -> Any:
        """The weight, from the batch alone."""
        return self.weigh(batch)


def checked_total(found: Any) -> tuple[torch.Tensor, Any]:
    """What a loss returned, if it is (sum, weight)."""
    if (
        isinstance(found, tuple | list)
        and len(found) == 2
        and isinstance(found[0], torch.Tensor)
        and found[0].numel() == 1
    ):
        return found[0], found[1]
    is_mean = isinstance(found, torch.Tensor) or (isinstance(found, tuple) and len(found) == 1)
    given = (
        f"a tensor of shape {tuple(found.shape)}"
        if isinstance(found, torch.Tensor)
        else type(found).__name__
    )
    raise InputError(
        f"loss_fn returned {given}, and train_batch needs (sum of the losses, their number) of a"
        " micro-batch"
        + (
            "; for a plain sum over samples use plait.per_sample(...), and no mean"
            if is_mean
            else ""
        )
    )
