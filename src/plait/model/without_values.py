"""One operator on tensors of which only some have values: computed where all do, by shape on `meta`
where one does not.

Where a shape would follow from values that are not known, all elements count as chosen. Knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait._torch.operators import schema_of, tree_flatten, tree_leaves, tree_map

_aten = torch.ops.aten
_CHOOSES = frozenset(
    {
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_dim.default,
        _aten.unique_consecutive.default,
    }
)
"""Shapes of their results follow from values."""
_INDEXES = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
    }
)


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
    """The result, and whether values were looked at: None for no, False for a yes or no, True for a
    number or a choice of elements.

    `known`: all tensors have values. They are computed with where no result has more than `limit`
    elements. `shapes` keeps what operators were found to return.
    """
    if func is _aten._local_scalar_dense.default:
        (tensor,) = args
        if known:
            return func(tensor), tensor.dtype != torch.bool
        return torch.zeros((), dtype=tensor.dtype).item(), tensor.dtype != torch.bool
    if func is _aten.equal.default:
        return (func(*args) if known else True), False
    if func in _CHOOSES:
        return (func(*args, **kwargs) if known else _all_chosen(func, args)), True
    read = None
    if func in _INDEXES:
        args, masks = _without_masks(args, has_value)
        read = True if masks else None
    if known:
        found = shapes.of(func, args, kwargs) if not schema_of(func).is_mutable else ()
        if all(
            leaf.numel() <= limit for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)
        ):
            return func(*args, **_on("cpu", kwargs)), read
        return found, read
    return shapes.of(func, args, kwargs), read


class Shapes:
    """What operators return, by shape. Kept, since torch takes a millisecond to find one, and the
    blocks of a model ask for the same.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result on `meta`. A tensor elsewhere that is written to is returned as the same
        object.
        """
        schema = schema_of(func)
        if schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns):
            return _on_meta(func, args, kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        # With their types, since 1, 1.0 and True are equal and give results of three dtypes.
        key = (
            func,
            structure,
            tuple(
                _described(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
                for leaf in leaves
            ),
        )
        try:
            found = self._kept.get(key)
        except TypeError:  # an argument that cannot be a key
            return _on_meta(func, args, kwargs)
        if found is None:
            result = _on_meta(func, args, kwargs)
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if all(leaf.device.type == "meta" and leaf.storage_offset() == 0 for leaf in made):
                self._kept[key] = tree_map(
                    lambda leaf: _Described(leaf) if isinstance(leaf, torch.Tensor) else leaf,
                    result,
                )
            return result
        return tree_map(lambda leaf: leaf.again() if isinstance(leaf, _Described) else leaf, found)


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
    )


class _Described:
    """A result to be made again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype

    def again(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    same: dict[int, torch.Tensor] = {}

    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type == "meta":
            return leaf
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        same[id(made)] = leaf
        return made

    moved = tree_map(on_meta, (args, kwargs))  # held, so that no id is used twice
    result = func(*moved[0], **_on("meta", moved[1]))
    return tree_map(lambda leaf: same.get(id(leaf), leaf), result)


def _on(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {"device": torch.device(device)} if kwargs.get("device") is not None else {}
    if kwargs.get("pin_memory"):
        changed["pin_memory"] = False  # type: ignore[assignment]
    return {**kwargs, **changed}


def _all_chosen(func: Any, args: Any) -> Any:
    if func is _aten.nonzero.default:
        return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64, device="meta")
    if func is _aten.masked_select.default:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return torch.empty(shape.numel(), dtype=args[0].dtype, device="meta")
    raise NotImplementedError(f"{func} of values that are not known")


def _without_masks(args: Any, has_value: Callable[[torch.Tensor], bool]) -> tuple[Any, bool]:
    """The arguments of an indexing operator with masks as the indices of their true elements; of
    all where their values are not known.
    """
    indices = []
    masks = False
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
            continue
        masks = True
        if has_value(index):
            indices += list(_aten.nonzero.default(index).unbind(1))
        else:
            indices += [
                torch.empty(index.numel(), dtype=torch.int64, device="meta")
                for _ in range(index.ndim)
            ]
    return (args[0], indices, *args[2:]), masks
