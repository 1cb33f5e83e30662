"""The optimizer as a script sees it: the engine's, which `engine.step()` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from plait.engine.engine import Engine
from plait.errors import InputError


class EngineOptimizer(torch.optim.Optimizer):
    """Groups and states are the engine's optimizer's. A schedule of torch may be built over it."""

    def __init__(self, engine: Engine, drop: Callable[[], None]) -> None:
        """`drop`: of the gradients."""
        # and no more: everything else is the engine's optimizer's
        self._engine, self._drop = (engine, drop)

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "_drop"):
            raise AttributeError(name)
        return getattr(self._engine.optimizer, name)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The engine's."""
        return self._engine.optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Of the engine's optimizer."""
        return self._engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Of the engine's optimizer: parts of it, on this rank."""
        return self._engine.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Of the engine's optimizer."""
        return self._engine.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because its gradients were not finite."""
        return self._engine.global_steps > 0 and not self._engine.was_step_applied()

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 without float16."""
        return self._engine.sharded.loss_scale

    cur_scale = loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step so far; `engine.step()` has dropped those that it used."""
        self._drop()

    def step(self, closure: Any = None) -> NoReturn:
        """Refused: it would update without the reduction, the clipping and the loss scale."""
        raise InputError(
            "optimizer.step(): call engine.step(), which reduces, clips and updates at the end of a"
            " step's micro-batches"
        )

    def state_dict(self) -> dict[str, Any]:
        """Of the engine's optimizer: this rank's part. `engine.save_checkpoint` keeps all of it."""
        return self._engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refused: states are parts, cut as the layout says."""
        raise InputError(
            "optimizer.load_state_dict(): call engine.load_checkpoint(folder), which loads every"
            " layout's states"
        )
