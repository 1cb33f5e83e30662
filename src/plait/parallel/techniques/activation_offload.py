"""Technique that moves what the first blocks of a model save for backward to host memory or files.

The setting is a fraction of the blocks and not a switch: copies that overlap with computation take
no extra time, and further copies do. This module holds the settings only. `saved_tensors` decides
which tensors move, `activation_store` stores them, and only `recompute` replaces a block's forward.
If a block is recomputed, its input moves. Results of operators that selective recomputation saves
stay on the device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations.activation_store import DiskStore, HostStore
from plait.parallel.activations.saved_tensors import ActivationStore, OffloadedActivations
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile


class ActivationOffload(Technique):
    """Settings of activation offload: the fraction of the blocks, and the store."""

    fraction: float = 0.0
    """Fraction of a rank's blocks that are offloaded, beginning with its first block."""
    device: Literal["cpu", "disk"] = "cpu"
    """Store: pinned host memory (cpu) or files (disk)."""
    path: str | None = None
    """Folder of the files, with device disk."""

    def blocks(self, count: int) -> int:
        """Return how many of `count` blocks are offloaded."""
        return round(self.fraction * count)

    def check(self, context: TechniqueContext) -> None:
        """Raise ConfigError or ModelError for settings that cannot work or have no effect."""
        if not self.fraction:
            return
        field = "parallel.activation_offload"
        has_model = context.model is not None
        blocks = context.blocks
        if has_model and not blocks:
            raise ModelError(
                f"{field}.fraction = {self.fraction:g}: the model has no repeated blocks; name some"
                " with parallel.blocks"
            )
        if context.device_type == "cpu" and self.device == "cpu":
            rule = "the device is the CPU, whose memory is the host's: a copy there frees nothing"
            raise ConfigError(
                Problem(f"{field}.device", "cpu", rule, 'use "disk" with a path, or fraction 0')
            )
        if has_model and not self.blocks(len(blocks)):
            rule = f"of {len(blocks)} blocks that is less than half of one"
            remedy = f"use {1 / len(blocks):.3g} or more, or 0"
            raise ConfigError(Problem(f"{field}.fraction", self.fraction, rule, remedy))
        if context.chosen(Compile).enabled:
            rule = "what a compiled block saves is decided by the compiler"
            remedy = "use 0, or compile.enabled = false"
            raise ConfigError(Problem(f"{field}.fraction", self.fraction, rule, remedy))

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Create the store, which `Recompute.apply` then gives to the blocks."""
        count = self.blocks(len(parts.blocks))
        if not count:
            return parts
        store: ActivationStore
        if self.device == "cpu":
            store = HostStore(mesh.device)
        else:
            store = DiskStore(Path(self.path or "."), mesh.device)
        return replace(parts, offloaded_activations=OffloadedActivations(store, count))

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook that closes the store."""
        offloaded = parts.offloaded_activations
        return [] if offloaded is None else [offloaded]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Return the ledger unchanged.

        The measured activations contain what blocks put into the store, and `Recompute.account`
        adds them.
        """
        return ledger
