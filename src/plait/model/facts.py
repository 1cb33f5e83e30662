"""Frozen data about a model for the planner and the memory ledger: shapes and owners, no tensors.

The facts are read from a module on any device (`meta` included) before it is distributed. Tied
parameters are listed once, under their first name.

Sizes in a Transformers configuration may differ between layers, as those of Gemma 4 do. Such a
configuration raises an error if the size is read from it directly (see `largest_of_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from plait.model.blocks import block_index
from plait.model.experts import find_experts
from plait.model.outer_layers import OuterUnits, outer_units
from plait.model.plans import TensorPlan

ROOT = -1
"""Sharding unit of the parameters that belong to no block and to no outer unit."""


@dataclass(frozen=True)
class ParameterFacts:
    """Shape and location of one parameter."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Size of an element in bytes."""
    trainable: bool
    unit: int
    """Index of the parameter's block, or -1 outside the blocks (embedding, head, final norm)."""
    also: tuple[str, ...] = ()
    """Further names of a tied parameter."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class AttentionFacts:
    """Attention heads of every layer, before tensor parallelism splits them."""

    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query or key."""
    value_dim: int


@dataclass(frozen=True)
class ExpertFacts:
    """Experts of a model whose mixture-of-experts layers are all equal."""

    parameters: tuple[str, ...]
    """Names of the parameters whose first dimension counts experts."""
    count: int
    """Number of experts per layer."""
    per_token: int
    """Number of experts that process each token."""
    hidden: int
    """Number of elements of a token."""

    @property
    def layers(self) -> int:
        """Number of layers with experts."""
        return len({name.rpartition(".")[0] for name in self.parameters})


@dataclass(frozen=True)
class ModelFacts:
    """Parameters, blocks, attention heads and experts of a model, without tensors."""

    parameters: tuple[ParameterFacts, ...]
    """All parameters, tied ones once."""
    blocks: tuple[str, ...]
    """Names of the repeated blocks."""
    tensor_plan: TensorPlan | None = None
    """Split of the model by tensor parallelism; None if it is not used."""
    attention: AttentionFacts | None = None
    """Attention heads; None if the model's configuration does not define them."""
    experts: ExpertFacts | None = None
    """Experts; None for a dense model, and if the number of experts per token is unknown."""
    outer: OuterUnits = field(default_factory=OuterUnits)
    """Layers outside the blocks that are sharding units."""

    def sharding_unit(self, parameter: ParameterFacts) -> int | str:
        """Return the sharding unit of a parameter.

        Returns:
            The index of a block, the name of an outer unit, or `ROOT`.
        """
        if parameter.unit >= 0:
            return parameter.unit
        return self.outer.unit_of(parameter.name) or ROOT

    @property
    def numel(self) -> int:
        """Number of elements of all parameters, tied ones counted once."""
        return sum(p.numel for p in self.parameters)

    @property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """Parameters that receive gradients."""
        return tuple(p for p in self.parameters if p.trainable)


def model_facts(
    model: nn.Module, blocks: Sequence[str], *, tensor_plan: TensorPlan | None = None
) -> ModelFacts:
    """Collect the `ModelFacts` of a model.

    Args:
        model: The model, on any device, before it is distributed.
        blocks: Names of its repeated blocks, see `find_blocks`.
        tensor_plan: Its split by tensor parallelism.
    """
    # Keyed by identity, so that a tied parameter is listed once with all of its names.
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter

    facts = []
    for key, (first, *also) in names.items():
        parameter = parameters[key]
        facts.append(
            ParameterFacts(
                first,
                tuple(parameter.shape),
                parameter.element_size(),
                parameter.requires_grad,
                block_index(first, blocks),
                tuple(also),
            )
        )
    return ModelFacts(
        tuple(facts),
        tuple(blocks),
        tensor_plan,
        attention_facts(model),
        _expert_facts(model),
        outer_units(model, blocks),
    )


def attention_facts(model: nn.Module) -> AttentionFacts | None:
    """Return the attention heads that a model's configuration defines, or None."""
    config = getattr(model, "config", None)
    heads = largest_of_layers(config, "num_attention_heads")
    width = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        return None

    nope_dim = largest_of_layers(config, "qk_nope_head_dim")
    rope_dim = largest_of_layers(config, "qk_rope_head_dim")
    value_dim = largest_of_layers(config, "v_head_dim")
    if isinstance(nope_dim, int) and isinstance(rope_dim, int) and isinstance(value_dim, int):
        # DeepSeek's latent attention computes keys and values for every query head.
        return AttentionFacts(heads, heads, nope_dim + rope_dim, value_dim)

    kv_heads = largest_of_layers(config, "num_key_value_heads") or heads
    head_dim = largest_of_layers(config, "head_dim") or width // heads
    return AttentionFacts(heads, kv_heads, head_dim, head_dim)


def _expert_facts(model: nn.Module) -> ExpertFacts | None:
    layers = find_experts(model)
    config = getattr(model, "config", None)
    per_token = getattr(config, "num_experts_per_tok", None)
    hidden = getattr(config, "hidden_size", None)
    if not layers or not isinstance(per_token, int) or not isinstance(hidden, int):
        return None
    names = tuple(name for experts in layers for name in experts.parameters)
    return ExpertFacts(names, layers[0].count, per_token, hidden)


def sizes_of_layers(config: Any, name: str) -> list[int]:
    """Return the size of every layer, in model order.

    Args:
        config: A configuration of Transformers.
        name: Name of its field.

    Returns:
        One entry per layer; a single entry if the layers do not differ; an empty list if the
        configuration does not define the size for all layers.
    """
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = [getattr(layer, name, None) for layer in layers]
    return [size for size in sizes if size] if all(sizes) else []


def largest_of_layers(config: Any, name: str) -> int | None:
    """Return the largest size of any layer, or None if the configuration does not define it."""
    return max(sizes_of_layers(config, name), default=None)
