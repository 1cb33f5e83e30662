"""Bytes of the units that `fully_shard` moves as one (a block, an outer unit, the root): gathered,
on the wire, reduced.

What torch 2.13 does with them (`torch/distributed/fsdp/_fully_shard`): a gather copies shards into
one flat buffer of the full size, and from there into one tensor a parameter; a reduction copies
gradients into one flat buffer in the reduction's dtype, and the result is cast to the parameters'
dtype, where the parameters' gradients are views of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.model.facts import ROOT, ModelFacts
from plait.parallel.accounting.ledger import Ledger, part_of


@dataclass
class UnitBytes:
    """One unit on one rank."""

    gathered: int = 0
    """All parameters in the dtype of computation, padded to equal shards."""
    cast_shards: int = 0
    """The shards in that dtype; 0 where it is their own."""
    last_parameter: int = 0
    """Of the last parameter, in the dtype of computation."""
    made_gradients: int = 0
    """Unsharded gradients in the dtype of computation."""
    gradients: int = 0
    """Unsharded gradients in the reduction's dtype."""
    reduce_input: int = 0
    """The same, padded."""
    reduce_output: int = 0
    """A rank's part of it."""
    sharded_gradients: int = 0
    """That in the parameters' dtype."""
    casts_gradients: bool = False
    """Whether gradients are made in another dtype than they are reduced in."""


def unit_bytes(facts: ModelFacts, ledger: Ledger) -> dict[int | str, UnitBytes]:
    """Every unit of a rank, of the one candidate that `ledger` has. `facts` are the rank's."""
    units: dict[int | str, UnitBytes] = {ROOT: UnitBytes()}
    n = int(ledger.dp_shard[0])
    for parameter in facts.parameters:
        unit = units.setdefault(facts.sharding_unit(parameter), UnitBytes())
        part = part_of(parameter.shape, ledger.tensor_dims.get(parameter.name), ledger)
        rows, row, padded = (int(count[0]) for count in (part.rows, part.row, part.padded))
        own = parameter.itemsize
        compute = own if ledger.compute_bytes is None else int(ledger.compute_bytes[0])
        reduce = compute if ledger.reduce_bytes is None else int(ledger.reduce_bytes[0])
        shard = padded * row
        unit.gathered += shard * n * compute
        unit.cast_shards += shard * compute if ledger.compute_bytes is not None else 0
        unit.last_parameter = rows * row * compute
        if parameter.trainable:
            unit.made_gradients += rows * row * compute
            unit.gradients += rows * row * reduce
            unit.reduce_input += shard * n * reduce
            unit.reduce_output += shard * reduce
            unit.sharded_gradients += shard * own
            unit.casts_gradients = reduce != compute
    return units
