"""torch.compile, block by block and in place: one small graph that all equal blocks share, and
parameter names stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.technique import Context, Parts, Technique


class Compile(Technique):
    """Compile every block, or the whole model where it has none."""

    enabled: bool = False
    """Off by default: on a CPU the first step takes tens of seconds."""
    backend: str = "inductor"
    """A backend name that torch.compile knows."""
    mode: str | None = None
    """torch.compile's mode, e.g. `max-autotune`."""

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Compile in place; the forward of a block becomes its compiled form."""
        if not self.enabled:
            return parts
        targets = [parts.model.get_submodule(name) for name in parts.blocks] or [parts.model]
        for module in targets:
            module.compile(backend=self.backend, mode=self.mode)
        return parts

    def check(self, context: Context) -> None:
        """Raise ConfigError for a backend or a mode that torch does not have. Compiles nothing."""
        if not self.enabled:
            return
        both: dict[str, Any] = {"backend": self.backend, "mode": self.mode}
        for name, settings in (("backend", {"backend": self.backend}), ("mode", both)):
            try:
                torch.compile(nn.Identity(), **settings)
            except Exception as error:  # each backend refuses in its own way
                first = next(iter(str(error).splitlines()), "") or type(error).__name__
                raise ConfigError(
                    Problem(
                        f"compile.{name}",
                        settings[name],
                        f"torch refuses it: {first}",
                        "correct it",
                    )
                ) from error

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Compilation holds no state and sends nothing."""
        return ledger
