"""Units of `fully_shard`, as torch keeps them: their shards, and what they hold gathered or
unreduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter as DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from plait._torch.dtensor import local_tensor

# Before torch 2.15 FSDP stores the sum of gradients in the dtype of the reduction in an attribute
# of its own. Since 2.15 `grad` of the gathered parameter has the sum, and the old name is a
# property of the class.
_HAS_SEPARATE_SUM = not hasattr(FSDPParam, "unsharded_accumulated_grad")


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules on which `fully_shard` was called, in `model.modules()` order."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def parameter_groups(module: FSDPModule) -> list[Any]:
    """What torch gathers and reduces of one fully sharded unit."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups

    # torch 2.11 has one group per unit, and none for a unit without parameters.
    group = state._fsdp_param_group
    return [] if group is None else [group]


def sharded_parameters(module: FSDPModule) -> list[Any]:
    """torch's record of each parameter of one fully sharded unit."""
    return [p for group in parameter_groups(module) for p in group.fsdp_params]


def shard_buffers(module: FSDPModule) -> list[torch.Tensor]:
    """The flat buffers that hold this rank's shards of one fully sharded unit, padding included."""
    return [p._sharded_param_data for p in sharded_parameters(module)]


def replace_shard_buffers(module: FSDPModule, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `make(buffer)`, of the same size and content, in place of every buffer of
    `shard_buffers`; the parameters stay the objects that they are.
    """
    for p in sharded_parameters(module):
        buffer = make(p._sharded_param_data)
        dim = p.fsdp_placement.dim
        p._sharded_param_data = buffer
        p.sharded_param._local_tensor = buffer.view(p.padded_sharded_param_size).narrow(
            dim, 0, p.sharded_param._local_tensor.shape[dim]
        )


ShardShape = tuple[int, int, bool]
"""Dimensions of a parameter, elements of this rank's padded shard of it, and whether it trains."""


def gathered_shapes(module: FSDPModule) -> list[ShardShape]:
    """Return the shapes of one unit's parameters, in the order in which an all-gather sends their
    shards.
    """
    return [_shape_of(p) for p in sharded_parameters(module)]


def reduced_shapes(module: FSDPModule) -> list[ShardShape]:
    """Return the shapes of one unit's parameters, in the order in which a reduce-scatter sends
    gradients.

    Since torch 2.15 parameters are grouped by the dtype of their gradients (`Tensor.grad_dtype`),
    in the order in which the dtypes appear. Before 2.15 the order is that of the all-gather.
    """
    parameters = sharded_parameters(module)
    dtypes = [getattr(p, "sharded_grad_dtype", None) for p in parameters]
    order = sorted(range(len(parameters)), key=lambda index: dtypes.index(dtypes[index]))
    return [_shape_of(parameters[index]) for index in order]


def _shape_of(p: Any) -> ShardShape:
    size = p.padded_sharded_param_size
    return len(size), size.numel(), bool(p.sharded_param.requires_grad)


def gathered_parameters(module: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(sharded, unsharded) pairs of one fully sharded unit, for parameters that were gathered at
    least once.

    Autograd accumulates into the unsharded one; torch then reduces into the sharded one.
    """
    return [
        (p.sharded_param, p._unsharded_param)
        for p in sharded_parameters(module)
        if hasattr(p, "_unsharded_param")
    ]


def has_unreduced(model: nn.Module) -> bool:
    """Whether a unit of a sharded model keeps gradients of micro-batches that were not reduced over
    all ranks.
    """
    groups = [group for module in sharded_modules(model) for group in parameter_groups(module)]
    unsharded = any(_unsharded_gradients(p) for p in _gathered(model))
    return unsharded or any(group._partial_reduce_output is not None for group in groups)


def drop_gradients(model: nn.Module) -> None:
    """Drop the gradients of all parameters, and what units of `fully_shard` keep of micro-batches
    that were not reduced yet.
    """
    for parameter in model.parameters():
        parameter.grad = None
    for module in sharded_modules(model):
        for group in parameter_groups(module):
            group._partial_reduce_output = None
            for held in group.fsdp_params:
                held.sharded_param.grad = None
                if _HAS_SEPARATE_SUM:
                    held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None


def _gathered(model: nn.Module) -> list[Any]:
    return [
        p
        for module in sharded_modules(model)
        for p in sharded_parameters(module)
        if hasattr(p, "_unsharded_param")
    ]


def _unsharded_gradients(p: Any) -> list[torch.Tensor]:
    """Return the gradients of a parameter that are not reduced yet, from torch's record of the
    parameter.
    """
    gradients = [p._unsharded_param.grad]
    if _HAS_SEPARATE_SUM:
        gradients.append(p.unsharded_accumulated_grad)
    return [gradient for gradient in gradients if gradient is not None]


@contextmanager
def kept_gathered(model: nn.Module) -> Iterator[None]:
    """What a forward gathers stays gathered, until the caller reshards it. At the end, units free
    what they freed before.
    """
    groups = [
        (group, group.post_forward_mesh_info)
        for module in sharded_modules(model)
        for group in parameter_groups(module)
    ]
    for group, _ in groups:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, info in groups:
            group.post_forward_mesh_info = info


def unsharded_parameter_bytes(model: nn.Module) -> int:
    """Bytes of gathered (unsharded) parameters that are allocated now, padding included; none for
    those that are read in place.
    """
    storages = (
        tensor.untyped_storage() for p in _gathered(model) for tensor in p.all_gather_outputs
    )
    return sum(storage.nbytes() for storage in storages if storage.resizable())


def unsharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that hold gathered (unsharded) parameters now."""
    return [
        tensor for p in _gathered(model) for tensor in (*p.all_gather_outputs, p._unsharded_param)
    ]


def unsharded_gradient_bytes(model: nn.Module) -> int:
    """Bytes of gradients that are kept unsharded now, between micro-batches."""
    grads = [grad for p in _gathered(model) for grad in _unsharded_gradients(p)]
    return sum(local_tensor(grad).untyped_storage().nbytes() for grad in grads)


def keep_trainability(model: nn.Module) -> None:
    """Make `requires_grad`, set while a unit is gathered, hold when the unit is sharded again.

    A gathered model has other parameters than a sharded one. At every gathering torch gives them
    the `requires_grad` of the shards, so that what was set on the gathered ones would be forgotten.
    """
    for module in sharded_modules(model):
        for group in parameter_groups(module):
            for name in ("_to_sharded", "_to_sharded_post_forward"):
                setattr(group, name, _after_copying_trainability(group, getattr(group, name)))


def _after_copying_trainability(group: Any, shard: Callable[[], None]) -> Callable[[], None]:
    def copy_and_shard() -> None:
        if group.is_unsharded:
            for p in group.fsdp_params:
                if p._unsharded_param.requires_grad != p.sharded_param.requires_grad:
                    p.sharded_param.requires_grad_(p._unsharded_param.requires_grad)
        shard()

    return copy_and_shard


def reduce_unused_parameters(model: nn.Module) -> None:
    """Make units reduce zeros for parameters that a backward did not reach, so that ranks that used
    others issue the same collective.
    """
    for module in sharded_modules(model):
        if not _HAS_SEPARATE_SUM:
            module.set_reduce_scatter_unused_params(True, recurse=False)
            continue
        for group in parameter_groups(module):
            _reduce_every_gradient(group)


def _reduce_every_gradient(group: Any) -> None:
    """Make a group reduce gradients of one dtype for all parameters that train.

    torch 2.11 and 2.12 reduce no zeros. torch 2.13 and 2.14 reduce zeros of the computation's
    dtype, and fail where gradients of earlier micro-batches are kept in the reduction's dtype.
    """
    if getattr(group, "reduce_scatter_unused_params", False):
        return
    group.reduce_scatter_unused_params = True
    post_backward = group.post_backward

    def complete_and_reduce(*unused: Any) -> None:
        if group.reduce_grads:
            _complete_gradients(group.fsdp_params)
        post_backward(*unused)

    group.post_backward = complete_and_reduce


def _complete_gradients(parameters: Iterable[Any]) -> None:
    """Give every trainable parameter a gradient, in the dtype in which the group accumulates
    gradients.
    """
    gathered = [p for p in parameters if hasattr(p, "_unsharded_param")]
    trainable = [p for p in gathered if p._unsharded_param.requires_grad]
    has_sum = any(p.unsharded_accumulated_grad is not None for p in trainable)
    for p in trainable:
        if not _unsharded_gradients(p):
            p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
        if has_sum and p.unsharded_accumulated_grad is None:
            p.to_accumulated_grad_if_needed()
