"""Sizes of a decoder-only language model, which determine parameters, FLOPs and activations.

`plait.planner.models` creates an `Architecture`. Its fields may be arrays with one entry per
candidate. Invariant: `parameters` equals the number of parameters of the Transformers model with
the same configuration (tests compare the two).

`products_of` lists the matrix multiplications of activations with weights in a block, in the order
of computation. Recomputation of operators saves the output of every second multiplication. The
planner chooses the same ones as `parallel.activations.selective`. Routed experts use torch's
grouped matrix multiplication, whose output is never saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.planner.hardware import Numbers


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only language model. Widths are in elements."""

    layers: Numbers
    hidden: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_dim: Numbers
    ffn: Numbers
    vocab: Numbers
    gated: Numbers = 1
    """1 if an MLP has three matrices (gate, up, down), 0 if it has two."""
    tied: Numbers = 0
    """1 if the head shares the embedding."""
    positions: Numbers = 0
    """Rows of a learned position embedding."""
    bias: Numbers = 0
    """1 if all matrices and norms have a bias."""
    qkv_bias: Numbers = 0
    """1 if only the query, key and value projections have a bias."""
    qk_norm: Numbers = 0
    """1 if queries and keys are normalized per head."""
    experts: Numbers = 0
    active: Numbers = 0
    """Experts per token."""
    expert_ffn: Numbers = 0
    shared_ffn: Numbers = 0
    dropout: Numbers = 0
    """1 if the outputs of attention and MLP have a dropout in training."""
    attention_dropout: Numbers = 0
    embedding_dropout: Numbers = 0
    activation: Any = ""
    """Name of the activation function in Transformers; empty for the family's default."""
    dense_layers: Numbers = 0
    """Leading layers without experts, in a model with experts."""
    query_rank: Numbers = 0
    """Width of compressed queries in latent attention (DeepSeek's MLA), 0 without compression."""
    latent_rank: Numbers = 0
    """Width of the latent from which keys and values are computed, 0 without latent attention.

    With latent attention `head_dim` is the width of queries and keys.
    """
    rope_dim: Numbers = 0
    """Part of `head_dim` with rotary positions in latent attention. All heads share its key."""
    value_dim: Numbers = 0
    """Width of a head's value in latent attention."""
    layer_parameters: Numbers = 0
    """Mean number of parameters per layer of the built model; 0 computes it from the sizes."""
    end_parameters: Numbers = 0
    """Number of parameters outside the layers of the built model; 0 if the model was not built."""
    uncut: Any = ""
    """Reason why the layers of the built model cannot be split into pipeline stages, else empty."""
    name: Any = ""
    model_type: Any = "llama"

    @property
    def is_latent(self) -> Numbers:
        """True for latent attention (arXiv 2405.04434, section 2.1)."""
        return np.asarray(self.latent_rank) > 0

    @property
    def is_counted(self) -> bool:
        """True if `block_bytes` has formulas for the blocks of the model.

        This is the case for blocks without experts and without latent attention. The property is
        only defined for a single model, not for arrays of models.
        """
        return not self.experts and not self.latent_rank

    @property
    def value_width(self) -> Numbers:
        """Width of the values and of the attention output of one head."""
        return np.where(self.is_latent, self.value_dim, self.head_dim)

    @property
    def products_of_attention(self) -> tuple[tuple[Numbers, Numbers], ...]:
        """(input, output) widths of the five weight matrices of attention, in order.

        Latent attention: compressed queries, queries, the latent, keys with values, the output.
        Other attention: a matrix with output width 0, then queries, keys, values, the output.
        A matrix that the model does not have has the output width 0.
        """
        latent = self.is_latent
        width = self.heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        both = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        compresses = np.asarray(self.query_rank) > 0

        return (
            (self.hidden, self.query_rank),
            (np.where(compresses, self.query_rank, self.hidden), width),
            (self.hidden, np.where(latent, self.latent_rank + self.rope_dim, kv_width)),
            (np.where(latent, self.latent_rank, self.hidden), np.where(latent, both, kv_width)),
            (self.heads * self.value_width, self.hidden),
        )

    @property
    def attention_parameters(self) -> Numbers:
        """Number of elements of attention's weight matrices per layer, without biases."""
        return sum(inner * columns for inner, columns in self.products_of_attention)

    @property
    def expert_layers(self) -> Numbers:
        """Number of layers with experts."""
        return np.where(np.asarray(self.experts) > 0, self.layers - self.dense_layers, 0)

    @property
    def dense_mlp_parameters(self) -> Numbers:
        """Number of elements of the weight matrices of an MLP without experts."""
        return (2 + self.gated) * self.hidden * self.ffn

    @property
    def routed_parameters(self) -> Numbers:
        """Number of parameters of all routed experts of a layer."""
        return self.experts * (2 + self.gated) * self.hidden * self.expert_ffn

    @property
    def shared_parameters(self) -> Numbers:
        """Number of elements of the weight matrices of a layer's shared experts and router."""
        return (2 + self.gated) * self.hidden * self.shared_ffn + self.hidden * self.experts

    @property
    def small_parameters(self) -> Numbers:
        """Number of parameters of norms and biases per layer."""
        widths = (
            2 * self.hidden + self.qk_norm * 2 * self.head_dim + self.query_rank + self.latent_rank
        )
        attention_bias = self.head_dim * (self.heads + 2 * self.kv_heads)
        biases = self.bias * (
            attention_bias
            + 2 * self.hidden
            + self.hidden
            + (1 + self.gated) * self.ffn
            + self.hidden
        )
        return widths + biases + self.qkv_bias * attention_bias

    @property
    def unexplained_parameters(self) -> Numbers:
        """Parameters per layer of the built model minus the number computed from the sizes.

        The difference may be negative. It is 0 if the model was not built.
        """
        return np.where(
            np.asarray(self.layer_parameters) > 0,
            self.layer_parameters - self._blocks_by_sizes / self.layers,
            0,
        )

    @property
    def products_counted(self) -> Numbers:
        """Matrix parameters per layer of the built model divided by those computed from the sizes.

        The ratio is 1 for models with experts, because a token uses only some experts.
        """
        by_sizes = self._blocks_by_sizes / self.layers - self.small_parameters
        return np.where(
            np.asarray(self.experts) > 0,
            1,
            np.maximum(1 + self.unexplained_parameters / by_sizes, 0.01),
        )

    @property
    def block_parameters(self) -> Numbers:
        """Number of parameters of all layers, experts included."""
        return np.where(
            np.asarray(self.layer_parameters) > 0,
            self.layers * self.layer_parameters,
            self._blocks_by_sizes,
        )

    @property
    def _blocks_by_sizes(self) -> Numbers:
        dense = (self.layers - self.expert_layers) * self.dense_mlp_parameters
        expert = self.expert_layers * (self.routed_parameters + self.shared_parameters)
        return self.layers * (self.attention_parameters + self.small_parameters) + dense + expert

    @property
    def embedding_parameters(self) -> Numbers:
        """Number of parameters before the first layer: embedding, learned positions and others."""
        by_sizes = (self.vocab + self.positions) * self.hidden
        return np.where(
            np.asarray(self.end_parameters) > 0,
            np.maximum(self.end_parameters - self.head_parameters, 0),
            by_sizes,
        )

    @property
    def head_parameters(self) -> Numbers:
        """Number of parameters of the final norm, and of the head unless it is tied."""
        return (1 - self.tied) * self.vocab * self.hidden + (1 + self.bias) * self.hidden

    @property
    def parameters(self) -> Numbers:
        """Number of all parameters. Tied parameters count once."""
        return self.block_parameters + self.embedding_parameters + self.head_parameters

    @property
    def active_matrix_parameters(self) -> Numbers:
        """Number of elements of all weight matrices that one token is multiplied with.

        The head is included. The embedding and experts that the token does not use are not.
        """
        dense = (self.layers - self.expert_layers) * self.dense_mlp_parameters
        routed = self.active * (2 + self.gated) * self.hidden * self.expert_ffn
        expert = self.expert_layers * (routed + self.shared_parameters)
        in_layers = self.layers * self.attention_parameters + dense + expert
        return in_layers * self.products_counted + self.vocab * self.hidden

    def model_flops(self, sequence: Numbers) -> Numbers:
        """Return the FLOPs per token of forward and backward.

        The result is 6 * active_matrix_parameters for the weight matrices plus
        6 * layers * sequence * heads * width for attention, where width is the mean width of a
        head's keys and values. Only the causal half of the attention scores is included (as in
        Megatron-LM since 2025).

        Args:
            sequence: Tokens per sample.
        """
        return 6 * self.active_matrix_parameters + 3 * self.layers * sequence * self.heads * (
            self.head_dim + self.value_width
        )


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
    """Matrix multiplication [tokens, inner] x [inner, columns].

    If `columns` is 0, the model does not have this matrix multiplication.
    """

    inner: Numbers
    columns: Numbers
    is_saved: Numbers
    """1 if recomputation of operators, which saves every second output, saves this one."""


@dataclass(frozen=True)
class Products:
    """Matrix multiplications of activations with weights in one block."""

    attention: tuple[Product, ...]
    dense: tuple[Product, ...]
    """Products of an MLP without experts: gate, up, down."""
    shared: tuple[Product, ...]
    """Products of an MLP with experts: the router, then gate, up and down of shared experts."""


def products_of(model: Architecture) -> Products:
    """Return the matrix multiplications of activations with weights in a block of the model."""
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


def rotates_fused_output(model: Architecture) -> Numbers:
    """Return True if rotary embeddings are applied to the output of a fused QKV projection.

    Autograd then saves the fused output in addition to the rotated queries and keys.
    """
    return np.isin(np.asarray(model.model_type), _ROTARY)


def _alternating(sizes: list[tuple[Numbers, Numbers]], before: Numbers) -> tuple[Product, ...]:
    """Return a `Product` per entry of `sizes`. Every second one has `is_saved` set.

    Args:
        sizes: (inner, columns) per matrix multiplication. Entries with 0 columns do not count for
            "every second one".
        before: Number of matrix multiplications of the block before the first of `sizes`.
    """
    products = []
    for inner, columns in sizes:
        before = before + (np.asarray(columns) > 0)
        products.append(Product(inner, columns, np.where(before % 2 == 1, 1, 0)))
    return tuple(products)


def recomputed_share(products: tuple[Product, ...], *, without_last: Numbers = 0) -> Numbers:
    """Return the share of FLOPs recomputed if the output of every second product is saved.

    Args:
        products: Matrix multiplications in the order of computation.
        without_last: 1 if the last product is not recomputed, because no backward needs its output.
    """
    size: Numbers = 0
    again: Numbers = 0
    for product in products:
        size = size + product.inner * product.columns
        again = again + product.inner * product.columns * (1 - product.is_saved)
    last = products[-1]
    left_out = without_last * last.inner * last.columns * (1 - last.is_saved)
    return (again - left_out) / np.maximum(size, 1)


def saved_columns(products: tuple[Product, ...]) -> Numbers:
    """Return the number of elements per token in the saved outputs of `products`."""
    return sum(product.columns * product.is_saved for product in products)
