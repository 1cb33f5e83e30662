"""The products with weights of a block in the order of their computation, and which of them a block
keeps that keeps every second one.

As `parallel.activations.selective` counts them: routed experts are computed by torch's grouped
product, which is none of those that it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.planner.architecture import Architecture
from plait.planner.hardware import Numbers

_FUSED_QUERIES = (
    "gpt2",
    "gpt_bigcode",
    "codegen",
    "bloom",
    "mpt",
    "phi3",
    "gpt_neox",
    "falcon",
    "persimmon",
)
"""Families with one product for queries, keys and values."""
_ROTARY = ("phi3", "gpt_neox", "persimmon", "falcon")
"""Those of them that turn queries and keys after it."""
_FUSED_GATES = ("phi3", "glm", "glm4")
"""Families with one product for gate and up."""


@dataclass(frozen=True)
class Product:
    """[tokens, inner] x [inner, columns]; without columns there is none."""

    inner: Numbers
    columns: Numbers
    kept: Numbers
    """1 where every second is kept and this is one of them."""


@dataclass(frozen=True)
class Products:
    """Of a block."""

    attention: tuple[Product, ...]
    dense: tuple[Product, ...]
    """Of an MLP without experts: gate, up, down."""
    shared: tuple[Product, ...]
    """Of an MLP with experts: the router, and the shared experts' gate, up and down."""


def products_of(model: Architecture) -> Products:
    """Of every model of an Architecture."""
    kind = np.asarray(model.model_type)
    gated = np.asarray(model.gated) > 0
    fused = np.isin(kind, _FUSED_QUERIES)
    fused_gate = np.isin(kind, _FUSED_GATES)
    compressed, *others = model.products_of_attention
    (inner, queries), keys, values, output = others
    whole = queries + np.where(fused, keys[1] + values[1], 0)
    alone = [(part[0], np.where(fused, 0, part[1])) for part in (keys, values)]
    attention = _alternating([compressed, (inner, whole), *alone, output], 0)
    before = sum(np.asarray(one.columns) > 0 for one in attention)

    def mlp(width: Numbers) -> list[tuple[Numbers, Numbers]]:
        gate = np.where(gated & ~fused_gate, width, 0)
        return [
            (model.hidden, gate),
            (model.hidden, np.where(fused_gate, 2 * width, width)),
            (width, np.where(width > 0, model.hidden, 0)),
        ]

    router = (model.hidden, model.experts)
    return Products(
        attention,
        _alternating(mlp(np.asarray(model.ffn)), before),
        _alternating([router, *mlp(np.asarray(model.shared_ffn))], before),
    )


def turns_fused(model: Architecture) -> Numbers:
    """Whether queries and keys are made anew from one product with the values, which is kept beside
    them.
    """
    return np.isin(np.asarray(model.model_type), _ROTARY)


def _alternating(sizes: list[tuple[Numbers, Numbers]], before: Numbers) -> tuple[Product, ...]:
    """The first, third, fifth ... of those that there are is kept, counted on from the number
    `before`.
    """
    found = []
    for inner, columns in sizes:
        before = before + (np.asarray(columns) > 0)
        found.append(Product(inner, columns, np.where(before % 2 == 1, 1, 0)))
    return tuple(found)


def again_share(products: tuple[Product, ...], *, without_last: Numbers = 0) -> Numbers:
    """Share of the FLOPs of `products` that is computed again where every second is kept;
    `without_last` 1 leaves the last out, which no backward needs.
    """
    *_, last = products
    sizes = [one.inner * one.columns for one in products]
    again = sum(size * (1 - one.kept) for size, one in zip(sizes, products, strict=True))
    left_out = without_last * last.inner * last.columns * (1 - last.kept)
    return (again - left_out) / np.maximum(sum(sizes), 1)


def kept_columns(products: tuple[Product, ...]) -> Numbers:
    """Elements a token of the results of `products` that are kept."""
    return sum(one.columns * one.kept for one in products)
