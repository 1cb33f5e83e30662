"""Optimizer that `deepspeed.initialize` returns. `engine.step()` runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from plait.engine.engine import Engine
from plait.errors import InputError


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """View of the engine's optimizer. Learning rate schedulers of torch can be built over it."""

    def __init__(self, engine: Engine, drop_gradients: Callable[[], None]) -> None:
        """Create a view of an engine's optimizer.

        Args:
            engine: Engine with the optimizer.
            drop_gradients: Drops the gradients of the current step.
        """
        # The constructor of torch is not called: groups and states are the engine's.
        self._engine = engine
        self._drop_gradients = drop_gradients

    def __getattr__(self, name: str) -> Any:
        # While the object is unpickled, it has no attributes yet.
        if name in ("_engine", "_drop_gradients"):
            raise AttributeError(name)
        return getattr(self._engine.optimizer, name)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the engine."""
        return self._engine.optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Parameter groups of the engine's optimizer."""
        return self._engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the engine's optimizer: the shards of this rank."""
        return self._engine.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Default values of the engine's optimizer."""
        return self._engine.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because of non-finite gradients."""
        return self._engine.global_steps > 0 and not self._engine.was_step_applied()

    @property
    def loss_scale(self) -> float:
        """Factor of the next loss; 1 without float16."""
        return self._engine.sharded.loss_scale

    cur_scale = loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current step. `engine.step()` drops those that it used."""
        self._drop_gradients()

    def step(self, closure: Any = None) -> NoReturn:
        """Raise InputError: it would skip the reduction, the clipping and the loss scale."""
        raise InputError(
            "optimizer.step(): call engine.step(), which reduces, clips and updates at the end of a"
            " step's micro-batches"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the shards of this rank. `engine.save_checkpoint` saves those of all ranks."""
        return self._engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise InputError: states are sharded as the layout says."""
        raise InputError(
            "optimizer.load_state_dict(): call engine.load_checkpoint(folder), which loads every"
            " layout's states"
        )
