"""Tiled MLP: the widest activations of a block exist for one tile of tokens at a time.

An MLP computes each token from itself, so its tokens may be computed in tiles, and a tile again in
the backward. This bounds the memory for any length of the sequence. `model.mlps` finds the modules
that can be tiled, and `tiles` computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.model.mlps import TokenModules, find_mlps
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.experts.dispatch import Dispatch
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts, Plans
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.tiles.tiles import Tiles

_FIELD = "parallel.mlp_tile_tokens"


class TiledMLP(Technique):
    """Number of tokens of an MLP that are computed at the same time."""

    tokens: int = 0
    """Tokens of a tile on a rank, in all rows of a micro-batch together. 0: all."""

    def check(self, context: TechniqueContext) -> Plans | None:
        """Find the modules that are computed in tiles.

        Returns:
            The modules, or None if there are none or the model is unknown.

        Raises:
            ConfigError: Blocks are compiled.
            ModelError: See `modules`.
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
        """Replace the forward of the modules that this rank has."""
        token_modules = parts.plans.tiled
        if token_modules is None:
            return parts
        region = parts.region
        plan = parts.plans.tensor
        # Modules that gather the tokens of all ranks, and return this rank's shard of them.
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

        The measured activations, which `recompute` accounts for, include the tiles, and tiles send
        nothing more.
        """
        return ledger


class TiledModules(StepHook):
    """Modules whose forward was replaced by `Tiles`."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def release(self) -> None:
        """Restore the original forwards."""
        for module in self.modules:
            tiles = module.forward
            assert isinstance(tiles, Tiles)
            module.forward = tiles.original
        self.modules = ()
