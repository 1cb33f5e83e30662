"""A module whose tokens are computed a tile at a time, and again in the backward: it keeps its
input, and the rest exists for one tile.

The tiles of a call are nodes of one graph, so that a parameter's gradient arrives once, as their
sum, and whatever gathers parameters around the module does so once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_parameters
from plait.comm.collectives import shard_range
from plait.parallel.activations.selective import keeping_nothing
from plait.parallel.tensor.styles import SEQUENCE
from plait.shards import shard_size

Weights = dict[nn.Module, dict[str, torch.Tensor]]
"""By the module that owns them, and their name there."""


@dataclass(frozen=True)
class Tiles:
    """In the place of the forward of a module whose arguments have one row a token, and whose
    output has too.
    """

    module: nn.Module
    original: Callable[..., torch.Tensor]
    """The module's own."""
    tokens: int
    """Of a tile, in all rows of the batch together."""
    scattered: ProcessGroup | None = None
    """Ranks of which each gets all tokens of the sequence, and returns its shard of them."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tensors [.., tokens, width] to one such tensor."""
        names = [*([None] * len(args)), *kwargs]
        values = [*args, *kwargs.values()]
        cut = self._scattered(values) if self.scattered is not None else self._cut(values)
        if len(cut) == 1:
            return self.original(*args, **kwargs)
        own = _weights(self.module)
        keeps = torch.is_grad_enabled()
        found = []
        for given, weights in zip(
            cut, _for_tiles(own, len(cut)) if keeps else [own] * len(cut), strict=True
        ):

            def run(*pieces: Any, weights: Weights = weights) -> torch.Tensor:
                with keeping_nothing(), _computing_with(weights):
                    positional = [
                        piece for name, piece in zip(names, pieces, strict=True) if name is None
                    ]
                    named = {
                        name: piece
                        for name, piece in zip(names, pieces, strict=True)
                        if name is not None
                    }
                    return self.original(*positional, **named)

            found.append(
                checkpoint(run, *given, use_reentrant=False, preserve_rng_state=True)
                if keeps
                else run(*given)
            )
        if self.scattered is None:
            return torch.cat(found, values[0].ndim - 2)
        return torch.cat(found, SEQUENCE).narrow(
            SEQUENCE, 0, shard_range(values[0].shape[SEQUENCE], self.scattered)[1]
        )

    def _cut(self, values: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        dim = values[0].ndim - 2
        rows = max(1, values[0].shape[:dim].numel())
        return list(
            zip(*(value.split(max(1, self.tokens // rows), dim) for value in values), strict=True)
        )

    def _scattered(self, values: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Every tile has equally many tokens of each rank's shard, in the order of the ranks; what
        is added at the end is in no shard.
        """
        assert self.scattered is not None
        ranks, (hidden,) = self.scattered.size(), values
        batch, length, width = hidden.shape
        each = shard_size(length, ranks)
        by_rank = F.pad(hidden, (0, 0, 0, ranks * each - length)).view(batch, ranks, each, width)
        return [
            (piece.flatten(1, 2),)
            for piece in by_rank.split(max(1, self.tokens // (batch * ranks)), 2)
        ]


def _weights(module: nn.Module) -> Weights:
    """What the module computes with, this rank's parts of it: now, which is not what it finds in
    the backward.
    """
    found: Weights = {}
    for part in module.modules():
        names = [name for name, parameter in own_parameters(part).items() if parameter is not None]
        names += [name for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
        if names:
            found[part] = {name: local_tensor(getattr(part, name)) for name in names}
    return found


@contextmanager
def _computing_with(weights: Weights) -> Iterator[None]:
    before: list[tuple[Any, dict[str, Any]]] = []
    try:
        for part, tensors in weights.items():
            kept: Any
            for kept in (own_parameters(part), vars(part)):
                here = {name: tensor for name, tensor in tensors.items() if name in kept}
                before.append((kept, {name: kept[name] for name in here}))
                kept.update(here)
        yield
    finally:
        for kept, values in before:
            kept.update(values)


def _for_tiles(weights: Weights, count: int) -> Iterator[Weights]:
    """For each of `count` tiles: weights of 16 bits are such that their gradients add up in
    float32, where autograd would round every partial sum.
    """
    sums = {id(tensor): _Sum(count) for tensors in weights.values() for tensor in tensors.values()}
    for _ in range(count):
        yield {
            part: {
                name: (
                    _Part.apply(tensor, sums[id(tensor)])
                    if tensor.requires_grad and tensor.itemsize < 4
                    else tensor
                )
                for name, tensor in tensors.items()
            }
            for part, tensors in weights.items()
        }


class _Sum:
    """Of a weight's gradients from all tiles."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The sum in the gradient's dtype once all are added; None before."""
        wide = gradient.float()
        self._total = wide if self._total is None else self._total.add_(wide)
        self._missing -= 1
        if self._missing:
            return None
        found = self._total
        self._total = None
        return found.to(gradient.dtype)


class _Part(torch.autograd.Function):
    """A weight, as one tile reads it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.total.add(gradient), None
