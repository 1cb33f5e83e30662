"""Access to this rank's shard of a DTensor, and patched behaviour of DTensor.

torch is changed by `sum_before_reading`, `keep_uneven_gradients_split`, `forget_meshes` and
`around_shape_inference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

_READ = torch.ops.aten._local_scalar_dense.default
_propagator: Any = ShardingPropagator
_tensor_strategies: Any = _tensor_ops
_NEW_EMPTY_STRIDED = torch.ops.aten.new_empty_strided.default


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_window(tensor: DTensor) -> tuple[slice, ...]:
    """Which slice of the global tensor this rank holds.

    `fully_shard` over an already split dimension splits the shard again; torch writes that as
    `_StridedShard` on an outer mesh dimension, which is applied last. Shards are torch.chunk's, so
    the result is one rectangle.
    """
    starts = [0] * tensor.ndim
    sizes = list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, dim in shard_order(tensor):
        chunk = -(-sizes[dim] // tensor.device_mesh.size(axis))
        offset = min(coordinate[axis] * chunk, sizes[dim])
        starts[dim] += offset
        sizes[dim] = min(chunk, sizes[dim] - offset)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def shard_order(tensor: DTensor) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of every split, in the order in which they are applied
    (see `local_window`).
    """
    splits = [
        (isinstance(p, _StridedShard), axis, p.dim)
        for axis, p in enumerate(tensor.placements)
        if isinstance(p, Shard | _StridedShard)
    ]
    return [(axis, dim) for _, axis, dim in sorted(splits)]


def sum_before_reading() -> None:
    """Let `float(tensor)`, `.item()` and `bool(tensor)` of a DTensor that holds this rank's part of
    a sum give the sum, as every other operator does. torch 2.13 gives the part (pytorch issue
    166638), so an optimizer that reads a norm of a shard would compute something else on every
    rank. For all DTensors of the process; collective over the ranks of the tensor that is read.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_READ] = _read


def _read(operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    if any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
        )
    return operator(tensor.to_local())


def keep_uneven_gradients_split() -> None:
    """Shard the gradient of an unevenly sharded parameter as the parameter is sharded.

    Autograd copies a gradient into memory that `new_empty_strided` allocates. In torch 2.11 the
    result of that operator is replicated if the shards differ in size, because torch derives the
    strides of a shard from the number of ranks and not from its shape. The gradient would be
    gathered in every backward, and code that combines the local shards of a parameter and of its
    gradient would fail. Later releases derive the strides from the shape.

    The change applies to all DTensors of the process.
    """
    if (
        getattr(_tensor_strategies, "is_tensor_evenly_shardable", _counts_as_even)
        is _counts_as_even
    ):
        return
    _tensor_strategies.is_tensor_evenly_shardable = _counts_as_even
    adjust = _propagator._adjust_shape_and_stride_args

    def adjust_to_part(propagator: Any, meta: Any, schema: Any, spec: Any) -> Any:
        adjusted = adjust(propagator, meta, schema, spec)
        if schema.op is _NEW_EMPTY_STRIDED:
            like, shape, _, *rest = adjusted.args_schema
            adjusted.args_schema = (like, shape, _dense_stride(shape, meta.stride), *rest)
        return adjusted

    _propagator._adjust_shape_and_stride_args = adjust_to_part


def _counts_as_even(*_: object) -> bool:
    return True


def _dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions have the memory order of the strides
    `like`.
    """
    stride = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def forget_meshes() -> None:
    """Forget what every operator's result looked like. torch keeps it by a mesh's shape, with the
    mesh of the first call: once the groups of that mesh have ended, full tensors of another mesh of
    this shape would be gathered over them.
    """
    # As torch.distributed.tensor.debug does, whose import takes the compiler's with it: 0.7 s of
    # every process that starts.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


@contextmanager
def around_shape_inference(make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter `make()` wherever a DTensor's operator runs on its global shape, on fake tensors, to
    learn the result's shape.
    """

    before = _propagator._propagate_tensor_meta_non_cached

    def infer(propagator: Any, schema: Any) -> Any:
        with make():
            return before(propagator, schema)

    _propagator._propagate_tensor_meta_non_cached = infer
    try:
        yield
    finally:
        _propagator._propagate_tensor_meta_non_cached = before
