"""`deepspeed.utils`: full values of a parameter, its gradient and its optimizer states, which ranks
hold in parts; messages; a loader.

The functions of a parameter are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.held import found, refuse_in_step
from plait.compat.deepspeed.loaders import RepeatingLoader
from plait.compat.deepspeed.messages import log_dist, logger
from plait.compat.deepspeed.parts import full, write
from plait.compat.deepspeed.refused import UTILS, missing
from plait.errors import InputError
from plait.parallel.data.reducer import Reducer

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing("deepspeed.utils", name, UTILS)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The master weight, a copy, full; float32, or float64 where the parameter is."""
    value = full(found(param)[1])
    return value.float() if value.dtype.itemsize < 4 else value


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Give the master weight a full value, the same on every rank. Between steps."""
    engine, own = found(param)
    refuse_in_step(engine, "safe_set_full_fp32_param")
    write(own, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient of the step, full: the mean over micro-batches and ranks, without the loss
    scale, before clipping. None where there is none. Between the backward of a step's last
    micro-batch and `engine.step()`; raises InputError between other micro-batches.
    """
    engine, own = found(param)
    gradient = _reduced(engine, own, "safe_get_full_grad")
    return full(gradient) / engine.plait.sharded.loss_scale if gradient is not None else None


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Give the gradient of the step a full value, the same on every rank, as `safe_get_full_grad`
    returns it. When that does; raises InputError where the parameter has no gradient.
    """
    engine, own = found(param)
    gradient = _reduced(engine, own, "safe_set_full_grad")
    if gradient is None:
        raise InputError(
            f"safe_set_full_grad: a parameter of shape {tuple(own.shape)} has no gradient; set it"
            " after a backward that uses it"
        )
    write(gradient, value * engine.plait.sharded.loss_scale)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """A state (`exp_avg`, `exp_avg_sq`, `momentum_buffer`), a copy, full. Raises InputError where
    the optimizer has none of that name.
    """
    return full(_state(*found(param), optim_state_key, "safe_get_full_optimizer_state"))


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Give a state a full value, the same on every rank. Raises InputError where the optimizer has
    none of that name.
    """
    write(_state(*found(param), optim_state_key, "safe_set_full_optimizer_state"), value)


def _state(engine: DeepSpeedEngine, own: nn.Parameter, key: str, call: str) -> torch.Tensor:
    states = engine.plait.optimizer.state.get(own, {})
    value = states.get(key)
    if not isinstance(value, torch.Tensor):
        known = ", ".join(states) or "none before its first step"
        raise InputError(f"{call}({key!r}): the optimizer has {known}")
    return value


def _reduced(engine: DeepSpeedEngine, own: nn.Parameter, call: str) -> torch.Tensor | None:
    """The gradient of a full step as this rank holds it, with the loss scale."""
    if not engine.plait.sharded.guard.backwards:
        return None
    if not engine.is_reduced:
        raise InputError(
            f"{call}: gradients are reduced in the backward of a step's last micro-batch; ask after"
            " that"
        )
    if engine.plait.mesh.layout.tp > 1:
        raise InputError(
            f"{call}: with parallel.tp > 1 gradients are complete inside of engine.step() only"
        )
    reducer = engine.plait.hooks.of(Reducer)
    if reducer is not None:
        reducer.finish_reduction()  # which engine.step() does not repeat
    return own.grad
