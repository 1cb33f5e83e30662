"""Activation offload: the first blocks of a model put what they save for backward into host memory
or into files.

A fraction and not a switch: as much as the links carry behind the computation is free, more is not.
Only the settings are here; the move itself is in `saved` (what), `activation_store` (where to) and
`recompute` (the one place that replaces a block's forward). Of a recomputed block it is the input
that moves; the kept results of operators stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations.activation_store import DiskStore, HostStore
from plait.parallel.activations.saved_tensors import OffloadedActivations
from plait.parallel.compile import Compile
from plait.parallel.hooks import StepHook
from plait.parallel.technique import Context, Parts, Technique


class ActivationOffload(Technique):
    """Which blocks, and where to."""

    fraction: float = 0.0
    """The share of a rank's blocks, from the first one on."""
    device: Literal["cpu", "disk"] = "cpu"
    """Pinned host memory, or files."""
    path: str | None = None
    """disk: the folder."""

    def blocks(self, count: int) -> int:
        """How many of `count` blocks."""
        return round(self.fraction * count)

    def check(self, context: Context) -> None:
        """Raise ConfigError or ModelError for what would change nothing or cannot be."""
        if not self.fraction:
            return
        field = "parallel.activation_offload"
        known = context.model is not None
        blocks = context.blocks
        if known and not blocks:
            raise ModelError(
                f"{field}.fraction = {self.fraction:g}: the model has no repeated blocks; name some"
                " with parallel.blocks"
            )
        if context.device_type == "cpu" and self.device == "cpu":
            rule = "the device is the CPU, whose memory is the host's: a copy there frees nothing"
            raise ConfigError(
                Problem(f"{field}.device", "cpu", rule, 'use "disk" with a path, or fraction 0')
            )
        if known and not self.blocks(len(blocks)):
            rule = f"of {len(blocks)} blocks that is less than half of one"
            raise ConfigError(
                Problem(
                    f"{field}.fraction",
                    self.fraction,
                    rule,
                    f"use {1 / len(blocks):.3g} or more, or 0",
                )
            )
        if context.chosen(Compile).enabled:
            rule = "what a compiled block saves is decided by the compiler"
            raise ConfigError(
                Problem(
                    f"{field}.fraction", self.fraction, rule, "use 0, or compile.enabled = false"
                )
            )

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Make the store; `recompute` puts it to use."""
        count = self.blocks(len(parts.blocks))
        if not count:
            return parts
        store = (
            HostStore(mesh.device)
            if self.device == "cpu"
            else DiskStore(Path(self.path or "."), mesh.device)
        )
        return parts.with_notes(OffloadedActivations(store, count))

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """What ends the store."""
        found = parts.noted(OffloadedActivations)
        return [] if found is None else [found]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Nothing: what blocks put into the store is in the measured activations, which `recompute`
        writes down.
        """
        return ledger
