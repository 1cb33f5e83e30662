"""Compression of the communication between data-parallel ranks.

The technique holds the scheme, or the candidates among which the first steps choose. The technique
that reduces selects the compressed collectives together with all others (`collective_selection`).
"""

from __future__ import annotations

from plait.cluster.mesh import Mesh
from plait.model.facts import ModelFacts
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.data.residuals import CompressedUnits, Residuals
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique


class Compression(Technique):
    """Compression of gradients and gathered parameters."""

    scheme: Scheme = Scheme()
    """Scheme that is used from the first step."""
    candidates: tuple[Scheme, ...] = ()
    """Candidates for the first steps, the least lossy first (see `parallel.data.autotune`).
    """

    @property
    def gradients(self) -> bool:
        """True if gradients are compressed, or may be once the first steps have chosen a scheme."""
        return self.scheme.gradients or bool(self.candidates)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that may be used."""
        return (self.scheme, *self.candidates)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Store the settings for the technique that reduces gradients."""
        return parts.with_shard(compression=self.scheme, compression_candidates=self.candidates)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hooks that select the compression and that keep its state between steps."""
        if not self.gradients:
            return []
        units = CompressedUnits()
        if parts.shard_collectives is not None:
            units = parts.shard_collectives.compressors
        residuals = Residuals(parts.reducer, units, device=mesh.device)
        autotuner = parts.compression_autotuner
        if autotuner is None:
            return [residuals]
        return [autotuner, residuals]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Store the scheme in the ledger, for the technique that accounts for messages."""
        return ledger.with_(scheme=self.scheme)
