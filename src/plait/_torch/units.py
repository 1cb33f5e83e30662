"""Units of `fully_shard`: their shards, gathered parameters and unreduced gradients.

A unit is a module on which `fully_shard` was called. torch describes it by parameter groups
(`FSDPParamGroup`), and each of their parameters by an `FSDPParam`.
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
    DefaultAllocMixin as DefaultAllocMixin,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter as DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from plait._torch.tensors import local_tensor

# Before torch 2.15 FSDP stores the sum of gradients in the dtype of the reduction in a separate
# attribute. Since 2.15 `grad` of the gathered parameter has the sum, and the old name is a
# property of the class.
_HAS_SEPARATE_SUM = not hasattr(FSDPParam, "unsharded_accumulated_grad")
ShardShape = tuple[int, int, bool]
"""(dimensions of a parameter, elements of its padded shard, True if it is trainable)."""


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules on which `fully_shard` was called, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups (`FSDPParamGroup`) of one unit."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups

    # torch 2.11 has one group per unit, and none for a unit without parameters.
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]


def all_parameter_groups(model: nn.Module) -> list[Any]:
    """Return the FSDPParamGroup of each unit of a model."""
    return [group for module in sharded_modules(model) for group in parameter_groups(module)]


def sharded_parameters(module: FSDPModule) -> list[Any]:
    """Return torch's record (`FSDPParam`) of each parameter of one unit."""
    return [p for group in parameter_groups(module) for p in group.fsdp_params]


def shard_buffers(module: FSDPModule) -> list[torch.Tensor]:
    """Return the flat buffers with this rank's shards of one unit, padding included."""
    return [p._sharded_param_data for p in sharded_parameters(module)]


def replace_shard_buffers(module: FSDPModule, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the buffers of `shard_buffers`. The parameters stay the same objects.

    Args:
        module: A fully sharded unit.
        make: Function that returns a new buffer with the size and the content of a given one.
    """
    for p in sharded_parameters(module):
        buffer = make(p._sharded_param_data)
        dim = p.fsdp_placement.dim
        p._sharded_param_data = buffer
        # The last ranks have fewer rows than the padded size.
        rows = p.sharded_param._local_tensor.shape[dim]
        padded = buffer.view(p.padded_sharded_param_size)
        p.sharded_param._local_tensor = padded.narrow(dim, 0, rows)


def gathered_shapes(module: FSDPModule) -> list[ShardShape]:
    """Return the shapes of one unit's parameters, in the order of its all-gather."""
    return [_shape_of(p) for p in sharded_parameters(module)]


def reduced_shapes(module: FSDPModule) -> list[ShardShape]:
    """Return the shapes of one unit's parameters, in the order of its reduce-scatter.

    Since torch 2.15 parameters are grouped by the dtype of their gradients (`Tensor.grad_dtype`),
    in the order in which the dtypes appear. Before 2.15 the order is that of the all-gather.
    """
    return [_shape_of(p) for p in _reduction_order(sharded_parameters(module))]


def _reduction_order(parameters: list[Any]) -> list[Any]:
    dtypes = [getattr(p, "sharded_grad_dtype", None) for p in parameters]
    order = sorted(range(len(parameters)), key=lambda index: dtypes.index(dtypes[index]))
    return [parameters[index] for index in order]


def _shape_of(p: Any) -> ShardShape:
    size = p.padded_sharded_param_size
    return len(size), size.numel(), bool(p.sharded_param.requires_grad)


def gathered_parameters(module: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return (sharded, unsharded) pairs of the parameters of a unit that has been gathered before.

    Autograd accumulates gradients into the unsharded parameter. The reduction writes to the
    sharded one.
    """
    gathered: list[tuple[nn.Parameter, nn.Parameter]] = []
    for p in sharded_parameters(module):
        if hasattr(p, "_unsharded_param"):
            gathered.append((p.sharded_param, p._unsharded_param))
    return gathered


def has_unreduced(units: Iterable[FSDPModule]) -> bool:
    """Return whether a unit has micro-batch gradients that are not yet reduced over all ranks."""
    return any(
        group._partial_reduce_output is not None
        or any(map(_unsharded_gradients, group.fsdp_params))
        for unit in units
        for group in parameter_groups(unit)
    )


def drop_gradients(model: nn.Module) -> None:
    """Drop the gradients of all parameters, including unreduced gradients of sharded units."""
    for parameter in model.parameters():
        parameter.grad = None
    for group in all_parameter_groups(model):
        group._partial_reduce_output = None
        for p in group.fsdp_params:
            _drop_gradients_of(p)


def _drop_gradients_of(p: Any) -> None:
    p.sharded_param.grad = None
    if _HAS_SEPARATE_SUM:
        p.unsharded_accumulated_grad = None
    if hasattr(p, "_unsharded_param"):
        p._unsharded_param.grad = None


@torch.no_grad()
def zero_gradients(
    model: nn.Module, parameters: Iterable[torch.Tensor], *, set_to_none: bool
) -> list[nn.Parameter]:
    """Drop or zero the gradients of parameters of sharded units, reduced and unreduced.

    Args:
        model: The root.
        parameters: Shards or gathered parameters. Those of other modules are ignored.
        set_to_none: Whether to drop the gradients instead of filling them with zeros.

    Returns:
        The shards of the parameters.
    """
    requested = set(parameters)
    zeroed: set[nn.Parameter] = set()
    for group in all_parameter_groups(model):
        for p in group.fsdp_params:
            gathered = getattr(p, "_unsharded_param", None)
            if p.sharded_param not in requested and gathered not in requested:
                continue
            zeroed.add(p.sharded_param)
            if set_to_none:
                _drop_gradients_of(p)
                continue
            if p.sharded_param.grad is not None:
                p.sharded_param.grad.zero_()
            for gradient in _unsharded_gradients(p):
                gradient.zero_()
        if group._partial_reduce_output is not None:
            _zero_partial_reduction(group, zeroed, set_to_none=set_to_none)
    return list(zeroed)


def _zero_partial_reduction(group: Any, zeroed: set[nn.Parameter], *, set_to_none: bool) -> None:
    """Drop or zero the gradients that a group has reduced over some of the ranks.

    The gradients of a group share one tensor. Its parameters may belong to several optimizers, so
    the tensor is dropped only when the gradients of all parameters were dropped.
    """
    partial = group._partial_reduce_output
    trainable = [p for p in _reduction_order(group.fsdp_params) if p.sharded_param.requires_grad]
    dropped: set[nn.Parameter] = set()
    if set_to_none:
        # A later reduction adds gradients in place, which raises the version.
        version, dropped_before = getattr(partial, "plait_dropped", (None, dropped))
        if version == partial._version:
            dropped = dropped_before
        dropped = dropped | zeroed
    if all(p.sharded_param in dropped for p in trainable):
        group._partial_reduce_output = None
        return

    sizes = [p.padded_sharded_param_size.numel() for p in trainable]
    for p, gradient in zip(trainable, partial.split(sizes), strict=True):
        if p.sharded_param in zeroed:
            gradient.zero_()
    partial.plait_dropped = (partial._version, dropped)


def is_gathered(units: Iterable[FSDPModule]) -> bool:
    """Return True if `parameters()` of any unit returns gathered parameters and not shards."""
    return any(group.is_unsharded for unit in units for group in parameter_groups(unit))


def _gathered(model: nn.Module) -> list[Any]:
    gathered: list[Any] = []
    for group in all_parameter_groups(model):
        for p in group.fsdp_params:
            if hasattr(p, "_unsharded_param"):
                gathered.append(p)
    return gathered


def _unsharded_gradients(p: Any) -> list[torch.Tensor]:
    """Return the unreduced gradients in torch's record of a parameter."""
    if not hasattr(p, "_unsharded_param"):
        return []
    gradients = [p._unsharded_param.grad]
    if _HAS_SEPARATE_SUM:
        gradients.append(p.unsharded_accumulated_grad)
    return [gradient for gradient in gradients if gradient is not None]


@contextmanager
def leave_gathered(model: nn.Module) -> Iterator[None]:
    """Make units stay gathered after their forward inside the block.

    The caller reshards them. After the block, units are freed after their forward again.
    """
    # In a forward `reshard` does nothing for a group without this mesh.
    groups = [(group, group.post_forward_mesh_info) for group in all_parameter_groups(model)]
    for group, _ in groups:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, info in groups:
            group.post_forward_mesh_info = info


def unsharded_parameter_bytes(model: nn.Module) -> int:
    """Return the allocated bytes of gathered parameters, padding included.

    Parameters in shared memory are not included: their storages cannot be resized.
    """
    storages = (
        tensor.untyped_storage() for p in _gathered(model) for tensor in p.all_gather_outputs
    )
    return sum(storage.nbytes() for storage in storages if storage.resizable())


def unsharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of gathered parameters, whether allocated or freed."""
    return [
        tensor for p in _gathered(model) for tensor in (*p.all_gather_outputs, p._unsharded_param)
    ]


def unsharded_gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of unreduced gradients, which exist between micro-batches."""
    grads = [grad for p in _gathered(model) for grad in _unsharded_gradients(p)]
    return sum(local_tensor(grad).untyped_storage().nbytes() for grad in grads)


def keep_trainability(model: nn.Module) -> None:
    """Copy changes of `requires_grad` from gathered parameters to their shards.

    A gathered module has other parameter objects than a sharded one. Every gather sets the
    `requires_grad` of the gathered parameters to that of the shards, so a change would be lost.
    """
    for group in all_parameter_groups(model):
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


def wait_for_offloaded_gradients(model: nn.Module) -> None:
    """Keep the reduced gradients of replicas on the device until their copies to the host end.

    With hybrid sharding torch copies them on the stream of the all-reduce, but their memory belongs
    to the stream of the reduce-scatter. Without this function, torch frees the memory at the end of
    a backward before it waits for the copies.
    """
    for group in all_parameter_groups(model):
        group.finalize_backward = _after_copies(group, group.finalize_backward)


def _after_copies(group: Any, finalize: Callable[[], None]) -> Callable[[], None]:
    def wait_and_finalize() -> None:
        for p in group.fsdp_params:
            if p.grad_offload_event is not None:
                p.grad_offload_event.synchronize()
        finalize()

    return wait_and_finalize


def reduce_unused_parameters(model: nn.Module) -> None:
    """Make units reduce zeros for parameters that a backward did not reach.

    Ranks that use different parameters then issue the same collectives.
    """
    for module in sharded_modules(model):
        if not _HAS_SEPARATE_SUM:
            module.set_reduce_scatter_unused_params(True, recurse=False)
            continue
        for group in parameter_groups(module):
            _reduce_every_gradient(group)


def _reduce_every_gradient(group: Any) -> None:
    """Make a group reduce gradients of one dtype for all trainable parameters.

    torch 2.11 and 2.12 reduce no zeros. torch 2.13 and 2.14 reduce zeros of the compute dtype, and
    fail if gradients of earlier micro-batches are stored in the dtype of the reduction.
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
    """Assign zeros to trainable parameters without a gradient.

    All gradients of a group must have one dtype. If an earlier micro-batch has left a sum in the
    dtype of the reduction, all gradients get this dtype.
    """
    gathered = [p for p in parameters if hasattr(p, "_unsharded_param")]
    trainable = [p for p in gathered if p._unsharded_param.requires_grad]
    has_sum = any(p.unsharded_accumulated_grad is not None for p in trainable)
    for p in trainable:
        if not _unsharded_gradients(p):
            p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
        if has_sum and p.unsharded_accumulated_grad is None:
            p.to_accumulated_grad_if_needed()
