"""Base of the optimizers that stand for an engine's optimizer."""

from __future__ import annotations

from typing import Any

import torch

from plait.engine.engine import Engine


class OptimizerProxy(torch.optim.Optimizer):
    """Proxy of an engine's optimizer, over which LR schedulers of torch can be built.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        # The constructor of torch is not called: groups and states are the engine's.
        self.engine = engine

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the engine."""
        return self.engine.optimizer

    def __getattr__(self, name: str) -> Any:
        # While the object is unpickled, it has no attributes yet.
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
        """Default values of the engine's optimizer."""
        return self.engine.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because its gradients were not finite."""
        return self.engine.global_steps > 0 and not self.engine.was_step_applied()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state. A checkpoint stores all of it."""
        return self.engine.optimizer.state_dict()
