"""The arithmetic of a canonical call: while the model runs, its operators are replaced by ones whose bits follow from the numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from plait._torch.operators import TorchDispatchMode, TorchFunctionMode, tree_leaves, without_dispatch_modes
from plait.inference.canonical import sums
from plait.inference.canonical.attention import attention
from plait.inference.canonical.exact_products import slices_of
from plait.inference.canonical.operators import Run, Unknown, replacement
from plait.inference.canonical.plain_attention import PlainAttention
from plait.inference.canonical.products import Products
from plait.parallel.tensor.styles import Region


class Arithmetic:
    """Of one call; of this rank."""

    def __init__(self, model: nn.Module, region: Region | None, *, keeps: bool) -> None:
        """`keeps`: see `Products`."""
        self._region = region
        self._products = Products(model, keeps=keeps)
        self._plain = PlainAttention(model)
        self.unknown: set[str] = set()
        """Operators that the model has used and that may give other bits elsewhere."""
        self._functions: dict[Any, Callable[..., Any]] = {F.linear: self._linear, F.scaled_dot_product_attention: self._attention}
        self._replaced: dict[Any, Run | None] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While the model runs."""
        with ExitStack() as stack:
            if self._region is not None:
                stack.enter_context(self._region.computing_sums(self))
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operators(self))
            yield

    def replaced(self, operator: Any) -> Run | None:
        """What computes in place of an operator."""
        if operator not in self._replaced:
            self._replaced[operator] = replacement(operator, self._products, self._plain)
        return self._replaced[operator]

    def function(self, function: Any) -> Callable[..., Any] | None:
        """What computes in place of a function of torch."""
        return self._functions.get(function)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with without_dispatch_modes():
            found = self._products.linear(x, weight)
            return found if bias is None else found + bias

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p:
            self.unknown.add("dropout in scaled_dot_product_attention")
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        with without_dispatch_modes():
            return attention(query, key, value, attn_mask, causal=is_causal, scale=scale, slices=slices_of(query.dtype))

    def product(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, features: int) -> torch.Tensor:
        """See `Products.product`."""
        with without_dispatch_modes():
            return self._products.product(module, x, weight, group, features)

    def only_one(self, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """See `Products.only_one`."""
        with without_dispatch_modes():
            return self._products.only_one(x, group)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [..., vocabulary] in float32, of float64 logits in float64."""
    return sums.log_softmax(logits.double()).to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


class _Functions(TorchFunctionMode):
    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        run = self._arithmetic.function(function)
        return (function if run is None or _has_no_values(args, kwargs) else run)(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        run = self._arithmetic.replaced(operator)
        if run is None or _has_no_values(args, kwargs):
            return operator(*args, **(kwargs or {}))
        try:
            return run(*args, **(kwargs or {}))
        except Unknown as unknown:
            # Every rank runs on, so that none of them waits for one that has stopped.
            self._arithmetic.unknown.add(str(unknown))
            return unknown.found[0] if unknown.found else operator(*args, **(kwargs or {}))


def _has_no_values(args: Any, kwargs: Any) -> bool:
    """Whether only shapes are computed: a pipeline's cut is checked with a copy of the model on meta, whose own modes have to see all."""
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs)))
