"""Recovery of a sharded model after an exception in its forward or backward.

torch has had `FSDPModule.reset_iter_state` since 2.13. `reset_pass` does the same for earlier
releases. The reset also drops results of earlier micro-batches: partial reductions in 2.13 and
2.14, and all gradients since 2.15. `GradientSnapshot` preserves them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from plait._torch.units import parameter_groups, sharded_modules


class GradientSnapshot:
    """Gradients of a sharded model at the time of construction, reduced and unreduced.

    Args:
        model: The sharded root. Its units are read, and not changed before `restore`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = sharded_modules(model)
        self._groups = [group for module in modules for group in parameter_groups(module)]
        self._partial = [group._partial_reduce_output for group in self._groups]
        self._layouts = [dict(_partial_layout(group)) for group in self._groups]
        self._gradients = [
            (parameter, parameter.grad)
            for group in self._groups
            for p in group.fsdp_params
            for parameter in (p.sharded_param, getattr(p, "_unsharded_param", None))
            if parameter is not None
        ]

    def restore(self) -> None:
        """Assign the gradients to their parameters and the partial reductions to their units."""
        for group, partial, layout in zip(self._groups, self._partial, self._layouts, strict=True):
            group._partial_reduce_output = partial
            _partial_layout(group).update(layout)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _partial_layout(group: Any) -> dict[Any, tuple[int, int]]:
    """Return the position of each parameter in a partial reduction.

    Before torch 2.15 the positions never change, and torch does not record them.
    """
    return getattr(group, "_partial_reduce_output_layout", {})


def reset_pass(root: Any) -> None:
    """Reset a sharded root as `reset_iter_state` does since torch 2.13.

    Args:
        root: FSDP state of the root module, as torch 2.11 and 2.12 have it.
    """
    stream = root._device_handle.current_stream()
    context = root._comm_ctx
    reductions = _take_reductions(context)
    # Collectives may still use these buffers on other streams, and dropping them frees the memory.
    for state in (context.all_gather_state, *reductions):
        if state is not None:
            _wait_for(stream, state.event)
    context.all_gather_state = None
    context.post_forward_order.clear()

    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
    for module in sharded_modules(root._modules[0]):
        for group in parameter_groups(module):
            _reset_group(group, stream)

    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _take_reductions(context: Any) -> list[Any]:
    """Remove and return the reduce-scatters whose inputs are still referenced.

    torch 2.11 keeps at most one, 2.12 keeps a list.
    """
    if hasattr(context, "reduce_scatter_states"):
        reductions = list(context.reduce_scatter_states)
        context.reduce_scatter_states.clear()
        return reductions

    reductions = [context.reduce_scatter_state]
    context.reduce_scatter_state = None
    return reductions


def _reset_group(group: Any, stream: Any) -> None:
    """Wait for a unit's collectives and reshard its parameters. Its gradients are not changed."""
    all_gather = group._all_gather_result
    if all_gather is not None:
        _wait_for(stream, all_gather.all_gather_event)
        if isinstance(all_gather.all_gather_work, dist.Work):
            all_gather.all_gather_work.wait()
        group._all_gather_result = None

    _wait_for(stream, group._post_reduce_event)
    group._post_reduce_event = None
    if group._all_reduce_state is not None:
        _wait_for(stream, group._all_reduce_state.event)
        group._all_reduce_state = None

    # Later all-gathers read the shards that an earlier resharding has written on another stream.
    group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._reshard_after_forward_event = None

    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def _wait_for(stream: Any, event: torch.Event | None) -> None:
    if event is not None:
        stream.wait_event(event)
