"""Weight products of a block in the order of computation, and which of them recomputation saves.

Recomputation of operators saves every second product, counted like
`parallel.activations.selective`. Routed experts use torch's grouped product, which is never saved.
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
"""Families of _FUSED_QUERIES that apply rotary positions to queries and keys."""
_FUSED_GATES = ("phi3", "glm", "glm4")
"""Families with one product for gate and up projection."""


@dataclass(frozen=True)
class Product:
    """Product [tokens, inner] x [inner, columns]. There is none if `columns` is 0."""

    inner: Numbers
    columns: Numbers
    is_saved: Numbers
    """1 if it is saved when every second product is."""


@dataclass(frozen=True)
class Products:
    """Matrix multiplications of a block with its weights."""

    attention: tuple[Product, ...]
    dense: tuple[Product, ...]
    """Products of an MLP without experts: gate, up, down."""
    shared: tuple[Product, ...]
    """Products of an MLP with experts: router, and gate, up and down of shared experts."""


def products_of(model: Architecture) -> Products:
    """Return the products of the blocks of a model."""
    kind = np.asarray(model.model_type)
    gated = np.asarray(model.gated) > 0
    fused = np.isin(kind, _FUSED_QUERIES)
    fused_gate = np.isin(kind, _FUSED_GATES)
    compressed, *others = model.products_of_attention
    (inner, queries), keys, values, output = others
    fused_columns = queries + np.where(fused, keys[1] + values[1], 0)
    separate = [(sizes[0], np.where(fused, 0, sizes[1])) for sizes in (keys, values)]
    attention = _alternating([compressed, (inner, fused_columns), *separate, output], 0)
    before = sum(np.asarray(product.columns) > 0 for product in attention)

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
    """Return True if rotary positions read queries and keys from the output of a fused product.

    Autograd then saves the fused output in addition to the rotated queries and keys.
    """
    return np.isin(np.asarray(model.model_type), _ROTARY)


def _alternating(sizes: list[tuple[Numbers, Numbers]], before: Numbers) -> tuple[Product, ...]:
    """Return products of which every second existing one is saved.

    Args:
        sizes: (inner, columns) of the products; 0 columns if there is none.
        before: Number of products before them.
    """
    products = []
    for inner, columns in sizes:
        before = before + (np.asarray(columns) > 0)
        products.append(Product(inner, columns, np.where(before % 2 == 1, 1, 0)))
    return tuple(products)


def again_share(products: tuple[Product, ...], *, without_last: Numbers = 0) -> Numbers:
    """Return the share of FLOPs that is recomputed if every second product is saved.

    Args:
        products: Products in order.
        without_last: 1 to skip the last product, whose output no backward needs.
    """
    *_, last = products
    sizes = [product.inner * product.columns for product in products]
    again = sum(
        size * (1 - product.is_saved) for size, product in zip(sizes, products, strict=True)
    )
    left_out = without_last * last.inner * last.columns * (1 - last.is_saved)
    return (again - left_out) / np.maximum(sum(sizes), 1)


def saved_columns(products: tuple[Product, ...]) -> Numbers:
    """Return the saved elements per token of the outputs of products."""
    return sum(product.columns * product.is_saved for product in products)
