"""Ledger of the bytes of layouts. Every technique writes to it, and the planner reads it.

All figures are NumPy arrays with one entry per candidate layout, so that one call accounts for
a search space. Figures are per rank and exact: `verify` compares them with the bytes that a
process measures. Expert parameters are split over ep along their first dimension, like a dimension
that tensor parallelism splits. They are replicated or sharded over the ranks that have the same
experts (`of_experts`).

`unit_bytes` are the bytes that each unit of `fully_shard` (a block, an outer unit, the root)
gathers, sends and reduces. They follow torch 2.13 (`torch/distributed/fsdp/_fully_shard`). An
all-gather copies shards into one flat buffer of the full size, and from there into one tensor per
parameter. A reduction copies gradients into one flat buffer in the reduction's dtype. The result is
cast to the parameters' dtype, and the parameters' gradients are views of it.

Note [Units after a backward]
    The run, the ledger and the prediction of the peak memory share the rule for what a ZeRO stage
    reduces and frees after a backward (`after_block_backward`, `after_root_backward`). Without a
    pipeline a rank has one pipeline stage, whose micro-batches are the accumulation steps, and each
    unit ends its step with the last of them. In a pipeline, the pipeline stages of a rank end their
    steps at different times, and the root unit (everything outside the blocks) belongs to several
    of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.cluster.layout import shard_length, shard_size
from plait.model.facts import ROOT, ModelFacts, ParameterFacts
from plait.parallel.accounting.compression_scheme import Scheme

if TYPE_CHECKING:
    from plait.cluster.layout import Layout
    from plait.parallel.accounting.activations import RankActivations

Array = NDArray[np.int64]


@dataclass(frozen=True)
class StageCounts:
    """Number of gathers, reductions and sends of one pipeline rank in a step.

    `pipeline.estimates` derives them from the schedule's table.
    """

    root_gathers: Array
    """Number of times that ZeRO stage 3 gathers the root unit."""
    ends: Array
    """Number of ends of the model (the front and the back) on this rank, 0 to 2."""
    root_reduces: Array
    """Number of times that ZeRO stages 2 and 3 reduce the root unit.

    These are the backwards of the stages that own something outside the blocks.
    """
    sends: Array
    """Number of tensors sent to other stages: activations and their gradients."""
    boundary_bytes: Array
    """Bytes of one tensor that is sent to another stage."""
    shared_bytes: Array
    """Bytes sent to sum the gradients of parameters that n stages share.

    These are 2 (n - 1) / n of this rank's shards of the gradients.
    """


MEMORY_KINDS = (
    "parameters",
    "gathered_parameters",
    "gradients",
    "unsharded_gradients",
    "optimizer",
    "compression",
)
"""Kinds of memory of parameters, gradients and states.

`parameters`, `gradients`, `optimizer` and `compression` (its errors) are what a rank holds just
before the optimizer step. `gathered_parameters` and `unsharded_gradients` are what it holds in
addition between two micro-batches of a step. In a pipeline `accounting.peak` counts them at every
point of a step.
"""

ACTIVATION_KINDS = ("activations", "logits", "restored_activations", "stored_activations")
"""Kinds of memory of the micro-batches that are between their forward and their backward.

`activations` (of the blocks and of modules before them) and `logits` (of the head and the loss)
stay on the device from forward to backward. `restored_activations` are the most that the backward
of one block recomputes or prefetches. `stored_activations` are in host memory or on disk.
"""

PLACE_KINDS = ("host", "files", "step_buffers")
"""Places of `parameters`, `gradients` and `optimizer` besides the device.

`step_buffers` is the largest part of `files` that is in memory at any time in a step.
"""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send", "control")
"""Kinds of traffic.

`reduce_scatter` includes all-to-all, with which gloo implements it. `control` are the few scalars
that a step exchanges: target weight, used parameters, gradient norm, loss.
"""


_ONE_RANK = {
    **dict.fromkeys(("dp_replicate", "dp_shard", "accumulation", "tp", "cp", "ep"), 1),
    **dict.fromkeys(("shard_rank", "tp_rank", "edp_rank", "tokens"), 0),
}
"""Fields with one entry per candidate, with the values of a single rank."""


@dataclass(frozen=True)
class Ledger:
    """Memory and traffic of candidate layouts, which techniques add one after another."""

    dp_replicate: Array
    dp_shard: Array
    accumulation: Array
    """Micro-batches per optimizer step."""
    shard_rank: Array
    """Coordinate along dp_shard of the ledger's rank. Rank 0 holds the most."""
    tp: Array
    tp_rank: Array
    """Coordinate along tp of the ledger's rank. Rank 0 holds the most."""
    cp: Array
    ep: Array
    """Degree of expert parallelism: number of ranks over which a stage's experts are split."""
    edp_rank: Array
    """Coordinate of the ledger's rank among those with the same experts. Rank 0 holds the most."""
    tokens: Array
    """Tokens of a micro-batch on one data-parallel rank: samples x sequence length.

    Only the traffic of tp, cp and ep depends on them.
    """
    activations: RankActivations | None = None
    """Measured activations of a micro-batch of `tokens`, or None to leave activations out."""
    tensor_dims: Mapping[str, int | None] = field(default_factory=lambda: MappingProxyType({}))
    """Dimension that tensor parallelism splits, by parameter name. None: it is replicated."""
    sequence_parallel: Any = False
    """True if tensor parallelism also shards sequences; an array if candidates differ."""
    experts: frozenset[str] = frozenset()
    """Names of the parameters that are split over ep along their first dimension."""
    scheme: Scheme = field(default_factory=Scheme)
    """Compression of the messages between data-parallel ranks."""
    optimizer_tensors: int = 2
    """Number of parameter-shaped states of the optimizer, in the parameter's dtype (AdamW: 2)."""
    optimizer_scalar_bytes: int = 4
    """Bytes of scalar state per parameter (AdamW: one float32 step)."""
    optimizer_states: str | None = None
    """Form of the states (`precision.optimizer_states`), or None for the parameter's dtype."""
    compute_bytes: Array | None = None
    """Bytes per element of the compute dtype, or None for the dtype of the parameters."""
    reduce_bytes: Array | None = None
    """Bytes per element of the reduction's dtype, or None for the dtype of the gradients."""
    stage: StageCounts | None = None
    """Work of a pipeline rank, or None without a pipeline."""
    memory: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes per rank, by kind."""
    traffic: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes that one rank sends per optimizer step, by collective.

    They follow the ring formulas: 2 (n-1)/n of the full tensor for all-reduce, (n-1)/n for the
    others.
    """

    @classmethod
    def start(cls, **values: Any) -> Ledger:
        """Return a ledger whose values are scalars or arrays with one entry per candidate.

        Args:
            values: Fields of the ledger. Degrees are 1 and coordinates 0 if they are left out.
        """
        candidates = []
        for name, default in _ONE_RANK.items():
            value = np.asarray(values.pop(name, default), dtype=np.int64)
            candidates.append(np.atleast_1d(value))
        broadcast: dict[str, Any] = dict(
            zip(_ONE_RANK, np.broadcast_arrays(*candidates), strict=True)
        )
        return cls(**broadcast, **values)

    @classmethod
    def of_rank(
        cls,
        layout: Layout,
        coordinates: Mapping[str, int] | None = None,
        *,
        accumulation: int,
        tokens: int = 0,
        **fields: Any,
    ) -> Ledger:
        """Return a ledger for one rank of a layout.

        Args:
            layout: The layout.
            coordinates: Coordinates of the rank by axis, by default those of rank 0.
            accumulation: Micro-batches per optimizer step.
            tokens: Tokens of a micro-batch on one data-parallel rank.
            fields: Other fields of the ledger.
        """
        coordinates = coordinates or layout.coordinates(0)
        return cls.start(
            dp_replicate=layout.dp_replicate,
            dp_shard=layout.dp_shard,
            accumulation=accumulation,
            shard_rank=coordinates["dp_shard"],
            tp=layout.tp,
            tp_rank=coordinates["tp"],
            cp=layout.cp,
            ep=layout.ep,
            edp_rank=coordinates.get("edp", 0),
            tokens=tokens,
            **fields,
        )

    def add_memory(self, kind: str, count: Any) -> Ledger:
        """Return a ledger with more bytes of a kind.

        The kind is one of MEMORY_KINDS, ACTIVATION_KINDS and PLACE_KINDS.
        """
        if kind not in (*MEMORY_KINDS, *ACTIVATION_KINDS, *PLACE_KINDS):
            raise KeyError(kind)
        return replace(self, memory=_added(self.memory, kind, count))

    def add_traffic(self, collective: str, count: Any) -> Ledger:
        """Return a ledger with more bytes sent by a collective, one of COLLECTIVES."""
        if collective not in COLLECTIVES:
            raise KeyError(collective)
        return replace(self, traffic=_added(self.traffic, collective, count))

    def with_(self, **changes: Any) -> Ledger:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


def _added(table: Mapping[str, Array], key: str, count: Any) -> Mapping[str, Array]:
    return MappingProxyType({**table, key: table.get(key, 0) + np.asarray(count)})


@dataclass(frozen=True)
class ParameterPart:
    """A rank's part of a parameter, its gradient and its optimizer states, for every candidate.

    tp splits the parameter along one dimension, and dp_shard splits it along the first. All other
    axes replicate it. The counterpart of this class in a run is `parameter_layout.Reduction`.
    """

    rows: Array
    """Length of the first dimension after tp."""
    row: Array
    """Elements of a row."""
    padded: Array
    """Rows of the first rank's shard, to which other shards are padded in memory and messages."""
    local: Array
    """Rows of this rank's shard."""


def parameter_part(shape: tuple[int, ...], tensor_dim: int | None, ledger: Ledger) -> ParameterPart:
    """Return this rank's part of a parameter.

    Args:
        shape: Shape of the parameter.
        tensor_dim: Dimension that tp splits, or None.
        ledger: The candidates.
    """
    rows, row = local_rows(shape, tensor_dim, ledger)
    return ParameterPart(
        rows,
        row,
        shard_size(rows, ledger.dp_shard),
        shard_length(rows, ledger.dp_shard, ledger.shard_rank),
    )


def gradient_bytes(facts: ModelFacts, ledger: Ledger) -> Array:
    """Return the bytes of reduced gradients on this rank, without padding."""
    total = np.zeros_like(ledger.dp_shard)
    for parameter in facts.trainable:
        part = parameter_part(parameter.shape, ledger.tensor_dims.get(parameter.name), ledger)
        total = total + parameter.itemsize * part.local * part.row
    return total


def local_rows(
    shape: tuple[int, ...], tensor_dim: int | None, ledger: Ledger
) -> tuple[Array, Array]:
    """Return (rows, elements per row) of a parameter after the tp split, for every candidate."""
    rows = np.full_like(ledger.tp, shape[0] if shape else 1)
    row_numel = np.full_like(ledger.tp, prod(shape[1:]))
    if tensor_dim is None:
        return rows, row_numel
    # tp takes some of the rows, or a part of each row.
    length = shape[tensor_dim]
    local_length = shard_length(length, ledger.tp, ledger.tp_rank)
    if tensor_dim == 0:
        return local_length, row_numel
    return rows, row_numel // length * local_length


def is_sharded(ledger: Ledger) -> NDArray[np.bool_]:
    """Return True for candidates that use `fully_shard`, to shard or only to cast parameters."""
    return (ledger.dp_shard > 1) | np.asarray(ledger.compute_bytes is not None)


def of_experts(ledger: Ledger) -> Ledger:
    """Return an empty ledger with the degrees of parallelism of expert parameters.

    Experts are not replicated over dp_replicate: all ranks that have the same experts shard them.
    """
    same = ledger.dp_replicate * ledger.dp_shard * ledger.cp * ledger.tp // ledger.ep
    shards = is_sharded(ledger)
    single = np.ones_like(same)
    # ep takes the place of tp: it splits experts along their first dimension, and tp does not split
    # them.
    return ledger.with_(
        dp_replicate=np.where(shards, single, same),
        dp_shard=np.where(shards, same, single),
        shard_rank=np.where(shards, ledger.edp_rank, 0),
        tp=ledger.ep,
        tp_rank=np.zeros_like(same),
        tensor_dims=dict.fromkeys(ledger.experts, 0),
        memory={},
        traffic={},
    )


def ledger_view_of(ledger: Ledger) -> Callable[[str], Ledger]:
    """Return a function that maps a parameter's name to a ledger with that parameter's degrees."""
    if not ledger.experts:
        return lambda name: ledger
    expert_ledger = of_experts(ledger)

    def view(name: str) -> Ledger:
        if name in ledger.experts:
            return expert_ledger
        return ledger

    return view


@dataclass
class UnitBytes:
    """Bytes of one unit on one rank."""

    gathered: int = 0
    """All parameters in the compute dtype, padded to equal shards."""
    cast_shards: int = 0
    """Shards that are cast to the compute dtype. 0 if the parameters have this dtype."""
    last_parameter: int = 0
    """Size of the unit's last parameter in the compute dtype."""
    computed_gradients: int = 0
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
    """True if gradients are computed and reduced in different dtypes."""


def unit_bytes(facts: ModelFacts, ledger: Ledger) -> dict[int | str, UnitBytes]:
    """Return the bytes of every unit of a rank.

    Args:
        facts: The rank's part of the model.
        ledger: The ledger of one candidate.
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
            unit.computed_gradients += numel * compute
            unit.gradients += numel * reduce
            unit.reduce_input += shard * n * reduce
            unit.reduce_output += shard * reduce
            unit.sharded_gradients += shard * parameter.itemsize
            unit.casts_gradients = reduce != compute
    return units


class AfterBackward(NamedTuple):
    """Actions on one unit of `fully_shard` after a backward."""

    reduce: bool
    """True if the unit's gradients are reduced over dp_shard."""
    last: bool
    """True if the unit's gradients are complete, so they are also summed over dp_replicate."""
    free: bool
    """True if the unit's gathered parameters are freed."""


def reduces_gradients(zero: Any, *, last: Any) -> Any:
    """Return True if a unit reduces its gradients after a backward. Elementwise for arrays.

    Args:
        zero: The ZeRO stage.
        last: Whether it is the last backward of the unit in this step.
    """
    return (zero >= 2) | last


def frees_parameters(zero: Any, *, last: Any) -> Any:
    """Return True if a unit frees its gathered parameters after a backward.

    See `reduces_gradients`.
    """
    return (zero == 3) | last


def after_block_backward(
    zero: int, left: Mapping[int, int], *, ran: int, block_stage: int
) -> AfterBackward:
    """Return the actions on a block after a backward.

    Args:
        zero: The ZeRO stage.
        left: Backwards that each pipeline stage of the rank has left in this step, the ended one
            included.
        ran: The pipeline stage whose backward has ended.
        block_stage: The pipeline stage that the block belongs to.
    """
    # Backwards of other stages of the rank do not touch the block.
    if block_stage != ran:
        return AfterBackward(False, False, False)
    last = left[ran] == 1
    return AfterBackward(
        reduces_gradients(zero, last=last), last, frees_parameters(zero, last=last)
    )


def after_root_backward(
    zero: int, left: Mapping[int, int], *, ran: int, users: Collection[int]
) -> AfterBackward:
    """Return the actions on the root unit after a backward.

    Args:
        zero: The ZeRO stage.
        left: Backwards that each pipeline stage of the rank has left in this step, the ended one
            included.
        ran: The pipeline stage whose backward has ended. Every stage gathers the root unit.
        users: The pipeline stages of the rank that compute gradients of the root unit.
    """
    # Its gradients are complete after the last backward of the stages that use it. It is freed
    # after the last backward of any stage, because all of them gather it.
    last = ran in users and sum(left[stage] for stage in users) == 1
    return AfterBackward(
        ran in users and reduces_gradients(zero, last=last),
        last,
        frees_parameters(zero, last=sum(left.values()) == 1),
    )


def offloaded_units(facts: ModelFacts, ratio: float) -> frozenset[int]:
    """Return the units whose optimizer states are offloaded (`offload_optimizer.ratio`).

    Blocks are selected first, then everything outside them (-1), until the share of the parameters
    is at least `ratio`. The share is computed from unsharded shapes, so that every rank of a
    pipeline stage selects the same units.
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
        (parameter, padded bytes, bytes). Both sizes are those of this rank's shard. The padded one
            includes the padding to the size of the first rank's shard.
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
            part.local * part.row * parameter.itemsize,
        )
