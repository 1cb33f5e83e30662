"""Optimizer for the Trainer, its schedules and its callbacks, which steps the engine."""

from __future__ import annotations

from typing import Any

import torch

from plait.engine.engine import Engine


class EngineOptimizerProxy(torch.optim.Optimizer):
    """Proxy of an engine's optimizer.

    Groups and states are those of the engine's optimizer. `step` reduces gradients, clips and
    updates.

    Attributes:
        engine: The engine.
        norm: Norm of the gradients of the coming step, which `step` writes.
    """

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine) -> None:
        # The base class is not initialised: all other attributes are the engine's optimizer's.
        self.engine = engine
        self.norm = torch.zeros((), dtype=torch.float64)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the engine."""
        return self.engine.optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Parameter groups of the engine's optimizer."""
        return self.engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """States of the engine's optimizer on this rank."""
        return self.engine.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Defaults of the engine's optimizer."""
        return self.engine.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state. A checkpoint stores all of it."""
        return self.engine.optimizer.state_dict()

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

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because its gradients were not finite."""
        return self.engine.global_steps > 0 and not self.engine.was_step_applied()
