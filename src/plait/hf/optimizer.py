"""The optimizer as the Trainer, its schedules and its callbacks see it: the engine's, whose step
ends the engine's.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.engine.engine import Engine


class EngineOptimizer(torch.optim.Optimizer):
    """Groups and states are the engine's optimizer's; `step` reduces, clips and updates."""

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # and no more: everything else is the engine's optimizer's
        self.norm = torch.zeros((), dtype=torch.float64)
        """Of the step that comes, written by `step`."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The engine's."""
        return self.engine.optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Of the engine's optimizer."""
        return self.engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Of the engine's optimizer: parts of it, on this rank."""
        return self.engine.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Of the engine's optimizer."""
        return self.engine.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Of the engine's optimizer: this rank's part. A checkpoint keeps all of it."""
        return self.engine.optimizer.state_dict()

    def new_norm(self) -> torch.Tensor:
        """A tensor that `step` fills with the norm of the gradients before clipping;
        0-dimensional.
        """
        self.norm = torch.zeros((), dtype=torch.float64)
        return self.norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End the engine's step. Collective."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        self.norm.fill_(self.engine.get_global_grad_norm())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The step has dropped the gradients."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step updated nothing, because its gradients were not finite."""
        return self.engine.global_steps > 0 and not self.engine.was_step_applied()
