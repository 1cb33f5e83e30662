"""Units whose optimizer states are offloaded (`offload_optimizer.ratio`), and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from plait.model.facts import ModelFacts, ParameterFacts
from plait.parallel.accounting.ledger import Array, Ledger, ledger_view_of, parameter_part


def offloaded_units(facts: ModelFacts, ratio: float) -> frozenset[int]:
    """Return the units that are offloaded: first the blocks, then everything outside of them (-1).

    Units are added until their share of the parameters is at least `ratio`. Unsharded shapes are
    counted, so that every rank of a pipeline stage selects the same units.
    """
    sizes = Counter[int]()
    for parameter in facts.parameters:
        sizes[parameter.unit] += prod(parameter.shape) * parameter.itemsize
    total = sum(sizes.values())

    units: set[int] = set()
    offloaded_bytes = 0
    # Blocks come in their order, and -1 comes last.
    for unit in sorted(sizes, key=lambda unit: (unit < 0, unit)):
        if offloaded_bytes < ratio * total:
            units.add(unit)
            offloaded_bytes += sizes[unit]
    return frozenset(units)


def offloaded_bytes_of(
    facts: ModelFacts, ledger: Ledger, ratio: float
) -> Iterator[tuple[ParameterFacts, Array, Array]]:
    """Yield every parameter of the offloaded units with its bytes on this rank.

    Yields:
        (parameter, bytes of its shard padded to that of the first rank, bytes of this rank's
        shard).
    """
    units = offloaded_units(facts, ratio)
    ledger_of = ledger_view_of(ledger)
    for parameter in facts.parameters:
        if parameter.unit not in units:
            continue
        view = ledger_of(parameter.name)
        part = parameter_part(parameter.shape, view.tensor_dims.get(parameter.name), view)
        yield (
            parameter,
            part.padded * part.row * parameter.itemsize,
            part.held * part.row * parameter.itemsize,
        )
