"""The shape of a decoder-only language model: what the planner needs to count parameters, products
and activations.

Where it comes from is in `models`. Fields may be arrays with one entry a candidate. Invariant:
`parameters` counts what the Transformers model of that configuration has (tests compare them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.planner.hardware import Numbers


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model. Widths in elements."""

    layers: Numbers
    hidden: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_dim: Numbers
    ffn: Numbers
    vocab: Numbers
    gated: Numbers = 1
    """1: an MLP of three matrices (gate, up, down); 0: of two."""
    tied: Numbers = 0
    """1: the head is the embedding."""
    positions: Numbers = 0
    """Rows of a learned position embedding."""
    bias: Numbers = 0
    """1: every matrix has a bias, and norms too."""
    qkv_bias: Numbers = 0
    """1: only query, key and value have a bias."""
    qk_norm: Numbers = 0
    """1: query and key are normalised by head."""
    experts: Numbers = 0
    active: Numbers = 0
    """Experts that a token goes to."""
    expert_ffn: Numbers = 0
    shared_ffn: Numbers = 0
    dropout: Numbers = 0
    """1: what attention and MLP return passes a dropout in training."""
    attention_dropout: Numbers = 0
    embedding_dropout: Numbers = 0
    activation: Any = ""
    """The activation function, by Transformers' name; empty for the family's own."""
    dense_layers: Numbers = 0
    """Leading layers without experts, in a model with experts."""
    query_rank: Numbers = 0
    """Of latent attention (DeepSeek's MLA): width that queries are compressed to; 0 where they are
    not.
    """
    latent_rank: Numbers = 0
    """Width that keys and values are compressed to together; 0 where attention is not latent.
    `head_dim` is then a query's and a key's.
    """
    rope_dim: Numbers = 0
    """Of `head_dim`, with latent attention, what has a rotary position; all heads have one key for
    it.
    """
    value_dim: Numbers = 0
    """Of a head's value, with latent attention."""
    layer_parameters: Numbers = 0
    """Parameters of a layer, the mean of them, where they were counted of the model itself; 0: what
    the sizes give.
    """
    end_parameters: Numbers = 0
    """The same of everything outside of the layers."""
    uncut: Any = ""
    """Why no pipeline cuts its layers, where that was asked of the model itself; else empty."""
    name: Any = ""
    model_type: Any = "llama"

    @property
    def is_latent(self) -> Numbers:
        """Whether keys and values are made of a latent (arXiv 2405.04434, section 2.1)."""
        return np.asarray(self.latent_rank) > 0

    @property
    def is_counted(self) -> bool:
        """Of one model, whether what its blocks keep is counted for Plait and not guessed
        (`own`).
        """
        return not self.experts and not self.latent_rank

    @property
    def value_width(self) -> Numbers:
        """Of a head's value, and of what attention returns for it."""
        return np.where(self.is_latent, self.value_dim, self.head_dim)

    @property
    def products_of_attention(self) -> tuple[tuple[Numbers, Numbers], ...]:
        """(rows of the matrix that are summed over, columns) of the products of a layer's attention
        with weights, in the order of their computation: with latent attention the queries' two, the
        latent, keys with values, and the output; else none, queries, keys, values, output. Columns
        are 0 where there is no such product.
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
        """Matrix parameters of a layer's attention."""
        return sum(inner * columns for inner, columns in self.products_of_attention)

    @property
    def expert_layers(self) -> Numbers:
        """Layers with experts."""
        return np.where(np.asarray(self.experts) > 0, self.layers - self.dense_layers, 0)

    @property
    def dense_mlp_parameters(self) -> Numbers:
        """Matrix parameters of an MLP without experts."""
        return (2 + self.gated) * self.hidden * self.ffn

    @property
    def routed_parameters(self) -> Numbers:
        """Parameters of all routed experts of a layer."""
        return self.experts * (2 + self.gated) * self.hidden * self.expert_ffn

    @property
    def shared_parameters(self) -> Numbers:
        """Matrix parameters that every token uses besides the routed experts: shared experts and
        the router.
        """
        return (2 + self.gated) * self.hidden * self.shared_ffn + self.hidden * self.experts

    @property
    def small_parameters(self) -> Numbers:
        """Norms and biases of a layer."""
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
        """What a layer was counted to have besides what the sizes give; less than 0 where it has
        less.
        """
        return np.where(
            np.asarray(self.layer_parameters) > 0,
            self.layer_parameters - self._blocks_by_sizes / self.layers,
            0,
        )

    @property
    def products_counted(self) -> Numbers:
        """What a layer was counted to have in its products, of what the sizes give; 1 with experts,
        of which a token uses some.
        """
        by_sizes = self._blocks_by_sizes / self.layers - self.small_parameters
        return np.where(
            np.asarray(self.experts) > 0,
            1,
            np.maximum(1 + self.unexplained_parameters / by_sizes, 0.01),
        )

    @property
    def block_parameters(self) -> Numbers:
        """Parameters of all layers, experts included."""
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
        """The embedding, with learned positions, and whatever else is before the layers."""
        by_sizes = (self.vocab + self.positions) * self.hidden
        return np.where(
            np.asarray(self.end_parameters) > 0,
            np.maximum(self.end_parameters - self.head_parameters, 0),
            by_sizes,
        )

    @property
    def head_parameters(self) -> Numbers:
        """The head where it is not the embedding, and the final norm."""
        return (1 - self.tied) * self.vocab * self.hidden + (1 + self.bias) * self.hidden

    @property
    def parameters(self) -> Numbers:
        """All parameters, tied ones once."""
        return self.block_parameters + self.embedding_parameters + self.head_parameters

    @property
    def active_matrix_parameters(self) -> Numbers:
        """Matrix parameters that a token is multiplied with, the head included, the embedding
        not.
        """
        dense = (self.layers - self.expert_layers) * self.dense_mlp_parameters
        routed = self.active * (2 + self.gated) * self.hidden * self.expert_ffn
        expert = self.expert_layers * (routed + self.shared_parameters)
        in_layers = self.layers * self.attention_parameters + dense + expert
        return in_layers * self.products_counted + self.vocab * self.hidden

    def model_flops(self, sequence: Numbers) -> Numbers:
        """FLOPs of a token, forward and backward: 6 a matrix parameter, and causal attention
        counted by half (6 L s a d), as Megatron-LM counts since 2025; d is the mean of a key's
        width and a value's.
        """
        return 6 * self.active_matrix_parameters + 3 * self.layers * sequence * self.heads * (
            self.head_dim + self.value_width
        )
