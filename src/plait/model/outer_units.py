"""Choice of the outer units: layers outside of the blocks that are separate sharding units.

Embeddings and the head can be outer units. The backward of an embedding does not read its weight,
so its parameters can be freed after the forward. The parameters of a head are needed only from its
forward to its backward. All other parameters outside of the blocks form one unit, the root.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from plait.model.boundary_layers import head_name
from plait.model.layers import count_parameters, is_embedding, is_linear
from plait.model.tied import tied_names

LEAST_SHARE = 0.1
"""Smallest share of the parameters outside of the blocks for which a layer becomes a unit.

Each unit costs one more all-gather and one more reduce-scatter.
"""


@dataclass(frozen=True)
class OuterUnits:
    """Names of the layers outside of the blocks that are sharding units."""

    embeddings: tuple[str, ...] = ()
    head: str | None = None

    def without(self, names: Collection[str]) -> OuterUnits:
        """Return the units that are neither in `names` nor inside of these modules."""
        prefixes = tuple(f"{name}." for name in names)
        embeddings = tuple(name for name in self.embeddings if not f"{name}.".startswith(prefixes))
        head = self.head
        if head is not None and f"{head}.".startswith(prefixes):
            head = None
        return OuterUnits(embeddings, head)

    def unit_of(self, parameter: str) -> str:
        """Return the name of the unit that holds a parameter, or an empty string."""
        module = parameter.rpartition(".")[0]
        if module in self.embeddings or module == self.head:
            return module
        return ""


def outer_units(model: nn.Module, blocks: Sequence[str]) -> OuterUnits:
    """Return the outer units of a model.

    A unit is exactly a lookup or a linear map, because it is not known what the backward of other
    layers reads. It shares no parameter with another layer: tied weights stay in the root unit. The
    head is the layer that the model names (`get_output_embeddings`). If the model names none, the
    head is the last linear layer outside of the blocks.

    Args:
        model: The model before it is sharded.
        blocks: Names of its repeated blocks. A model without blocks has no outer units.
    """
    if not blocks:
        return OuterUnits()

    layers = _large_untied_layers(model, blocks)
    linear = [name for name, module in layers.items() if is_linear(module)]
    head = head_name(model)
    if head is not None:
        # Inside of an adapter, the layer with the weight is below the named head.
        linear = [name for name in linear if f"{name}.".startswith(f"{head}.")]
    embeddings = tuple(name for name, module in layers.items() if is_embedding(module))
    return OuterUnits(embeddings, linear[-1] if linear else None)


def _large_untied_layers(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """Return the embeddings and linear layers outside of the blocks that are worth a unit."""
    prefixes = tuple(f"{block}." for block in blocks)
    outside = 0
    for name, parameter in model.named_parameters():
        if not name.startswith(prefixes):
            outside += parameter.numel()
    tied: set[str] = set()
    for names in tied_names(model):
        tied.update(names)

    layers = {}
    for name, module in model.named_modules():
        if f"{name}.".startswith(prefixes) or not (is_embedding(module) or is_linear(module)):
            continue
        # Smaller layers are not worth the additional collectives and stay in the root unit.
        size = count_parameters(module)
        is_large = size > 0 and size >= LEAST_SHARE * outside
        if is_large and tied.isdisjoint(f"{name}.{leaf}" for leaf, _ in module.named_parameters()):
            layers[name] = module
    return layers
