"""Optimizer for the Trainer, its schedules and its callbacks, which steps the engine."""

from __future__ import annotations

from typing import Any

import torch

from plait.engine.engine import Engine
from plait.engine.optimizer_proxy import OptimizerProxy


class EngineOptimizerProxy(OptimizerProxy):
    """Proxy whose `step` reduces gradients, clips and updates.

    Attributes:
        norm: Norm of the gradients of the coming step, which `step` writes.
    """

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.norm = torch.zeros((), dtype=torch.float64)

    def new_norm(self) -> torch.Tensor:
        """Return a tensor that `step` will fill with the gradient norm before clipping.

        It is 0-dimensional, float64, on the CPU.
        """
        self.norm = torch.zeros((), dtype=torch.float64)
        return self.norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End the engine's step. Collective."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        self.norm.fill_(self.engine.get_global_grad_norm())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step has dropped the gradients."""
