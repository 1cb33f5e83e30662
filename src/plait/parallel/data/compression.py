"""Compressed communication between data-parallel ranks: which scheme, or which of several the first
steps may choose.

The collectives are chosen with all others (`collective_selection`), by the technique that reduces;
here is what can be set, and what stays from step to step.
"""

from __future__ import annotations

from plait.cluster.mesh import Mesh
from plait.model.facts import ModelFacts
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.data.autotune import CompressionAutotuner
from plait.parallel.data.reducer import Reducer
from plait.parallel.data.residuals import CompressedUnits, Residuals
from plait.parallel.hooks import StepHook
from plait.parallel.technique import Parts, Technique


class Compression(Technique):
    """What is compressed."""

    scheme: Scheme = Scheme()
    """From the first step on."""
    candidates: tuple[Scheme, ...] = ()
    """From which the first steps may select one, the least lossy first (see
    `parallel.data.autotune`).
    """

    @property
    def gradients(self) -> bool:
        """Whether gradients are compressed, from the first step or perhaps after the first
        steps.
        """
        return self.scheme.gradients or bool(self.candidates)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All that may be used."""
        return (self.scheme, *self.candidates)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Leave it for the technique that reduces."""
        return parts.with_notes(self)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """The steps that decide, where that is open, and what compressed collectives carry."""
        if not self.gradients:
            return []
        autotuner = parts.noted(CompressionAutotuner)
        units = parts.noted(CompressedUnits)
        residuals = Residuals(
            parts.noted(Reducer), CompressedUnits() if units is None else units, device=mesh.device
        )
        return [residuals] if autotuner is None else [autotuner, residuals]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Leave it for the technique that prices messages."""
        return ledger.with_(scheme=self.scheme)
