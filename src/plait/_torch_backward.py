"""Private torch names of a backward pass that runs, and of one that failed; `_torch` has all others. Each has a test in
tests/unit/test_torch_names.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from plait._torch import parameter_groups, sharded_modules


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward pass that is running now has finished. Only callable from inside a backward pass."""
    Variable._execution_engine.queue_callback(callback)


def graph_task() -> int | None:
    """A number of the backward pass that is running now: a backward inside another one (a reentrant checkpoint) has its own. None outside
    of any."""
    task = torch._C._current_graph_task_id()
    return None if task < 0 else task


def drop_gradients(model: nn.Module) -> None:
    """Drop the gradients of all parameters, and what units of `fully_shard` keep of micro-batches that were not reduced yet."""
    for parameter in model.parameters():
        parameter.grad = None
    for module in sharded_modules(model):
        for group in parameter_groups(module):
            group._partial_reduce_output = None
            for held in group.fsdp_params:
                held.sharded_param.grad = held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None


def reset_failed_step(model: nn.Module, *, keep_gradients: bool) -> None:
    """Bring a sharded root back to where it is between two micro-batches, after its forward or backward was left by an exception on all
    ranks: everything sharded, nothing awaited. `keep_gradients`: those of micro-batches before."""
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:
        return
    groups = [group for module in sharded_modules(model) for group in parameter_groups(module)]
    partial = [group._partial_reduce_output for group in groups]
    model.reset_iter_state()
    for group, output in zip(groups, partial, strict=True):
        group._partial_reduce_output = output if keep_gradients else None


def has_gathered(model: nn.Module) -> bool:
    """Whether a unit of a sharded model holds gathered parameters now."""
    return any(not group.is_sharded for module in sharded_modules(model) for group in parameter_groups(module))


def has_unreduced(model: nn.Module) -> bool:
    """Whether a unit of a sharded model keeps gradients of micro-batches that were not reduced over all ranks."""
    groups = [group for module in sharded_modules(model) for group in parameter_groups(module)]
    held = [p for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    kept = any(p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None for p in held)
    return kept or any(group._partial_reduce_output is not None for group in groups)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody asked to see, or to change, a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
