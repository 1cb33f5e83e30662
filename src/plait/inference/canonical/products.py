"""Linear layers as exact products, also where their input's features are split over ranks (a row-parallel layer)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from plait._torch.dtensor import local_tensor
from plait._torch.storage import version_of
from plait.inference.canonical import exact_products as exact

_AT_ONCE = 1 << 22
"""Elements of a result that are computed at once."""


@dataclass(frozen=True)
class _Split:
    """A weight [out, in] as integers."""

    exponents: torch.Tensor
    integers: torch.Tensor
    """[out, slices x in]."""


class Products:
    """Of one call, in which no weight changes."""

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        """`keeps`: parameters stay where they are for the whole call, so what they are split into is kept: 16 bytes an element of two
        slices, 24 of three."""
        self._model, self._keeps = model, keeps
        self._parameters: frozenset[int] = frozenset()
        """Storages, as they were when one was last looked for in vain: a sharded parameter that is gathered has another."""
        self._kept: dict[Hashable, _Split] = {}
        self._last: tuple[torch.Tensor, int, int, _Split] | None = None
        """What the last product read, how often that was written to, the bits, and what it was split into: siblings read the same."""

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the model's parameters, or a view of one."""
        place = tensor.untyped_storage().data_ptr()
        if not self._keeps or place not in self._parameters:
            self._parameters = self._storages()
        return place in self._parameters

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., out] in the dtype of `x` [..., in]; `weight` [out, in]."""
        key = None
        if self._keeps and self.is_parameter(weight):
            key = (weight.data_ptr(), tuple(weight.shape), weight.stride())
        return self._product(x, weight, key, None, weight.shape[1])

    def product(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, features: int) -> torch.Tensor:
        """Of a row-parallel `module`: the sum over `group` of `x` [..., own features] times `weight` [out, own features], of `features` in
        all. Collective."""
        return self._product(x, weight, id(module) if self._keeps else None, group, features)

    def only_one(self, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """The sum over `group` of tensors of which all but one are zero at every place; in place. Collective."""
        dist.all_reduce(x, group=group)
        return x

    def _product(self, x: torch.Tensor, weight: torch.Tensor, key: Hashable, group: ProcessGroup | None, terms: int) -> torch.Tensor:
        bits, slices = exact.bits_of(terms), exact.slices_of(x.dtype)
        right = self._kept.get(key) if key is not None else None
        if right is None:
            values = weight.double()
            exponents = _largest(exact.exponents(values), group)
            right = _Split(exponents, exact.leading_last(exact.split(values, exponents, bits=bits, slices=slices)))
            if key is not None:
                self._kept[key] = right
        rows = x.reshape(-1, x.shape[-1])
        at_once = max(1, _AT_ONCE // max(1, weight.shape[0]))
        found = [x.new_empty(0, weight.shape[0])] if not len(rows) else []
        for start in range(0, len(rows), at_once):
            left = self._left(x, rows, slice(start, start + at_once), bits, group)
            levels = exact.level_sums(left.integers, right.integers, slices=slices)
            if group is not None:
                dist.all_reduce(levels, group=group)
            found.append(exact.rounded(levels, left.exponents, right.exponents, bits=bits).to(x.dtype))
        return (found[0] if len(found) == 1 else torch.cat(found)).view(*x.shape[:-1], weight.shape[0])

    def _left(self, x: torch.Tensor, rows: torch.Tensor, part: slice, bits: int, group: ProcessGroup | None) -> _Split:
        """Some of the rows of `x`."""
        everything = part.stop >= len(rows) and not part.start and group is None
        if everything and self._last is not None and self._last[0] is x and self._last[1:3] == (version_of(x), bits):
            return self._last[3]
        values = rows[part].double()
        exponents = _largest(exact.exponents(values), group)
        left = _Split(exponents, exact.leading_first(exact.split(values, exponents, bits=bits, slices=exact.slices_of(x.dtype))))
        if everything:
            self._last = (x, version_of(x), bits, left)
        return left

    def _storages(self) -> frozenset[int]:
        return frozenset(local_tensor(parameter).untyped_storage().data_ptr() for parameter in self._model.parameters())


def _largest(exponents: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(exponents, op=dist.ReduceOp.MAX, group=group)
    return exponents
