"""`deepspeed.utils`: full values of sharded parameters, gradients and states, and logging.

The functions that take a parameter are collective: every rank must call them in the same order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.compat.deepspeed.engine import DeepSpeedEngine, require_parameter
from plait.compat.deepspeed.loaders import RepeatingLoader
from plait.compat.deepspeed.refused import UTILS, missing
from plait.compat.deepspeed.saved import full_tensor, refuse_in_step, write_full
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

logger = logging.getLogger("plait.compat.deepspeed")
"""Logger for the script's own messages. Plait logs nothing to it. As in DeepSpeed, messages of
level INFO and above are written to the standard output.
"""
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    # Otherwise a handler of the root logger would write each message a second time.
    logger.propagate = False


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing("deepspeed.utils", name, UTILS)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: Message, to which the rank is added.
        ranks: Ranks that log. If the first entry is -1, all ranks log. Without a process group,
            every process logs.
        level: Level of the message.
    """
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank == -1 or (ranks and (ranks[0] == -1 or rank in ranks)):
        logger.log(level, f"[Rank {rank}] {message}")


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """Return a full copy of the master weight. Collective.

    Returns:
        Float32, or float64 if the parameter has that dtype.
    """
    _, weight = require_parameter(param)
    value = full_tensor(weight)
    # Without master weights the parameter itself may have 16 bits.
    if value.dtype.itemsize < 4:
        return value.float()
    return value


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master weight. Collective.

    Args:
        param: Parameter of the model.
        value: Full value, the same on every rank.

    Raises:
        InputError: The call is between a backward and its step.
    """
    engine, weight = require_parameter(param)
    refuse_in_step(engine.plait, "safe_set_full_fp32_param")
    write_full(weight, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full gradient of the step. Collective.

    It must be called between the backward of a step's last micro-batch and `engine.step()`.

    Returns:
        The mean over micro-batches and ranks, without the loss scale and before clipping. None if
        the parameter has no gradient.

    Raises:
        InputError: The call is at another point of the step.
    """
    engine, weight = require_parameter(param)
    gradient = _reduced_gradient(engine, weight, "safe_get_full_grad")
    if gradient is None:
        return None
    return full_tensor(gradient) / engine.plait.sharded.loss_scale


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient of the step, in the form that `safe_get_full_grad` returns. Collective.

    Args:
        param: Parameter of the model.
        value: Full value, the same on every rank.

    Raises:
        InputError: The parameter has no gradient, or the call is at another point of the step.
    """
    engine, weight = require_parameter(param)
    gradient = _reduced_gradient(engine, weight, "safe_set_full_grad")
    if gradient is None:
        raise InputError(
            f"safe_set_full_grad: a parameter of shape {tuple(weight.shape)} has no gradient; set"
            " it after a backward that uses it"
        )
    # The gradient contains the loss scale until engine.step() removes it.
    write_full(gradient, value * engine.plait.sharded.loss_scale)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """Return a full copy of an optimizer state. Collective.

    Args:
        param: Parameter of the model.
        optim_state_key: Name of the state: `exp_avg`, `exp_avg_sq`, `momentum_buffer`.

    Raises:
        InputError: The optimizer has no state of this name.
    """
    engine, weight = require_parameter(param)
    state = _optimizer_state(engine, weight, optim_state_key, "safe_get_full_optimizer_state")
    return full_tensor(state)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set an optimizer state. Collective.

    Args:
        param: Parameter of the model.
        value: Full value, the same on every rank.
        optim_state_key: Name of the state.

    Raises:
        InputError: The optimizer has no state of this name.
    """
    engine, weight = require_parameter(param)
    state = _optimizer_state(engine, weight, optim_state_key, "safe_set_full_optimizer_state")
    write_full(state, value)


def _optimizer_state(
    engine: DeepSpeedEngine, weight: nn.Parameter, key: str, call: str
) -> torch.Tensor:
    states = engine.plait.optimizer.state.get(weight, {})
    value = states.get(key)
    if not isinstance(value, torch.Tensor):
        remedy = "call it after the first step"
        if states:
            remedy = f"use one of {', '.join(states)}"
        raise InputError(f"{call}({key!r}): the optimizer has no such state; {remedy}")
    return value


def _reduced_gradient(
    engine: DeepSpeedEngine, weight: nn.Parameter, call: str
) -> torch.Tensor | None:
    """Return this rank's shard of the gradient of a full step, multiplied by the loss scale."""
    if not engine.plait.sharded.guard.backwards:
        return None
    if not engine.is_reduced:
        raise InputError(
            f"{call}: gradients are reduced in the backward of a step's last micro-batch; call it"
            " after that backward"
        )
    if engine.plait.mesh.layout.tp > 1:
        raise InputError(
            f"{call}: with parallel.tp > 1 gradients are complete only inside engine.step();"
            " leave the call out, or use parallel.tp = 1"
        )
    reducer = engine.plait.hooks.find(Reducer)
    if reducer is not None:
        # engine.step() does not repeat it.
        reducer.finish_reduction()
    return weight.grad
