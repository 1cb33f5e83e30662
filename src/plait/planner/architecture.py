"""The shape of a decoder-only language model: what the planner needs to count parameters, products and activations.

Where it comes from is in `models`. Fields may be arrays with one entry a candidate. Invariant: `parameters` counts what the Transformers
model of that configuration has (tests compare them).
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
    dense_layers: Numbers = 0
    """Leading layers without experts, in a model with experts."""
    compressed: Numbers = 0
    """Parameters of a layer's attention where it is DeepSeek's compressed one, else 0."""
    name: Any = ""
    model_type: Any = "llama"

    @property
    def attention_parameters(self) -> Numbers:
        """Matrix parameters of a layer's attention."""
        plain = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return np.where(np.asarray(self.compressed) > 0, self.compressed, plain)

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
        """Matrix parameters that every token uses besides the routed experts: shared experts and the router."""
        return (2 + self.gated) * self.hidden * self.shared_ffn + self.hidden * self.experts

    @property
    def small_parameters(self) -> Numbers:
        """Norms and biases of a layer."""
        widths = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        attention_bias = self.head_dim * (self.heads + 2 * self.kv_heads)
        biases = self.bias * (attention_bias + 2 * self.hidden + self.hidden + (1 + self.gated) * self.ffn + self.hidden)
        return widths + biases + self.qkv_bias * attention_bias

    @property
    def block_parameters(self) -> Numbers:
        """Parameters of all layers, experts included."""
        dense = (self.layers - self.expert_layers) * self.dense_mlp_parameters
        expert = self.expert_layers * (self.routed_parameters + self.shared_parameters)
        return self.layers * (self.attention_parameters + self.small_parameters) + dense + expert

    @property
    def embedding_parameters(self) -> Numbers:
        """The embedding, with learned positions."""
        return (self.vocab + self.positions) * self.hidden

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
        """Matrix parameters that a token is multiplied with, the head included, the embedding not."""
        dense = (self.layers - self.expert_layers) * self.dense_mlp_parameters
        routed = self.active * (2 + self.gated) * self.hidden * self.expert_ffn
        expert = self.expert_layers * (routed + self.shared_parameters)
        return self.layers * self.attention_parameters + dense + expert + self.vocab * self.hidden

    def model_flops(self, sequence: Numbers) -> Numbers:
        """FLOPs of a token, forward and backward: 6 a matrix parameter, and causal attention counted by half (6 L s a d), as Megatron-LM
        counts since 2025."""
        return 6 * self.active_matrix_parameters + 6 * self.layers * sequence * self.heads * self.head_dim
