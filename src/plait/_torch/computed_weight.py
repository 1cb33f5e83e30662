"""A weight that is kept in another form than a dense tensor.

`ComputedWeight` is a tensor without a storage: a product with it is computed by `product`, and every other operator gets what `dense`
returns. It is made anew whenever a module's `weight` is read, so it costs nothing while nobody computes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map


class ComputedWeight(torch.Tensor):
    """Of a linear layer: [out, in], or [in, out] where it is `transposed`."""

    dense: Callable[[], torch.Tensor]
    """Returns it as [out, in]."""
    product: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """(x [..., in], bias [out]) to [..., out]."""
    transposed: bool

    @staticmethod
    def __new__(cls, shape: tuple[int, int], like: torch.Tensor, dtype: torch.dtype, **_: Any) -> ComputedWeight:
        """`like` is on the device that it is on."""
        made: ComputedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
        return made

    def __init__(
        self,
        shape: tuple[int, int],
        like: torch.Tensor,
        dtype: torch.dtype,
        *,
        dense: Callable[[], torch.Tensor],
        product: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        transposed: bool = False,
    ) -> None:
        self.dense, self.product, self.transposed = dense, product, transposed
        self._like = like

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ComputedWeight({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[1], cls) and not args[1].transposed:
            return args[1].product(args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
        if func is torch.addmm and isinstance(args[2], cls) and args[2].transposed and not kwargs:
            return args[2].product(args[1], args[0])
        if func in (torch.Tensor.t, torch.t) and isinstance(args[0], cls):
            self = args[0]
            shape = (self.shape[1], self.shape[0])
            return cls(shape, self._like, self.dtype, dense=self.dense, product=self.product, transposed=not self.transposed)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def full(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            return value.dense().t() if value.transposed else value.dense()

        return func(*tree_map(full, args), **tree_map(full, kwargs or {}))
