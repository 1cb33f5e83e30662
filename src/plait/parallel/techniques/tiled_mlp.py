"""Tiled MLP: the widest activations of a block exist for only one tile of tokens at a time.

An MLP computes each token independently, so its tokens may be computed in tiles, and each tile is
recomputed in the backward. This bounds the memory for any length of the sequence. `parallel.mlps`
finds the modules that can be tiled.

Only the input of such a module is saved. The tiles of a call are nodes of one autograd graph. A
parameter's gradient is therefore accumulated once, as the sum over the tiles, and hooks around the
module gather its parameters once for all tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from plait._torch.modules import direct_parameters
from plait._torch.tensors import local_tensor
from plait.cluster.layout import shard_size
from plait.cluster.mesh import Mesh
from plait.comm.collectives import shard_range
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations.selective import recompute_everything
from plait.parallel.experts.dispatch import Dispatch
from plait.parallel.hooks import StepHook
from plait.parallel.mlps import TokenModules, find_mlps
from plait.parallel.parts import Parts, Plans
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.tensor.styles import SEQUENCE

_FIELD = "parallel.mlp_tile_tokens"


class TiledMLP(Technique):
    """Settings of tiled MLPs."""

    tokens: int = 0
    """Tokens of a tile on a rank, in all rows of a micro-batch together. 0: nothing is tiled."""

    def check(self, context: TechniqueContext) -> Plans | None:
        """Find the modules that are computed in tiles.

        Returns:
            The plan of these modules, or None if `tokens` is 0 or the context has no model.

        Raises:
            ConfigError: Compilation is enabled, which is not supported.
            ModelError: See `modules`.
        """
        if not self.tokens:
            return None
        if context.technique(Compile).enabled:
            rule = (
                "compile.enabled is true, and the compiler decides what a compiled block recomputes"
            )
            raise ConfigError(
                Problem(_FIELD, self.tokens, rule, "use 0, or compile.enabled = false")
            )
        if context.model is None:
            return None
        return Plans(tiled=self.modules(context.model, context.blocks))

    def modules(self, model: nn.Module, blocks: Sequence[str]) -> TokenModules | None:
        """Return the modules of an unsplit model that are computed in tiles.

        The result is None if `tokens` is 0.

        Raises:
            ModelError: The model has no blocks, or no module that can be tiled.
        """
        if not self.tokens:
            return None
        setting = f"{_FIELD} = {self.tokens}"
        if not blocks:
            raise ModelError(
                f"{setting}: the model has no repeated blocks; name some with parallel.blocks, or"
                " use 0"
            )
        return find_mlps(model, blocks, setting=setting)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Replace the forward of each tiled module on this rank."""
        token_modules = parts.plans.tiled
        if token_modules is None:
            return parts
        region = parts.region
        plan = parts.plans.tensor
        # Modules that gather the tokens of all ranks, and return this rank's shard of the output.
        sequence_sharded: Sequence[str] = ()
        if plan is not None and region is not None and region.sequence_parallel:
            sequence_sharded = plan.regions
        modules = dict(parts.model.named_modules())
        for name in (*token_modules.mlps, *token_modules.experts):
            module = modules.get(name)
            if module is None:
                # On another pipeline stage.
                continue

            group = None
            if region is not None and name in sequence_sharded:
                group = region.group
            if isinstance(module.forward, Dispatch):
                module.forward = replace(
                    module.forward, original=Tiles(module, module.forward.original, self.tokens)
                )
            else:
                module.forward = Tiles(module, module.forward, self.tokens, group)
        return parts

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook that restores the original forwards."""
        if not self.tokens:
            return []
        modules = [m for m in parts.model.modules() if isinstance(m.forward, Tiles)]
        return [TiledModules(modules)]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Return the ledger unchanged.

        `Recompute.account` adds the measured activations, tiles included. Tiles cause no traffic.
        """
        return ledger


class TiledModules(StepHook):
    """Hook that restores the forwards of tiled modules when the model is released."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def release(self) -> None:
        """Restore the original forwards."""
        for module in self.modules:
            tiles = module.forward
            assert isinstance(tiles, Tiles)
            module.forward = tiles.original
        self.modules = ()


Weights = dict[nn.Module, dict[str, torch.Tensor]]
"""Tensors by the module that owns them, and by their name in the module."""


@dataclass(frozen=True)
class Tiles:
    """Tiled forward of a module whose arguments and output have one row per token."""

    module: nn.Module
    original: Callable[..., torch.Tensor]
    """Original forward of the module."""
    tokens: int
    """Tokens of a tile, in all rows of the batch together."""
    shard_group: ProcessGroup | None = None
    """Group whose ranks receive the full sequence and return their shard of it, or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the output [..., tokens, width] from arguments of the same form, in tiles."""
        names = [*([None] * len(args)), *kwargs]
        values = [*args, *kwargs.values()]
        if self.shard_group is None:
            tiles = self._split(values)
        else:
            tiles = self._split_by_rank(values, self.shard_group)
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
            # A surrounding recompute must not keep results of operators inside a tile.
            with recompute_everything(), _replace_weights(weights):
                return self.original(*positional, **named)

        # The tiles hold the weights of the forward, because the module may have other weights when
        # a tile is recomputed.
        outputs = []
        weights = _local_weights(self.module)
        if torch.is_grad_enabled():
            tile_weights = _weights_for_tiles(weights, len(tiles))
            for tile, weights in zip(tiles, tile_weights, strict=True):
                run = partial(compute, weights=weights)
                outputs.append(checkpoint(run, *tile, use_reentrant=False, preserve_rng_state=True))
        else:
            outputs = [compute(*tile, weights=weights) for tile in tiles]

        if self.shard_group is None:
            return torch.cat(outputs, values[0].ndim - 2)
        _, shard_length = shard_range(values[0].shape[SEQUENCE], self.shard_group)
        return torch.cat(outputs, SEQUENCE).narrow(SEQUENCE, 0, shard_length)

    def _split(self, values: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        dim = values[0].ndim - 2
        rows = max(1, values[0].shape[:dim].numel())
        row_tokens = max(1, self.tokens // rows)
        return list(zip(*(value.split(row_tokens, dim) for value in values), strict=True))

    def _split_by_rank(
        self, values: Sequence[torch.Tensor], group: ProcessGroup
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return tiles that have equally many tokens of every rank's shard.

        The tokens of a tile are in rank order. Padding is added at the end of the sequence.
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
    """Return the local tensors of the parameters and tensor attributes of a module.

    A tile is recomputed with these tensors, because the module may have other tensors in the
    backward.
    """
    weights: Weights = {}
    for owner in module.modules():
        names = [
            name for name, parameter in direct_parameters(owner).items() if parameter is not None
        ]
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
            for namespace in (direct_parameters(owner), vars(owner)):
                entries = {name: tensor for name, tensor in tensors.items() if name in namespace}
                replaced.append((namespace, {name: namespace[name] for name in entries}))
                namespace.update(entries)
        yield
    finally:
        for namespace, values in replaced:
            namespace.update(values)


def _weights_for_tiles(weights: Weights, count: int) -> Iterator[Weights]:
    """Yield the weights for each of `count` tiles.

    Gradients of 16-bit weights are summed in float32. Autograd would round every partial sum to 16
    bits.
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
        """Add a gradient. After the last one, return the sum in the dtype of the gradients.

        The result is None as long as gradients are missing.
        """
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
    """View of a weight for one tile. A `_GradientAccumulator` sums the gradients of all views."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, total: _GradientAccumulator) -> torch.Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.total.add(gradient), None
