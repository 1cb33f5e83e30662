"""Tensors: local shards of DTensors, storages, versions, and records of `torch.save`.

Patched behaviour: `sum_before_reading` and `keep_uneven_gradients_split` change torch for the rest
of the process, and `around_shape_inference` changes it inside a block. `on_resize` replaces
`torch.UntypedStorage.resize_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

from plait._torch.operators import replaced

_READ = torch.ops.aten._local_scalar_dense.default
_propagator: Any = ShardingPropagator
_tensor_strategies: Any = _tensor_ops
_NEW_EMPTY_STRIDED = torch.ops.aten.new_empty_strided.default
rebuilt_tensor = _rebuild_tensor_v2
"""Function that torch's pickles name to build a tensor.

Its arguments are storage, offset, size, stride, requires_grad and hooks.
"""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor. Return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_window(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices of the global tensor, one per dimension, that this rank stores.

    If tensor parallelism has split a dimension, `fully_shard` splits the shard again. torch
    describes this as `_StridedShard` on an outer mesh dimension, which is applied last. Every split
    follows the rule of `torch.chunk`, so the shard is always one rectangle.
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
    """Return (mesh dimension, tensor dimension) of every split, in the order of application.

    `local_window` explains the order.
    """
    splits = []
    for axis, p in enumerate(tensor.placements):
        if isinstance(p, Shard | _StridedShard):
            splits.append((isinstance(p, _StridedShard), axis, p.dim))
    return [(axis, dim) for _, axis, dim in sorted(splits)]


def sum_before_reading() -> None:
    """Sum a DTensor with `Partial` placements before `float()`, `.item()` or `bool()` reads it.

    Other operators sum such a tensor. torch 2.13 reads the addend of this rank instead (pytorch
    issue 166638), so an optimizer that reads the norm of a sharded parameter would get a different
    number on every rank. The change applies to all DTensors of the process. Reading such a tensor
    becomes a collective over the ranks of its mesh.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_READ] = _read


def _read(operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    if any(placement.is_partial() for placement in tensor.placements):
        summed = [Replicate() if p.is_partial() else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=summed)
    return operator(tensor.to_local())


def keep_uneven_gradients_split() -> None:
    """Shard the gradient of an unevenly sharded parameter as the parameter is sharded.

    Autograd copies a gradient into memory that the operator `new_empty_strided` allocates. In
    torch 2.11 the result of that operator is replicated if the shards differ in size, because torch
    derives the strides of a shard from the number of ranks and not from its shape. The gradient
    would be gathered in every backward, and code that combines the local shards of a parameter and
    of its gradient would fail. Later releases derive the strides from the shape.

    The change applies to all DTensors of the process.
    """
    is_even = getattr(_tensor_strategies, "is_tensor_evenly_shardable", _counts_as_even)
    if is_even is _counts_as_even:
        # Either a later release, which does not have the function, or patched already.
        return
    _tensor_strategies.is_tensor_evenly_shardable = _counts_as_even
    adjust = _propagator._adjust_shape_and_stride_args

    def adjust_to_shard(propagator: Any, meta: Any, schema: Any, spec: Any) -> Any:
        adjusted = adjust(propagator, meta, schema, spec)
        if schema.op is _NEW_EMPTY_STRIDED:
            like, shape, _, *rest = adjusted.args_schema
            adjusted.args_schema = (like, shape, _dense_stride(shape, meta.stride), *rest)
        return adjusted

    _propagator._adjust_shape_and_stride_args = adjust_to_shard


def _counts_as_even(*_: object) -> bool:
    return True


def _dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions are ordered as those of `like`."""
    stride = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def forget_meshes() -> None:
    """Clear torch's caches of the placements that operators of DTensors return.

    torch looks up an entry by the shape of the mesh, but the entry refers to the mesh of its first
    call. After the process groups of that mesh were destroyed, DTensors of another mesh with the
    same shape would still be gathered over them.
    """
    # `torch.distributed.tensor.debug` has a function for this, but its import includes the compiler
    # and costs 0.7 s in every process.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


@contextmanager
def around_shape_inference(make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter the context `make()` whenever torch infers the global shape of a DTensor's operator.

    To infer it, torch runs the operator on fake tensors of the global shapes. Code that counts
    operators would count these calls too.
    """
    propagate = _propagator._propagate_tensor_meta_non_cached

    def propagate_in_context(propagator: Any, schema: Any) -> Any:
        with make():
            return propagate(propagator, schema)

    with replaced(_propagator, "_propagate_tensor_meta_non_cached", propagate_in_context):
        yield


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it exists.

    Fake storages have no address, so the number is that of torch's storage object.
    """
    return int(storage._cdata)


def memory_key(tensor: torch.Tensor) -> int:
    """Return the `storage_id` of a plain tensor. No dispatch mode sees the call."""
    return storage_id(tensor.untyped_storage())


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory, fake tensors included.

    Args:
        tensor: A DTensor stands for its local tensor.
    """
    return storage_id(_local_storage(tensor))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of the local tensors of `tensors`."""
    sizes = {storage_key(tensor): _local_storage(tensor).nbytes() for tensor in tensors}
    return sum(sizes.values())


def _local_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor.detach()).untyped_storage()


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, which every in-place operation increments."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return True if autograd treats the tensor as a view of another one."""
    return tensor._is_view()


@contextmanager
def on_resize(notify: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `notify` with every storage that is resized inside the block.

    Resizing a storage is not an operator, so dispatch modes do not see it.
    """
    resize: Any = torch.UntypedStorage.resize_

    def resize_and_notify(storage: torch.UntypedStorage, size: int) -> Any:
        resized = resize(storage, size)
        notify(storage)
        return resized

    with replaced(torch.UntypedStorage, "resize_", resize_and_notify):
        yield


def records_of(path: Path) -> list[str]:
    """Return the names of the records in a file of `torch.save`, as `torch.load` reads them.

    `zipfile` reads archives differently. A crafted file can therefore have one content for
    `zipfile` and another one for `torch.load`.

    Raises:
        RuntimeError: The file was not written by `torch.save`.
    """
    names: list[str] = torch._C.PyTorchFileReader(str(path)).get_all_records()
    return names
