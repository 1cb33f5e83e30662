"""Optimizer that `deepspeed.initialize` returns. `engine.step()` runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from plait.engine.engine import Engine
from plait.engine.optimizer_proxy import OptimizerProxy
from plait.errors import InputError


class DeepSpeedOptimizer(OptimizerProxy):
    """Proxy that does not step: `engine.step()` does."""

    def __init__(self, engine: Engine, drop_gradients: Callable[[], None]) -> None:
        """Create a proxy of an engine's optimizer.

        Args:
            engine: Engine with the optimizer.
            drop_gradients: Drops the gradients of the current step.
        """
        super().__init__(engine)
        self._drop_gradients = drop_gradients

    overflow = OptimizerProxy.step_was_skipped

    @property
    def loss_scale(self) -> float:
        """Factor of the next loss; 1 without float16."""
        return self.engine.sharded.loss_scale

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

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise InputError: states are sharded as the layout says."""
        raise InputError(
            "optimizer.load_state_dict(): call engine.load_checkpoint(folder), which loads every"
            " layout's states"
        )
