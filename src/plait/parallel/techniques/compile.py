"""Compilation of each block with torch.compile, in place.

Identical blocks share one compiled graph, and parameter names do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext


class Compile(Technique):
    """Settings of torch.compile for every block, or for the full model if it has no blocks."""

    enabled: bool = False
    """True to compile. The default is False, because compilation delays the first step."""
    backend: str = "inductor"
    """Name of a torch.compile backend."""
    mode: str | None = None
    """Mode of torch.compile, e.g. `max-autotune`, or None for its default."""

    def check(self, context: TechniqueContext) -> None:
        """Check, without compiling, that torch supports the configured backend and mode.

        Raises:
            ConfigError: torch does not support the backend or the mode.
        """
        if not self.enabled:
            return
        # The backend is tested before the mode, so that an error names the right setting.
        backend: dict[str, Any] = {"backend": self.backend}
        backend_and_mode: dict[str, Any] = {"backend": self.backend, "mode": self.mode}
        for name, settings in (("backend", backend), ("mode", backend_and_mode)):
            try:
                torch.compile(nn.Identity(), **settings)
            except Exception as error:  # each backend refuses in its own way
                first = next(iter(str(error).splitlines()), "") or type(error).__name__
                raise ConfigError(
                    Problem(
                        f"compile.{name}",
                        settings[name],
                        f"torch refuses it: {first}",
                        "use a name that torch.compile accepts, or compile.enabled = false",
                    )
                ) from error

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Compile the forward of every block, or of the full model if it has no blocks."""
        if not self.enabled:
            return parts
        targets = [parts.model.get_submodule(name) for name in parts.blocks] or [parts.model]
        for module in targets:
            module.compile(backend=self.backend, mode=self.mode)
        return parts

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Return the ledger unchanged, because compilation adds no state or traffic."""
        return ledger
