"""Tiled MLP: the widest activations of a block exist for a tile of tokens at a time, however long
the sequence is.

An MLP computes each token from itself, so its tokens may be computed in tiles, and a tile again in
the backward. Only the settings are here; which modules can be cut is in `model.mlps`, and the
computation in `tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.model.mlps import TokenModules, find_mlps
from plait.model.plans import TensorPlan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.compile import Compile
from plait.parallel.experts.dispatch import Dispatch
from plait.parallel.hooks import StepHook
from plait.parallel.technique import Context, Parts, Technique
from plait.parallel.tensor.styles import Region
from plait.parallel.tiles.tiles import Tiles

_FIELD = "parallel.mlp_tile_tokens"


class TiledMLP(Technique):
    """How many tokens of an MLP are computed at the same time."""

    tokens: int = 0
    """Of all rows of a micro-batch together, and on a rank; 0: all."""

    def check(self, context: Context) -> TokenModules | None:
        """The modules that are computed in tiles; None where none are, or the model is not known.
        Raises ConfigError or ModelError.
        """
        if not self.tokens:
            return None
        if context.chosen(Compile).enabled:
            rule = (
                "compile.enabled is true, and what a compiled block recomputes is decided by the"
                " compiler"
            )
            raise ConfigError(
                Problem(_FIELD, self.tokens, rule, "use 0, or compile.enabled = false")
            )
        return None if context.model is None else self.modules(context.model, context.blocks)

    def modules(self, model: nn.Module, blocks: Sequence[str]) -> TokenModules | None:
        """Of a model that is not split yet; None where none are cut. Raises ModelError."""
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
        """Replace the forward of the modules that this rank has."""
        found = parts.noted(TokenModules)
        if found is None:
            return parts
        region = parts.noted(Region)
        plan = parts.noted(TensorPlan)
        sharded = (
            plan.regions
            if plan is not None and region is not None and region.sequence_parallel
            else ()
        )
        here = dict(parts.model.named_modules())
        for name in (*found.mlps, *found.experts):
            module = here.get(name)  # another stage of the pipeline has the others
            if module is None:
                continue
            group = region.group if region is not None and name in sharded else None
            if isinstance(module.forward, Dispatch):
                module.forward = replace(
                    module.forward, original=Tiles(module, module.forward.original, self.tokens)
                )
            else:
                module.forward = Tiles(module, module.forward, self.tokens, group)
        return parts

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """What brings the modules' own forward back."""
        return (
            [
                TiledModules(
                    [
                        module
                        for module in parts.model.modules()
                        if isinstance(module.forward, Tiles)
                    ]
                )
            ]
            if self.tokens
            else []
        )

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Nothing: what blocks keep is in the measured activations, which `recompute` writes down,
        and a tile sends nothing again.
        """
        return ledger


class TiledModules(StepHook):
    """Modules whose forward was replaced."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def release(self) -> None:
        """They have their own again."""
        for module in self.modules:
            tiles = module.forward
            assert isinstance(tiles, Tiles)
            module.forward = tiles.original
        self.modules = ()
