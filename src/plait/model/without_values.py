"""Execution of operators when only some of the tensors in their arguments have values.

If all tensors have values, the operator runs. Otherwise only the shapes of its results are
computed, on the meta device. If a shape depends on unknown values, as the result of `nonzero` does,
all elements are assumed to be selected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait._torch.operators import schema_of, tree_flatten, tree_leaves, tree_map

_aten = torch.ops.aten
_VALUE_DEPENDENT_SHAPES = frozenset(
    {
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_dim.default,
        _aten.unique_consecutive.default,
    }
)
"""Operators whose results have shapes that depend on values."""
_INDEXING = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
    }
)
"""Operators that take indices or masks in their second argument."""


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run_without_values(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    *,
    known: bool,
    limit: int,
    has_value: Callable[[torch.Tensor], bool],
    shapes: Shapes,
) -> tuple[Any, bool | None]:
    """Run an operator on values if all are known and the result is small, and else on shapes.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        known: Whether all tensors in the arguments have values.
        limit: Largest number of elements of a result that is computed.
        has_value: Returns whether a tensor has a value.
        shapes: Cache of the shapes of results.

    Returns:
        (result, exposed values). The second is None if the operator has exposed no value to Python,
        False if it has exposed a Boolean, True if it has returned a number or selected elements.
    """
    if func is _aten._local_scalar_dense.default:
        (tensor,) = args
        is_number = tensor.dtype != torch.bool
        if known:
            return func(tensor), is_number
        return torch.zeros((), dtype=tensor.dtype).item(), is_number
    if func is _aten.equal.default:
        return (func(*args) if known else True), False
    if func in _VALUE_DEPENDENT_SHAPES:
        return (func(*args, **kwargs) if known else _select_all(func, args)), True

    read = None
    if func in _INDEXING:
        # A mask selects elements by value, an index tensor does not.
        args, has_masks = _masks_to_indices(args, has_value)
        if has_masks:
            read = True
    if not known:
        return shapes.of(func, args, kwargs), read

    # A mutable operator writes to existing tensors, so it never creates a large result.
    result = shapes.of(func, args, kwargs) if not schema_of(func).is_mutable else ()
    if all(tensor.numel() <= limit for tensor in tensors_of(result)):
        result = func(*args, **_replace_device("cpu", kwargs))
    return result, read


class Shapes:
    """Cache of the results of operators on the meta device.

    torch takes a millisecond to compute a result, and the blocks of a model repeat the same calls.
    """

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}

    def of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator on the meta device.

        A mutated argument is returned as the same object, whatever its device.
        """
        schema = schema_of(func)
        # Results that alias an argument cannot be copied.
        if schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns):
            return _run_on_meta(func, args, kwargs)
        key = _cache_key(func, args, kwargs)
        try:
            cached = self._results.get(key)
        except TypeError:  # an argument is not hashable
            return _run_on_meta(func, args, kwargs)
        if cached is not None:
            return tree_map(_new_on_meta, cached)

        result = _run_on_meta(func, args, kwargs)
        # A copy has a storage of its own, without an offset, on the meta device.
        tensors = tensors_of(result)
        if all(leaf.device.type == "meta" and leaf.storage_offset() == 0 for leaf in tensors):
            self._results[key] = tree_map(_new_on_meta, result)
        return result


def _cache_key(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    leaves, structure = tree_flatten((args, kwargs))
    entries: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            entries.append(_layout_of(leaf))
        else:
            # 1, 1.0 and True are equal, and give results of three dtypes.
            entries.append((type(leaf), leaf))
    return func, structure, tuple(entries)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _new_on_meta(leaf: Any) -> Any:
    """Return a tensor on the meta device with the shape, strides and dtype of another one."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _run_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    originals: dict[int, torch.Tensor] = {}

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type == "meta":
            return leaf
        moved = _new_on_meta(leaf)
        originals[id(moved)] = leaf
        return moved

    # These variables keep all moved tensors alive, so that their ids stay unique.
    moved_args, moved_kwargs = tree_map(to_meta, (args, kwargs))
    result = func(*moved_args, **_replace_device("meta", moved_kwargs))
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)


def _replace_device(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if kwargs.get("device") is not None:
        changed["device"] = torch.device(device)
    if kwargs.get("pin_memory"):
        changed["pin_memory"] = False
    return {**kwargs, **changed}


def _select_all(func: Any, args: Any) -> Any:
    """Return the result of an operator that selects elements as if it selected all of them."""
    if func is _aten.nonzero.default:
        return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64, device="meta")
    if func is _aten.masked_select.default:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return torch.empty(shape.numel(), dtype=args[0].dtype, device="meta")
    raise NotImplementedError(f"{func} needs values that are not known")


def _masks_to_indices(args: Any, has_value: Callable[[torch.Tensor], bool]) -> tuple[Any, bool]:
    """Replace masks in the arguments of an indexing operator with indices of their true elements.

    A mask of unknown values is replaced by as many indices as it has elements.

    Returns:
        (arguments, whether there were masks).
    """
    indices = []
    has_masks = False
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
            continue
        has_masks = True
        if has_value(index):
            indices += list(_aten.nonzero.default(index).unbind(1))
            continue
        for _ in range(index.ndim):
            indices.append(torch.empty(index.numel(), dtype=torch.int64, device="meta"))
    return (args[0], indices, *args[2:]), has_masks
