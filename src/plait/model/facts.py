"""What the planner and the ledger need to know of a model, as frozen data: shapes and owners, no
tensors.

Taken from a module (on any device, `meta` included) before anything is applied to it. Tied
parameters are listed once, under their first name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from torch import nn

from plait.model.experts import find_experts
from plait.model.layer_sizes import largest_of_layers
from plait.model.outer_units import OuterUnits, outer_units
from plait.model.plans import TensorPlan

ROOT = -1
"""Sharding unit of the parameters that belong to no block and to no outer unit."""


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter. `unit` is the index of its block, or -1 for the rest of the model (embedding,
    head, final norm).
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    unit: int
    also: tuple[str, ...] = ()
    """The other names of a tied parameter."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class AttentionFacts:
    """The heads of every layer, before tensor parallelism splits them."""

    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int


@dataclass(frozen=True)
class ExpertFacts:
    """Of a mixture-of-experts model whose layers are alike."""

    parameters: tuple[str, ...]
    """Names of those whose first dimension counts experts."""
    count: int
    """Experts of a layer."""
    per_token: int
    """Experts that a token goes to."""
    hidden: int
    """Elements of a token."""

    @property
    def layers(self) -> int:
        """With experts."""
        return len({name.rpartition(".")[0] for name in self.parameters})


@dataclass(frozen=True)
class ModelFacts:
    """All parameters of a model, tied ones once, and the names of its blocks."""

    parameters: tuple[ParameterFacts, ...]
    blocks: tuple[str, ...]
    tensor_plan: TensorPlan | None = None
    """How tensor parallelism would split the model; None where it is not asked."""
    attention: AttentionFacts | None = None
    """None where the model's configuration does not say."""
    experts: ExpertFacts | None = None
    """None for a model without, or one that does not say how many experts a token goes to."""
    outer: OuterUnits = field(default_factory=OuterUnits)
    """Layers outside of the blocks that are sharding units."""

    def sharding_unit(self, parameter: ParameterFacts) -> int | str:
        """Return the sharding unit of a parameter: index of a block, name of an outer unit, or
        ROOT.
        """
        if parameter.unit >= 0:
            return parameter.unit
        return self.outer.unit_of(parameter.name) or ROOT

    @property
    def numel(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(p.numel for p in self.parameters)

    @property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """The parameters that get gradients."""
        return tuple(p for p in self.parameters if p.trainable)


def model_facts(
    model: nn.Module, blocks: Sequence[str], *, tensor_plan: TensorPlan | None = None
) -> ModelFacts:
    """Read the facts of `model`, whose repeated blocks are named `blocks`."""
    owner = {name: index for index, name in enumerate(blocks)}
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    listed = []
    for key, (first, *also) in names.items():
        parameter = found[key]
        unit = next((index for block, index in owner.items() if first.startswith(f"{block}.")), -1)
        listed.append(
            ParameterFacts(
                first,
                tuple(parameter.shape),
                parameter.element_size(),
                parameter.requires_grad,
                unit,
                tuple(also),
            )
        )
    outer = outer_units(model, blocks)
    return ModelFacts(
        tuple(listed), tuple(blocks), tensor_plan, attention_facts(model), _experts(model), outer
    )


def attention_facts(model: nn.Module) -> AttentionFacts | None:
    """Of a model whose configuration has them."""
    config = getattr(model, "config", None)
    heads = largest_of_layers(config, "num_attention_heads")
    width = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    kv_heads = largest_of_layers(config, "num_key_value_heads")
    head_dim = largest_of_layers(config, "head_dim")
    latent = [
        largest_of_layers(config, name)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ]
    known = [size for size in latent if isinstance(size, int)]
    if len(known) == 3:  # DeepSeek's, whose keys and values are made for every head
        return AttentionFacts(heads, heads, known[0] + known[1], known[2])
    size = head_dim or width // heads
    return AttentionFacts(heads, kv_heads or heads, size, size)


def _experts(model: nn.Module) -> ExpertFacts | None:
    found = find_experts(model)
    config = getattr(model, "config", None)
    per_token = getattr(config, "num_experts_per_tok", None)
    hidden = getattr(config, "hidden_size", None)
    if not found or not isinstance(per_token, int) or not isinstance(hidden, int):
        return None
    names = tuple(name for experts in found for name in experts.parameters)
    return ExpertFacts(names, found[0].count, per_token, hidden)
