"""The peak of a step of Plait itself on one rank: every point of the step that may be the peak, as a sum of named terms.

Besides the states these are the tensors that `fully_shard` gathers, accumulates and reduces unit by unit, and the saved tensors of the
blocks (`own`). The backward runs from the last block to the first: it frees gathered weights and activations and allocates reduced shards,
so the sum is largest at its start or its end, and only those points are computed: the first block of a backward, the second (with the
reduction of the first), the last two. The single-rank dry run (`engine.single_rank`) runs the same step on fake tensors; tests compare the
two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from plait.planner.hardware import Numbers
from plait.planner.job import RECOMPUTE, SCHEDULES, Job
from plait.planner.own import (
    block_backward,
    deferred_bytes,
    deferred_bytes_of_ends,
    embedding_mask,
    head_sums_bytes,
    hidden_width,
    kept_bytes,
    kept_of_ends,
    kept_while_recomputed,
    last_norm_backward,
    logits_bytes,
    reduces_on_host,
)

_REDUCED = 4
"""Bytes of a gradient that is added up and reduced: float32."""

_INTERLEAVED = [SCHEDULES.index("interleaved"), SCHEDULES.index("interleaved-zb")]

Terms = dict[str, Numbers]


@dataclass(frozen=True)
class Units:
    """What a rank owns, in elements of the units that are gathered and reduced together; arrays with one entry a candidate."""

    layers: Numbers
    block: Numbers
    """Of one block, after tp, padded to equal shards."""
    root: Numbers
    """Outside of the blocks."""
    head: Numbers
    """Of the matrix that makes the logits; 0 on a rank without it."""
    width: Numbers
    """Bytes of a weight in forward and backward."""
    sharded: Numbers
    """Whether `fully_shard` is used at all; otherwise weights and gradients are unsharded and stay allocated."""
    in_flight: Numbers
    """Micro-batches whose activations are held at most, in units of all layers of the rank."""
    deferred: tuple[Numbers, Numbers]
    """(in flight, those with deferred gradients of weights), in the same units, at the point with most of the second."""
    losses: Numbers
    """Micro-batches whose loss is held besides the one in backward."""
    embeds: Numbers = 0.0
    """1 on a rank that makes hidden states of tokens."""


RANKS = ("first", "last", "inner")
"""Of a pipeline: those with its two ends, and the fullest between them. Where stages form a V the first has both ends."""


@dataclass(frozen=True)
class States:
    """Bytes of model states by rank: weights, gradients, optimizer, gathered copies."""

    first: dict[str, Numbers]
    last: dict[str, Numbers]
    inner: dict[str, Numbers] | None = None
    units: Mapping[str, Units] | None = None
    """Of every rank in RANKS, where they are known."""

    def of(self, rank: str) -> dict[str, Numbers]:
        """Those of one of RANKS."""
        found = {"first": self.first, "last": self.last, "inner": self.inner}[rank]
        assert found is not None
        return found


@dataclass(frozen=True)
class _Rank:
    """One stage's rank of every candidate, with everything that the points of its step need. Bytes are of one micro-batch."""

    job: Job
    held: Terms
    units: Units
    kept: tuple[Numbers, Numbers]
    """For its backward by a block that recomputes and by one that does not."""
    spent: Numbers
    """Of what a block that recomputes kept, what it has no more use for in its backward, and still holds."""
    logits: Numbers
    head_sums: Numbers
    """Gradients of the head, added up over the chunks of a loss."""
    boundary: Numbers
    """Boundary activations that the rank's stages received and sent, and keep until the gradient has passed."""
    ahead: Numbers
    """A message that arrives before it is needed."""
    shards: Numbers
    stage: Numbers
    several: Numbers
    """Whether a step has several micro-batches."""
    block_weights: Numbers
    """Gradients of its weights at the peak of a block's backward."""
    block_working: Numbers
    """Activations and their gradients then."""
    wide: Numbers
    """Whether a reduction takes a second full buffer: a copy that torch makes where there is no other rank to reduce with, or gloo's."""


def _rank(job: Job, held: Terms, units: Units) -> _Rank:
    at = job.layouts
    none, operators, full = (np.asarray(value) * job.tokens for value in kept_bytes(job))
    kind = np.asarray(at.recompute).astype(int)
    kept = np.choose(kind, np.broadcast_arrays(none, none, full, operators, full + at.kept_operators * (operators - full)))
    shards = np.asarray(at.dp_shard)
    # In a block that computes itself again a stage's input is what the block keeps.
    whole_blocks = kind == RECOMPUTE.index("full")
    by_operators, by_all = kept_while_recomputed(job)
    spent = np.choose(kind, np.broadcast_arrays(0.0, 0.0, by_all, by_operators, by_operators))
    message = np.where(np.asarray(at.pp) > 1, job.element_bytes * job.tokens * hidden_width(job), 0)
    width = np.where(units.sharded, units.width, _REDUCED)
    worst = [(width * moment.weights, moment.token_bytes * job.tokens) for moment in block_backward(job)]
    shape = np.broadcast_shapes(*(np.shape(a + b) for a, b in worst))
    most = np.argmax(np.stack([np.broadcast_to(a + b, shape) for a, b in worst]), axis=0)
    return _Rank(
        job=job,
        held=held,
        units=units,
        kept=(kept, none),
        spent=spent * job.tokens,
        logits=logits_bytes(job),
        head_sums=head_sums_bytes(job, width=units.width) * units.head,
        boundary=np.where(whole_blocks, np.asarray(at.vpp), 2 * np.asarray(at.vpp) - 1) * message,
        ahead=message,
        shards=shards,
        stage=np.asarray(at.stage),
        several=np.asarray(at.accumulation) > 1,
        block_weights=np.choose(most, [np.broadcast_to(a, shape) for a, _ in worst]),
        block_working=np.choose(most, [np.broadcast_to(b, shape) for _, b in worst]),
        wide=reduces_on_host(job) | (shards == 1),
    )


MOMENTS = (
    "forward of a block",
    "loss",
    "backward of the last norm",
    "backward of a block",
    "reduction of a block",
    "reduction of embedding and head",
    "optimizer step",
)


def moments(job: Job, held: Terms, units: Units) -> Iterator[tuple[int, Terms]]:
    """(index into MOMENTS, bytes by term) of every point of a step on one rank."""
    rank = _rank(job, held, units)
    for name, part in _parts(rank):
        yield MOMENTS.index(name), part | {"weights": held["weights"], "optimizer": held["optimizer"]}


def _parts(rank: _Rank) -> Iterator[tuple[str, Terms]]:
    units = rank.units
    layers, flight = units.layers, units.in_flight
    alone = _kept(rank, layers) + rank.boundary + units.embeds * embedding_mask(rank.job) * rank.job.tokens
    deepest = flight * alone + rank.ahead + units.losses * kept_of_ends(rank.job) * rank.job.tokens
    adds_up = _adds_up(rank)
    # The first backward of as many micro-batches as are in flight finds nothing added up yet.
    fresh = np.asarray(rank.job.layouts.accumulation) <= flight
    yield from _loss(rank, np.where(fresh, np.maximum(deepest - alone, alone), deepest), adds_up)
    yield from _backward(rank, np.where(fresh, np.maximum(deepest - alone, alone), deepest), adds_up)
    if np.any(fresh & rank.several):
        yield from _loss(rank, deepest, np.where(fresh, 0.0, adds_up))
        yield from _backward(rank, deepest, np.where(fresh, 0.0, adds_up))
    held, deferred = units.deferred
    if np.any(deferred > 0):
        ends = np.where(np.asarray(units.head) > 0, deferred_bytes_of_ends(rank.job), 0.0)
        more = deferred * (layers * deferred_bytes(rank.job) + ends) * rank.job.tokens
        yield from _backward(rank, np.where(deferred > 0, held * alone + rank.ahead + more, alone), adds_up)
    if np.any((np.asarray(rank.job.layouts.pp) > 1) & (rank.stage == 3)):
        # Where stages alternate, the block that is computed and the two to come are gathered in a forward too.
        transient = (6 * rank.job.model.hidden + 7 * hidden_width(rank.job)) * rank.job.element_bytes / 2 * rank.job.tokens
        forward = {"gradients": adds_up, "gathered": _gathered(rank, left=2, ahead=2), "activations": deepest, "working": transient}
        yield "forward of a block", _where((np.asarray(rank.job.layouts.pp) > 1) & (rank.stage == 3), forward)
    for done in (0, 1, np.maximum(layers - 2, 0), layers - 1):
        yield from _block(rank, alone, adds_up, done=done, last=True)
    yield from _ends(rank, alone, adds_up, last=True)
    yield "optimizer step", {"gradients": _shard_bytes(rank)}


def _loss(rank: _Rank, activations: Numbers, added: Numbers) -> Iterator[tuple[str, Terms]]:
    """With `activations` kept and gradients `added` up."""
    headed = np.asarray(rank.units.head) > 0
    if not np.any(headed):
        return
    loss = {"gradients": added + rank.head_sums, "gathered": _gathered(rank, left=rank.units.layers, ahead=0), "activations": activations}
    yield "loss", _where(headed, loss | {"logits": rank.logits})


def _backward(rank: _Rank, activations: Numbers, added: Numbers) -> Iterator[tuple[str, Terms]]:
    """Of a micro-batch that is not the last, with `activations` kept and gradients `added` up."""
    units = rank.units
    headed = np.asarray(units.head) > 0
    if np.any(headed):
        norm = {"gradients": added + units.width * units.head, "gathered": _gathered(rank, left=units.layers, ahead=1)}
        norm |= {"activations": activations, "working": last_norm_backward(rank.job) * rank.job.tokens}
        yield "backward of the last norm", _where(headed, norm)
    yield from _block(rank, activations, added, done=0, last=False)
    yield from _block(rank, activations, added, done=1, last=False)
    if np.any(_reduces(rank, last=False)):
        yield from _ends(rank, activations, added, last=False)


def _kept(rank: _Rank, blocks: Numbers) -> Numbers:
    """By the first `blocks`, of one micro-batch."""
    again, whole = rank.kept
    recomputing = np.ceil(blocks / rank.job.layouts.every)
    return recomputing * again + (blocks - recomputing) * whole


def _where(there: Numbers, part: Terms) -> Terms:
    """Nothing where a step has no such point."""
    return {name: np.where(there, value, 0.0) for name, value in part.items()}


def _shard_bytes(rank: _Rank) -> Numbers:
    units = rank.units
    return (1 - rank.held["offloaded"]) * _REDUCED * (units.layers * units.block + units.root) / rank.shards


def _adds_up(rank: _Rank) -> Numbers:
    """Gradients that are there before the last backward."""
    units, at = rank.units, rank.job.layouts
    # With no more micro-batches than ranks, interleaved stages end their steps one after the other.
    turns = np.isin(np.asarray(at.schedule), _INTERLEAVED) & (np.asarray(at.accumulation) <= at.pp)
    whole = _REDUCED * (units.layers * units.block / np.where(turns, at.vpp, 1) + units.root)
    return np.where(rank.several, np.where(rank.stage <= 1, whole, _shard_bytes(rank)), 0.0)


def _gathered(rank: _Rank, *, left: Numbers, ahead: int) -> Numbers:
    """Weights in the dtype of computation, where `left` blocks have them; at stage 3 only `ahead` of the blocks to come, and the root."""
    units = rank.units
    blocks = np.where(rank.stage == 3, np.minimum(ahead, left), left)
    return np.where(units.sharded, units.width * (units.root + blocks * units.block), 0.0)


def _reduces(rank: _Rank, last: bool) -> Numbers:
    """Whether units reduce their gradients at the end of this backward."""
    return np.asarray(rank.units.sharded, dtype=bool) & (last | (rank.stage >= 2))


def _buffers(rank: _Rank, elements: Numbers, *, added: Numbers) -> Numbers:
    """Of the reduction of a unit: its gradients in a row, and a second time what they are made of or what they become."""
    source = np.where(added > 0, _REDUCED, rank.units.width)
    return elements * (_REDUCED + np.where(rank.wide, _REDUCED, source))


def _block(rank: _Rank, activations: Numbers, added: Numbers, *, done: Numbers, last: bool) -> Iterator[tuple[str, Terms]]:
    """The backward of a block when `done` have had theirs, and the reduction at its end."""
    units, tokens = rank.units, rank.job.tokens
    added, done = np.asarray(added), np.asarray(done)
    reduces = _reduces(rank, last)
    there = (done < units.layers) & ((done == 0) | reduces)
    if not np.any(there):
        return
    sums = (rank.stage <= 1) & (added > 0)  # unsharded gradients, which a block's reduction frees
    shards = (1 - rank.held["offloaded"]) * _REDUCED * units.block / rank.shards
    change = np.where(sums, -_REDUCED * units.block, 0.0) + np.where((added > 0) & ~sums, 0.0, shards)
    head = units.width * units.head
    freed = last | (rank.stage == 3)
    left = units.layers - 1 - done
    stays = activations - (_kept(rank, units.layers) - _kept(rank, left))
    working = rank.block_working + np.where(left % rank.job.layouts.every == 0, rank.spent, 0.0)
    before = np.where(reduces & (done > 0), _REDUCED * units.block, 0.0)  # the row of the block before is still there
    gathered = _gathered(rank, left=units.layers - np.where(freed, done, 0), ahead=2) + before
    grads = added + np.where(reduces, done * change, 0.0) + head + rank.block_weights
    terms = {"gradients": grads, "gathered": gathered, "activations": stays, "working": working}
    yield "backward of a block", _where(there, terms)
    if not np.any(there & reduces):
        return
    again = np.where((added > 0) & ~sums, shards, 0.0)  # the new shards, before they are added
    terms = {
        "gradients": added + (done + 1) * change + again + head,
        "gathered": _gathered(rank, left=units.layers - np.where(freed, done + 1, 0), ahead=1)
        + _buffers(rank, units.block, added=np.where(sums, added, 0)),
        "activations": stays,
        "working": rank.job.element_bytes * tokens * hidden_width(rank.job),
    }
    yield "reduction of a block", _where(there & reduces, terms)


def _ends(rank: _Rank, activations: Numbers, added: Numbers, *, last: bool) -> Iterator[tuple[str, Terms]]:
    """The reduction of what is outside of the blocks."""
    units, added = rank.units, np.asarray(added)
    sums = (rank.stage <= 1) & (added > 0)
    again = np.where((added > 0) & ~sums & (np.asarray(rank.held["offloaded"]) < 1), _REDUCED * units.root / rank.shards, 0.0)
    freed = last | (rank.stage == 3)
    terms = {
        "gradients": _shard_bytes(rank) + again,
        "gathered": np.where(freed, 0.0, _gathered(rank, left=units.layers, ahead=0))
        + _buffers(rank, units.root, added=np.where(sums, added, 0)),
        "activations": np.maximum(activations - _kept(rank, units.layers), 0.0),
    }
    yield "reduction of embedding and head", _where(_reduces(rank, last), terms)
