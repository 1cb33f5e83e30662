"""Tiled forward of a module: one tile of tokens at a time, recomputed in the backward.

Only the input of the module is saved. All other activations exist for one tile at a time. The tiles
of a call are nodes of one autograd graph. A parameter's gradient is therefore accumulated once, as
the sum over the tiles, and hooks around the module gather its parameters once for all tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_parameters
from plait.comm.collectives import shard_range
from plait.parallel.activations.selective import recompute_everything
from plait.parallel.tensor.styles import SEQUENCE
from plait.shards import shard_size

Weights = dict[nn.Module, dict[str, torch.Tensor]]
"""Tensors by the module that owns them, and by their name in the module."""


@dataclass(frozen=True)
class Tiles:
    """Replaces the forward of a module whose arguments and output have one row per token."""

    module: nn.Module
    original: Callable[..., torch.Tensor]
    """Original forward of the module."""
    tokens: int
    """Tokens of a tile, in all rows of the batch together."""
    scattered: ProcessGroup | None = None
    """Group whose ranks get all tokens of the sequence, and return their shard of them, or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute tensors [.., tokens, width] to one such tensor, in tiles."""
        names = [*([None] * len(args)), *kwargs]
        values = [*args, *kwargs.values()]
        if self.scattered is None:
            tiles = self._split(values)
        else:
            tiles = self._split_by_rank(values, self.scattered)
        # A single tile would only be recomputed.
        if len(tiles) == 1:
            return self.original(*args, **kwargs)

        def compute(*tile: torch.Tensor, weights: Weights) -> torch.Tensor:
            positional = []
            named = {}
            for name, value in zip(names, tile, strict=True):
                if name is None:
                    positional.append(value)
                else:
                    named[name] = value
            # A surrounding recompute must not keep results of operators inside of a tile.
            with recompute_everything(), _replace_weights(weights):
                return self.original(*positional, **named)

        # The tiles hold the weights of the forward, because the module may have others when a tile
        # is computed again.
        outputs = []
        weights = _local_weights(self.module)
        if torch.is_grad_enabled():
            tile_weights = _weights_for_tiles(weights, len(tiles))
            for tile, weights in zip(tiles, tile_weights, strict=True):
                run = partial(compute, weights=weights)
                outputs.append(checkpoint(run, *tile, use_reentrant=False, preserve_rng_state=True))
        else:
            outputs = [compute(*tile, weights=weights) for tile in tiles]

        if self.scattered is None:
            return torch.cat(outputs, values[0].ndim - 2)
        _, shard_length = shard_range(values[0].shape[SEQUENCE], self.scattered)
        return torch.cat(outputs, SEQUENCE).narrow(SEQUENCE, 0, shard_length)

    def _split(self, values: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        dim = values[0].ndim - 2
        rows = max(1, values[0].shape[:dim].numel())
        row_tokens = max(1, self.tokens // rows)
        return list(zip(*(value.split(row_tokens, dim) for value in values), strict=True))

    def _split_by_rank(
        self, values: Sequence[torch.Tensor], group: ProcessGroup
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return tiles with equally many tokens of each rank's shard, in the order of the ranks.

        Padding at the end belongs to no shard.
        """
        (hidden,) = values
        ranks = group.size()
        batch, length, width = hidden.shape
        size = shard_size(length, ranks)
        # [batch, length, width] -> [batch, ranks, size, width]
        padded = F.pad(hidden, (0, 0, 0, ranks * size - length))
        by_rank = padded.view(batch, ranks, size, width)
        tiles = by_rank.split(max(1, self.tokens // (batch * ranks)), 2)
        return [(tile.flatten(1, 2),) for tile in tiles]


def _local_weights(module: nn.Module) -> Weights:
    """Return the tensors that the module computes with now, this rank's parts of them.

    The module has others in the backward, when each tile is computed again.
    """
    weights: Weights = {}
    for owner in module.modules():
        names = [name for name, parameter in own_parameters(owner).items() if parameter is not None]
        names += [name for name, value in vars(owner).items() if isinstance(value, torch.Tensor)]
        if names:
            weights[owner] = {name: local_tensor(getattr(owner, name)) for name in names}
    return weights


@contextmanager
def _replace_weights(weights: Weights) -> Iterator[None]:
    replaced: list[tuple[Any, dict[str, Any]]] = []
    try:
        for owner, tensors in weights.items():
            namespace: Any
            for namespace in (own_parameters(owner), vars(owner)):
                entries = {name: tensor for name, tensor in tensors.items() if name in namespace}
                replaced.append((namespace, {name: namespace[name] for name in entries}))
                namespace.update(entries)
        yield
    finally:
        for namespace, values in replaced:
            namespace.update(values)


def _weights_for_tiles(weights: Weights, count: int) -> Iterator[Weights]:
    """Yield the weights for each of `count` tiles.

    Gradients of 16-bit weights are added in float32, where autograd would round every partial sum.
    """
    sums = {
        id(tensor): _GradientAccumulator(count)
        for tensors in weights.values()
        for tensor in tensors.values()
    }

    def tile_weight(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and tensor.itemsize < 4:
            view: torch.Tensor = _TileWeight.apply(tensor, sums[id(tensor)])
            return view
        return tensor

    for _ in range(count):
        yield {
            owner: {name: tile_weight(tensor) for name, tensor in tensors.items()}
            for owner, tensors in weights.items()
        }


class _GradientAccumulator:
    """Sum of the gradients of a weight from all tiles, in float32."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the sum in the gradient's dtype with the last gradient, and None before it."""
        wide = gradient.float()
        if self._total is None:
            total = wide
        else:
            total = self._total.add_(wide)
        self._total = total
        self._missing -= 1
        if self._missing:
            return None
        self._total = None
        return total.to(gradient.dtype)


class _TileWeight(torch.autograd.Function):
    """View of a weight for one tile, whose gradients a `_GradientAccumulator` adds."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, total: _GradientAccumulator) -> torch.Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.total.add(gradient), None
