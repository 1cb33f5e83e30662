"""Bytes of the units of `fully_shard` (a block, an outer unit, the root): gathered, sent, reduced.

They follow torch 2.13 (`torch/distributed/fsdp/_fully_shard`). An all-gather copies shards into one
flat buffer of the full size, and from there into one tensor per parameter. A reduction copies
gradients into one flat buffer in the reduction's dtype. The result is cast to the parameters'
dtype, and the parameters' gradients are views of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.model.facts import ROOT, ModelFacts
from plait.parallel.accounting.ledger import Ledger, parameter_part


@dataclass
class UnitBytes:
    """Bytes of one unit on one rank."""

    gathered: int = 0
    """All parameters in the compute dtype, padded to equal shards."""
    cast_shards: int = 0
    """Shards in the compute dtype; 0 if it is the dtype of the parameters."""
    last_parameter: int = 0
    """The last parameter in the compute dtype."""
    made_gradients: int = 0
    """Unsharded gradients in the compute dtype."""
    gradients: int = 0
    """Unsharded gradients in the reduction's dtype."""
    reduce_input: int = 0
    """Unsharded gradients in the reduction's dtype, padded."""
    reduce_output: int = 0
    """This rank's part of the reduced gradients, in the reduction's dtype."""
    sharded_gradients: int = 0
    """This rank's part of the reduced gradients, in the parameters' dtype."""
    casts_gradients: bool = False
    """True if gradients are computed in another dtype than they are reduced in."""


def unit_bytes(facts: ModelFacts, ledger: Ledger) -> dict[int | str, UnitBytes]:
    """Return the bytes of every unit of a rank.

    Args:
        facts: The rank's part of the model.
        ledger: The account of one candidate.
    """
    units: dict[int | str, UnitBytes] = {ROOT: UnitBytes()}
    n = int(ledger.dp_shard[0])
    for parameter in facts.parameters:
        unit = units.setdefault(facts.sharding_unit(parameter), UnitBytes())
        part = parameter_part(parameter.shape, ledger.tensor_dims.get(parameter.name), ledger)
        numel = int(part.rows[0]) * int(part.row[0])
        shard = int(part.padded[0]) * int(part.row[0])
        compute = parameter.itemsize
        if ledger.compute_bytes is not None:
            compute = int(ledger.compute_bytes[0])
            unit.cast_shards += shard * compute
        reduce = compute
        if ledger.reduce_bytes is not None:
            reduce = int(ledger.reduce_bytes[0])

        unit.gathered += shard * n * compute
        unit.last_parameter = numel * compute
        if parameter.trainable:
            unit.made_gradients += numel * compute
            unit.gradients += numel * reduce
            unit.reduce_input += shard * n * reduce
            unit.reduce_output += shard * reduce
            unit.sharded_gradients += shard * parameter.itemsize
            unit.casts_gradients = reduce != compute
    return units
