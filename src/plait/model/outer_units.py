"""Choice of the outer units: embeddings and the head, if each is a sharding unit outside of the
blocks.

The backward of an embedding does not read its weight, so its parameters can be freed after the
forward. The parameters of a head are needed only from its forward to its backward. All other
parameters outside of the blocks form one unit, the root.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from plait.model.boundary_layers import head_name
from plait.model.layers import is_embedding, is_linear
from plait.model.tied import tied_names

LEAST_SHARE = 0.1
"""Smallest share of the parameters outside of the blocks for which a layer becomes a unit. Each
unit costs one more all-gather and one more reduce-scatter.
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
        head = (
            self.head
            if self.head is not None and not f"{self.head}.".startswith(prefixes)
            else None
        )
        return OuterUnits(embeddings, head)

    def unit_of(self, parameter: str) -> str:
        """Return the name of the unit that holds a parameter, or an empty string if no unit holds
        it.
        """
        module = parameter.rpartition(".")[0]
        return module if module in self.embeddings or module == self.head else ""


def outer_units(model: nn.Module, blocks: Sequence[str]) -> OuterUnits:
    """Find the outer units of an unsharded model whose repeated blocks are named `blocks`.

    A unit is exactly a lookup or a linear map, because what the backward of other layers reads is
    not known. It shares no parameter with another layer: tied weights stay in the root unit. The
    head is the layer that the model names (`get_output_embeddings`). If the model names none, the
    head is the last linear layer outside of the blocks.
    """
    if not blocks:
        return OuterUnits()

    inside = tuple(f"{block}." for block in blocks)
    tied = {name for names in tied_names(model) for name in names}
    outside = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not name.startswith(inside)
    )

    def large_layers() -> Iterator[tuple[str, nn.Module]]:
        for name, module in model.named_modules():
            if f"{name}.".startswith(inside) or not (is_embedding(module) or is_linear(module)):
                continue
            parameters = {
                f"{name}.{leaf}": parameter for leaf, parameter in module.named_parameters()
            }
            size = sum(parameter.numel() for parameter in parameters.values())
            is_large = size > 0 and size >= LEAST_SHARE * outside
            if is_large and tied.isdisjoint(parameters):
                yield name, module

    layers = dict(large_layers())
    linear = [name for name, module in layers.items() if is_linear(module)]
    named = head_name(model)
    if named is not None:  # the head itself, or the layer with its weight inside of an adapter
        linear = [name for name in linear if f"{name}.".startswith(f"{named}.")]
    embeddings = tuple(name for name, module in layers.items() if is_embedding(module))
    return OuterUnits(embeddings, linear[-1] if linear else None)
