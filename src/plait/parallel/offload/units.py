"""Which units' states are offloaded (`offload_optimizer.ratio`), and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from plait.model.facts import ModelFacts, ParameterFacts
from plait.parallel.accounting.expert_view import view_of
from plait.parallel.accounting.ledger import Array, Ledger, part_of


def offloaded_units(facts: ModelFacts, ratio: float) -> frozenset[int]:
    """Blocks from the first on, then the parameters outside of them (-1), until their share of the
    parameters is at least `ratio`. By unsharded shapes, so that every rank of a stage chooses the
    same.
    """
    sizes: dict[int, int] = {}
    for parameter in facts.parameters:
        sizes[parameter.unit] = (
            sizes.get(parameter.unit, 0) + prod(parameter.shape) * parameter.itemsize
        )
    chosen: set[int] = set()
    total = sum(sizes.values())
    for unit in sorted(sizes, key=lambda unit: (unit < 0, unit)):
        if sum(sizes[other] for other in chosen) < ratio * total:
            chosen.add(unit)
    return frozenset(chosen)


def held_of(
    facts: ModelFacts, ledger: Ledger, ratio: float
) -> Iterator[tuple[ParameterFacts, Array, Array]]:
    """Of every parameter of the chosen units: (it, bytes of its shard, padded to the first rank's;
    bytes of what this rank really holds).
    """
    chosen = offloaded_units(facts, ratio)
    view = view_of(ledger)
    for parameter in facts.parameters:
        if parameter.unit not in chosen:
            continue
        seen = view(parameter.name)
        part = part_of(parameter.shape, seen.tensor_dims.get(parameter.name), seen)
        yield (
            parameter,
            part.padded * part.row * parameter.itemsize,
            part.held * part.row * parameter.itemsize,
        )
