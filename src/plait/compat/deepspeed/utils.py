"""`deepspeed.utils`: full values of a parameter, of its gradient and of its optimizer states, which ranks hold in parts.

All are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

import torch
from torch import nn

from plait.compat.deepspeed.held import found, full, refuse_in_step, write
from plait.errors import InputError
from plait.parallel.data.reducer import Reducer


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The master weight, a copy, full; float32, or float64 where the parameter is."""
    value = full(found(param)[1])
    return value.float() if value.dtype.itemsize < 4 else value


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient of the step, full: the mean over micro-batches and ranks, without the loss scale, before clipping. None where there is
    none. Between the backward of a step's last micro-batch and `engine.step()`; raises InputError between other micro-batches."""
    engine, own = found(param)
    guard = engine.plait.sharded.guard
    if not guard.backwards:
        return None
    if not engine.is_reduced:
        raise InputError("safe_get_full_grad: gradients are reduced in the backward of a step's last micro-batch; ask after that")
    if engine.plait.mesh.layout.tp > 1:
        raise InputError("safe_get_full_grad: with parallel.tp > 1 gradients are complete inside of engine.step() only")
    reducer = engine.plait.hooks.of(Reducer)
    if reducer is not None:
        reducer.finish_reduction()  # which engine.step() does not repeat
    return full(own.grad) / engine.optimizer.loss_scale if own.grad is not None else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """A state (`exp_avg`, `exp_avg_sq`, `momentum_buffer`), a copy, full. Raises InputError where the optimizer has none of that name."""
    engine, own = found(param)
    states = engine.plait.optimizer.state.get(own, {})
    value = states.get(optim_state_key)
    if not isinstance(value, torch.Tensor):
        known = ", ".join(states) or "none before its first step"
        raise InputError(f"safe_get_full_optimizer_state({optim_state_key!r}): the optimizer has {known}")
    return full(value)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Give the master weight a full value, the same on every rank. Between steps."""
    engine, own = found(param)
    refuse_in_step(engine, "safe_set_full_fp32_param")
    write(own, value)
