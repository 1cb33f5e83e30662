"""Torch's operators during a canonical call: which of them give an element the same bits whatever is beside it, and what takes the place
of the others. One that is not known is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait._torch.operators import operator_name, schema_of, tree_flatten, tree_leaves, tree_unflatten
from plait.inference.canonical import sums
from plait.inference.canonical.elementwise import elementwise
from plait.inference.canonical.plain_attention import PlainAttention
from plait.inference.canonical.products import Products

ROUNDED_ONCE = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
        *("where", "masked_fill", "sign", "floor", "ceil", "round", "trunc", "isnan", "isinf", "logical_not", "logical_and"),
        *("logical_or", "eq", "ne", "lt", "le", "gt", "ge", "fill"),
    }
)
"""Functions of single elements that every kernel rounds to the nearest number, or does not round."""
UNCHANGED = frozenset(
    {
        *("copy_", "fill_", "zero_", "masked_fill_", "lift_fresh", "_local_scalar_dense", "equal", "cat", "stack", "repeat"),
        *("embedding", "gather", "index", "index_select", "masked_select", "take_along_dim", "amax", "amin", "argmax", "max", "min"),
        *(
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
            "zeros",
            "zeros_like",
            "new_zeros",
            "ones",
            "ones_like",
        ),
        *("new_ones", "full", "full_like", "new_full", "scalar_tensor", "arange", "constant_pad_nd", "tril", "triu", "flip", "roll"),
        *("split_with_sizes_copy", "_foreach_copy_", "_unsafe_view", "_reshape_copy", "resize_", "set_", "_pin_memory", "is_pinned"),
        *("record_stream", "all", "any", "sort", "topk"),
    }
)
"""Others whose results are elements of what they read, or numbers that are given."""
_MOVES = ("fsdp", "c10d", "c10d_functional", "_c10d_functional", "prim", "profiler")
"""Namespaces of operators that move tensors, except for what adds those of several ranks."""
_REDUCE = ("allreduce", "all_reduce", "reduce_scatter", "reduce_")
Run = Callable[..., Any]


class Unknown(Exception):
    """An operator, or a use of one, whose bits may follow from more than its element."""

    def __init__(self, what: str, *found: Any) -> None:
        """`found`: what it gave, where it has run."""
        super().__init__(what)
        self.found = found


def replacement(operator: Any, products: Products, attention: PlainAttention) -> Run | None:
    """What computes in place of an operator; None where it stays. What is returned may raise Unknown."""
    name = operator_name(operator)
    if operator.namespace in _MOVES:
        return _refused(operator) if operator.namespace != "fsdp" and any(part in name for part in _REDUCE) else None
    if operator.namespace != "aten":
        return _refused(operator)
    own = _own(products, attention).get(name)
    if own is not None:
        return own(operator)
    if name in UNCHANGED or _is_view(operator):
        return None
    if torch.Tag.pointwise in operator.tags:
        return _of_elements(operator, name)
    return _refused(operator)


def is_floating(value: Any) -> bool:
    """Whether floating-point numbers are among what a call takes or gives."""
    return any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in tree_leaves(value))


def _is_view(operator: Any) -> bool:
    returns = schema_of(operator).returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _refused(operator: Any) -> Run:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = operator(*args, **kwargs)
        if is_floating((args, kwargs, found)):
            raise Unknown(str(operator), found)
        return found

    return run


def _of_elements(operator: Any, name: str) -> Run | None:
    in_place = name.endswith("_")
    exact = name.removesuffix("_") in ROUNDED_ONCE or name.startswith("bitwise_")

    def run(*args: Any, **kwargs: Any) -> Any:
        if (exact and kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None) or not is_floating((args, kwargs)):
            return operator(*args, **kwargs)
        if kwargs.get("out") is not None:
            raise Unknown(f"{operator} with out=")
        leaves, spec = tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        places = places or [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def piece(*tensors: torch.Tensor) -> torch.Tensor:
            filled = list(leaves)
            for at, tensor in zip(places, tensors, strict=True):
                filled[at] = tensor
            again, named = tree_unflatten(filled, spec)
            found: torch.Tensor = operator(*again, **named)
            return found

        found = elementwise(piece, [leaves[at] for at in places])
        return args[0].copy_(found) if in_place else found

    return run


def _own(products: Products, attention: PlainAttention) -> Mapping[str, Callable[[Any], Run]]:
    def mm(operator: Any) -> Run:
        def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            if not (products.is_parameter(right) or products.is_parameter(left)):
                raise Unknown(f"{operator} of two tensors that are no parameters")
            return products.linear(left, right.mT)

        return run

    def addmm(operator: Any) -> Run:
        def run(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
            if beta != 1 or alpha != 1:
                raise Unknown(f"{operator} with beta or alpha")
            return mm(operator)(left, right) + bias

        return run

    def bmm(operator: Any) -> Run:
        def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return product_of(operator, left, right).to(left.dtype)

        return run

    def baddbmm(operator: Any) -> Run:
        def run(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
            return (product_of(operator, left, right) * alpha + x.double() * beta).to(left.dtype)

        return run

    def product_of(operator: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = attention.product(left, right)
        if found is None:
            raise Unknown(f"{operator}, a product outside of linear layers and attention")
        return found

    def softmax(operator: Any) -> Run:
        weights = _along_last(operator, sums.softmax)

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            found: torch.Tensor = weights(*args, **kwargs)
            attention.softmax(found)
            return found

        return run

    def copy(operator: Any) -> Run:
        def run(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            found: torch.Tensor = operator(x, **kwargs)
            attention.copied(x, found)
            return found

        return run

    return {
        "mm": mm,
        "addmm": addmm,
        "bmm": bmm,
        "baddbmm": baddbmm,
        "_to_copy": copy,
        "clone": copy,
        "native_layer_norm": lambda _: _layer_norm,
        "_fused_rms_norm": lambda _: _rms_norm,
        "mean": lambda operator: _reduced(operator, sums.mean),
        "sum": lambda operator: _reduced(operator, sums.tree_sum),
        "_softmax": softmax,
        "_safe_softmax": softmax,
        "_log_softmax": lambda operator: _along_last(operator, sums.log_softmax),
    }


def _reduced(operator: Any, total: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if not x.is_floating_point():
            found: torch.Tensor = operator(x, *(() if dim is None else (dim, keepdim)), dtype=dtype)
            return found
        if dim is None or [at % x.ndim for at in dim] != [x.ndim - 1]:
            raise Unknown(f"{operator} along other dimensions than the last")
        found = total(x.double()).to(dtype or x.dtype)
        return found if keepdim else found[..., 0]

    return run


def _along_last(operator: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(x: torch.Tensor, dim: int, half_to_float: bool | torch.dtype | None = False) -> torch.Tensor:
        if dim % x.ndim != x.ndim - 1:
            raise Unknown(f"{operator} along another dimension than the last")
        wide = half_to_float if isinstance(half_to_float, torch.dtype) else torch.float32 if half_to_float else x.dtype
        return function(x.double()).to(wide)

    return run


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.double().reshape(*x.shape[: x.ndim - len(shape)], math.prod(shape))
    center, spread = sums.mean(rows), torch.sqrt(sums.variance(rows) + eps)
    found = ((rows - center) / spread).reshape(x.shape)
    found = found if weight is None else found * weight.double()
    found = found if bias is None else found + bias.double()
    outer = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    return found.to(x.dtype), center.view(outer).to(x.dtype), (1 / spread).view(outer).to(x.dtype)


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.double().reshape(*x.shape[: x.ndim - len(shape)], math.prod(shape))
    spread = torch.sqrt(sums.mean(rows * rows) + (torch.finfo(x.dtype).eps if eps is None else eps))
    found = (rows / spread).reshape(x.shape)
    found = found if weight is None else found * weight.double()
    outer = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    return found.to(x.dtype), (1 / spread).view(outer).to(x.dtype)
