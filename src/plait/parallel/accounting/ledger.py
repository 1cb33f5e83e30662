"""The account of a layout in bytes: what every technique writes into and the planner reads from.

All figures are NumPy arrays with one entry a candidate layout, so that a whole search space is
priced in one call. Figures are per rank and exact: what a process measures is what is written here
(`verify` compares them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.model.facts import ModelFacts
from plait.parallel.accounting.compression_scheme import Scheme
from plait.shards import shard_length, shard_size

if TYPE_CHECKING:
    from plait.cluster.layout import Layout
    from plait.parallel.accounting.activations import RankActivations

Array = NDArray[np.int64]


@dataclass(frozen=True)
class StageCounts:
    """What one rank of a pipeline does in a step, counted from its schedule's table (see
    `pipeline.account`).
    """

    root_gathers: Array
    """How often ZeRO stage 3 gathers what is outside of the blocks."""
    ends: Array
    """How many of the model's two ends, the front and the back, are here."""
    root_reduces: Array
    """Backwards of the stages that own something outside of the blocks: how often ZeRO stages 2 and
    3 reduce it.
    """
    sends: Array
    """Tensors sent to other stages: activations and their gradients."""
    boundary_bytes: Array
    """Bytes of one of them."""
    shared_bytes: Array
    """2 (n - 1) / n bytes of the gradients that n stages share, after sharding: what their sum
    sends.
    """


MEMORY_KINDS = (
    "parameters",
    "gathered_parameters",
    "gradients",
    "unsharded_gradients",
    "optimizer",
    "compression",
)
"""`parameters`, `gradients`, `optimizer` and `compression` (its errors) are what a rank holds just
before the optimizer step; `gathered_parameters` and `unsharded_gradients` are what it holds in
addition between two micro-batches of a step; in a pipeline, `pipeline.account.held_after` tells
them for every computation.
"""

ACTIVATION_KINDS = ("activations", "logits", "returning_activations", "stored_activations")
"""What a micro-batch keeps on the device from forward to backward, in blocks and before them, and
after them (head, loss); the most that one block's backward recomputes or prefetches; and what is in
host memory or on disk. For every micro-batch that is between its forward and its backward.
"""

PLACE_KINDS = ("host", "files", "step_buffers")
"""How much of `parameters`, `gradients` and `optimizer` is in host memory or in files, and the most
of the latter which is in memory during a step.
"""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send", "control")
"""`reduce_scatter` includes all-to-all, with which gloo carries it out. `control` is the few
scalars a step agrees on: target weight, used parameters, gradient norm, loss.
"""


@dataclass(frozen=True)
class Ledger:
    """Candidates and what they cost so far."""

    dp_replicate: Array
    dp_shard: Array
    accumulation: Array
    """Micro-batches per optimizer step."""
    shard_rank: Array
    """Which rank of the dp_shard axis is priced; 0 holds the most."""
    tp: Array
    tp_rank: Array
    """Which rank of the tp axis is priced; 0 holds the most."""
    cp: Array
    ep: Array
    """How many of the ranks of a stage have different experts."""
    edp_rank: Array
    """Which of the ranks that have the same experts is priced; 0 holds the most."""
    tokens: Array
    """Tokens of a micro-batch on one data-parallel rank: samples x sequence length. Only the
    traffic of tp and cp grows with them.
    """
    activations: RankActivations | None = None
    """What one micro-batch of these tokens keeps, measured; None leaves activations out of the
    account.
    """
    tensor_dims: Mapping[str, int | None] = field(default_factory=lambda: MappingProxyType({}))
    """Parameter name to the dimension that tensor parallelism splits; parameters not named are
    replicated.
    """
    sequence_parallel: Any = False
    """Whether tensor parallelism shards sequences too; an array where it differs."""
    experts: frozenset[str] = frozenset()
    """Names of the parameters that are split over ep along their first dimension."""
    scheme: Scheme = field(default_factory=Scheme)
    """How messages between data-parallel ranks are compressed."""
    optimizer_tensors: int = 2
    """Parameter-shaped states of the optimizer, in the parameter's dtype (AdamW: 2)."""
    optimizer_scalar_bytes: int = 4
    """Bytes of scalar state per parameter (AdamW: one float32 step)."""
    optimizer_states: str | None = None
    """The form of these states, see `optimizer_states`."""
    compute_bytes: Array | None = None
    """Bytes per element of the compute dtype; None where parameters keep their own."""
    reduce_bytes: Array | None = None
    """Bytes per element of the reduction dtype; None where gradients keep their own."""
    stage: StageCounts | None = None
    """The pipeline's part; None without a pipeline."""
    memory: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Kind to bytes per rank."""
    traffic: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    """Collective to bytes that one rank sends per optimizer step, by the ring formulas: all-reduce
    2 (n-1)/n, the others (n-1)/n of the full tensor.
    """

    @classmethod
    def start(
        cls,
        *,
        dp_replicate: Any = 1,
        dp_shard: Any = 1,
        accumulation: Any = 1,
        shard_rank: Any = 0,
        tp: Any = 1,
        tp_rank: Any = 0,
        cp: Any = 1,
        ep: Any = 1,
        edp_rank: Any = 0,
        tokens: Any = 0,
        **fields: Any,
    ) -> Ledger:
        """A ledger for scalars or arrays of candidates, broadcast against each other."""
        given = (
            dp_replicate,
            dp_shard,
            accumulation,
            shard_rank,
            tp,
            tp_rank,
            cp,
            ep,
            edp_rank,
            tokens,
        )
        names = (
            "dp_replicate",
            "dp_shard",
            "accumulation",
            "shard_rank",
            "tp",
            "tp_rank",
            "cp",
            "ep",
            "edp_rank",
            "tokens",
        )
        arrays = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(value, dtype=np.int64)) for value in given)
        )
        axes: dict[str, Any] = dict(zip(names, arrays, strict=True))
        return cls(**axes, **fields)

    @classmethod
    def of_rank(
        cls,
        layout: Layout,
        at: Mapping[str, int] | None = None,
        *,
        accumulation: int,
        tokens: int = 0,
        **fields: Any,
    ) -> Ledger:
        """A ledger for one rank of one layout; `at` are its coordinates by axis, by default those
        of rank 0.
        """
        at = at or layout.coordinates(0)
        return cls.start(
            dp_replicate=layout.dp_replicate,
            dp_shard=layout.dp_shard,
            accumulation=accumulation,
            shard_rank=at["dp_shard"],
            tp=layout.tp,
            tp_rank=at["tp"],
            cp=layout.cp,
            ep=layout.ep,
            edp_rank=at.get("edp", 0),
            tokens=tokens,
            **fields,
        )

    def add_memory(self, kind: str, count: Any) -> Ledger:
        """More bytes of a kind (see MEMORY_KINDS, ACTIVATION_KINDS and PLACE_KINDS)."""
        if kind not in (*MEMORY_KINDS, *ACTIVATION_KINDS, *PLACE_KINDS):
            raise KeyError(kind)
        return replace(self, memory=_added(self.memory, kind, count))

    def add_traffic(self, collective: str, count: Any) -> Ledger:
        """More bytes sent by a collective (see COLLECTIVES)."""
        if collective not in COLLECTIVES:
            raise KeyError(collective)
        return replace(self, traffic=_added(self.traffic, collective, count))

    def with_(self, **changes: Any) -> Ledger:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def _added(table: Mapping[str, Array], key: str, count: Any) -> Mapping[str, Array]:
    return MappingProxyType({**table, key: table.get(key, 0) + np.asarray(count)})


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter, of its gradient and of its optimizer states, for every
    candidate: tp splits it along one dimension, then dp_shard along the first. Over the other axes
    it is replicated. The run-time counterpart is `reduction.Reduction`.
    """

    rows: Array
    """Of the first dimension, after tp."""
    row: Array
    """Elements of one of them."""
    padded: Array
    """Rows of the first rank's shard: the others are stored and sent padded to them."""
    held: Array
    """Rows of this rank's shard."""


def part_of(shape: tuple[int, ...], tensor_dim: int | None, ledger: Ledger) -> Part:
    """Of a parameter of this shape that tp splits along `tensor_dim`, None for none."""
    rows, row = local_rows(shape, tensor_dim, ledger)
    return Part(
        rows,
        row,
        shard_size(rows, ledger.dp_shard),
        shard_length(rows, ledger.dp_shard, ledger.shard_rank),
    )


def gradient_bytes(facts: ModelFacts, ledger: Ledger) -> Array:
    """What this rank holds of the gradients once they are reduced, without padding."""
    parts = [
        (p.itemsize, part_of(p.shape, ledger.tensor_dims.get(p.name), ledger))
        for p in facts.trainable
    ]
    return sum(
        (itemsize * part.held * part.row for itemsize, part in parts),
        start=np.zeros_like(ledger.dp_shard),
    )


def local_rows(
    shape: tuple[int, ...], tensor_dim: int | None, ledger: Ledger
) -> tuple[Array, Array]:
    """(rows, elements of a row) of a parameter after the tp axis took its part, for every
    candidate.
    """
    rows = np.full_like(ledger.tp, shape[0] if shape else 1)
    row_numel = np.full_like(ledger.tp, prod(shape[1:]))
    if tensor_dim is None:
        return rows, row_numel
    length = shape[tensor_dim]
    part = shard_length(length, ledger.tp, ledger.tp_rank)
    return (part, row_numel) if tensor_dim == 0 else (rows, row_numel // length * part)
