"""The peak of a step of Plait itself on one rank: every point of the step that may be the peak, as
a sum of named terms.

Besides the states these are the tensors that `fully_shard` gathers, accumulates and reduces unit by
unit, and the saved tensors of the blocks (`own`). The backward runs from the last block to the
first: it frees gathered weights and activations and allocates reduced shards, so the sum is largest
at its start or its end, and only those points are computed: the first block of a backward, the
second (with the reduction of the first), the last two. The single-rank dry run
(`engine.single_rank`) runs the same step on fake tensors; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from plait.planner.hardware import Numbers
from plait.planner.holdings import Holding, Holdings
from plait.planner.job import RECOMPUTE, Job
from plait.planner.own import (
    block_backward,
    deferred_bytes,
    deferred_bytes_of_ends,
    embedding_mask,
    head_sums_bytes,
    hidden_width,
    kept_bytes,
    kept_head_gradient_bytes,
    kept_of_ends,
    kept_while_recomputed,
    last_norm_backward,
    logits_bytes,
    reduces_on_host,
)

_REDUCED = 4
"""Bytes of a gradient that is added up and reduced: float32."""

Terms = dict[str, Numbers]


@dataclass(frozen=True)
class Units:
    """What a rank owns, in elements of the units that are gathered and reduced together; arrays
    with one entry a candidate.
    """

    layers: Numbers
    block: Numbers
    """Of one block, after tp, padded to equal shards."""
    root: Numbers
    """Outside of the blocks, in the root unit and in outer units."""
    embedding_units: Numbers
    """Of embeddings that are outer units. Stage 3 frees them after their forward."""
    head_unit: Numbers
    """Of a head that is an outer unit. It is reduced after its backward."""
    late_unit: Numbers
    """Of the largest unit that is reduced after the backward of the blocks."""
    head: Numbers
    """Of the matrix that makes the logits; 0 on a rank without it."""
    width: Numbers
    """Bytes of a weight in forward and backward."""
    sharded: Numbers
    """Whether `fully_shard` is used at all; otherwise weights and gradients are unsharded and stay
    allocated.
    """
    held: Holdings
    """What its stages hold for micro-batches in flight."""


RANKS = ("first", "last", "inner")
"""Of a pipeline: those with its two ends, and the fullest between them. Where stages form a V the
first has both ends.
"""


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
    """One stage's rank of every candidate, with everything that the points of its step need. Bytes
    are of one micro-batch.
    """

    job: Job
    held: Terms
    units: Units
    kept: tuple[Numbers, Numbers]
    """For its backward by a block that recomputes and by one that does not."""
    spent: Numbers
    """Of what a block that recomputes kept, what it has no more use for in its backward, and still
    holds.
    """
    logits: Numbers
    head_sums: Numbers
    """Gradients of the head, added up over the chunks of a loss."""
    hidden: Numbers
    """Hidden states."""
    message: Numbers
    """A boundary activation, which is kept until the gradient has passed; one arrives before it is
    needed.
    """
    mask: Numbers
    """Kept by the embedding."""
    kept_by_loss: Numbers
    """Kept by what is behind the last block."""
    deferred: tuple[Numbers, Numbers]
    """Bytes kept for deferred weight gradients: per token of a block, and of what follows the last
    block.
    """
    shards: Numbers
    stage: Numbers
    block_weights: Numbers
    """Gradients of its weights at the peak of a block's backward."""
    block_working: Numbers
    """Activations and their gradients then."""
    wide: Numbers
    """Whether a reduction takes a second full buffer: a copy that torch makes where there is no
    other rank to reduce with, or gloo's.
    """


@dataclass(frozen=True)
class _Point:
    """What a rank holds at one moment, in bytes."""

    holding: Holding
    activations: Numbers
    added: Numbers
    """Gradients."""


def _rank(job: Job, held: Terms, units: Units) -> _Rank:
    at = job.layouts
    none, operators, full = (np.asarray(value) * job.tokens for value in kept_bytes(job))
    kind = np.asarray(at.recompute).astype(int)
    kept = np.choose(
        kind,
        np.broadcast_arrays(
            none, none, full, operators, full + at.kept_operators * (operators - full)
        ),
    )
    shards = np.asarray(at.dp_shard)
    by_operators, by_all = kept_while_recomputed(job)
    spent = np.choose(kind, np.broadcast_arrays(0.0, 0.0, by_all, by_operators, by_operators))
    hidden = job.element_bytes * job.tokens * hidden_width(job)
    width = np.where(units.sharded, units.width, _REDUCED)
    worst = [
        (width * moment.weights, moment.token_bytes * job.tokens) for moment in block_backward(job)
    ]
    shape = np.broadcast_shapes(*(np.shape(a + b) for a, b in worst))
    most = np.argmax(np.stack([np.broadcast_to(a + b, shape) for a, b in worst]), axis=0)
    head_gradient = kept_head_gradient_bytes(job, width=units.width) * units.head
    return _Rank(
        job=job,
        held=held,
        units=units,
        kept=(kept, none),
        spent=spent * job.tokens,
        logits=logits_bytes(job),
        head_sums=head_sums_bytes(job, width=units.width) * units.head,
        hidden=hidden,
        message=np.where(np.asarray(at.pp) > 1, hidden, 0),
        mask=embedding_mask(job) * job.tokens,
        kept_by_loss=kept_of_ends(job) * job.tokens + head_gradient,
        deferred=(deferred_bytes(job), deferred_bytes_of_ends(job) * job.tokens + head_gradient),
        shards=shards,
        stage=np.asarray(at.stage),
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
    "reduction of the head",
    "reduction of embedding and head",
    "optimizer step",
)


def moments(job: Job, held: Terms, units: Units) -> Iterator[tuple[int, Terms]]:
    """(index into MOMENTS, bytes by term) of every point of a step on one rank."""
    rank = _rank(job, held, units)
    for name, part in _parts(rank):
        yield (
            MOMENTS.index(name),
            part
            | {
                "weights": held["weights"],
                "optimizer": held["optimizer"],
            },
        )


def _parts(rank: _Rank) -> Iterator[tuple[str, Terms]]:
    held = rank.units.held
    running = []
    for among in (held.headed, held.others):
        if not np.any(among.running):
            continue
        point = _point(rank, _largest(rank, among))
        running.append(point)
        if among is held.headed:
            yield from _with(point, _loss(rank, point))
        yield from _with(point, _backward(rank, point))
    staged = np.asarray(rank.job.layouts.pp) > 1
    if np.any(staged & (rank.stage == 3)):
        # Where stages alternate, the block that is computed and the two to come are gathered in a
        # forward too.
        transient = (
            3 * rank.job.model.hidden * rank.job.element_bytes * rank.job.tokens + 3.5 * rank.hidden
        )
        for point in running:
            forward = {"gradients": point.added, "gathered": _gathered(rank, left=2, ahead=2)}
            forward |= {"activations": point.activations, "working": transient}
            yield (
                "forward of a block",
                _where(staged & (rank.stage == 3) & (point.holding.running > 0), forward),
            )
    closing = _point(rank, held.closing)
    yield from _head(rank, closing, last=True)
    for done in (0, 1, np.maximum(held.closing.running - 2, 0), held.closing.running - 1):
        yield from _block(rank, closing, done=done, last=True)
    yield from _ends(rank, closing, last=True)
    if held.endings is not None and np.any(np.asarray(rank.job.layouts.vpp) > 1):
        ending = _point(rank, _largest(rank, held.endings))
        for done in (0, 1):
            yield from _block(rank, ending, done=done, last=True)
        yield from _ends(rank, ending, last=True)
    yield "optimizer step", {"gradients": _shard_bytes(rank)}


def _largest(rank: _Rank, among: Holding) -> Holding:
    """Of COUNT moments the one of most bytes, of every candidate."""
    sums = _activations(rank, among) + _added(rank, among) + _there(rank, among)
    most = np.argmax(sums, axis=0)[None]
    return Holding(
        *(
            np.take_along_axis(getattr(among, field.name), most, axis=0)[0]
            for field in fields(Holding)
        )
    )


def _there(rank: _Rank, holding: Holding) -> Numbers:
    """Gathered weights of the blocks whose stages have not ended."""
    return _gathered(rank, left=rank.units.layers - holding.ended, ahead=1)


def _point(rank: _Rank, holding: Holding) -> _Point:
    return _Point(holding, _activations(rank, holding), _added(rank, holding))


def _with(point: _Point, parts: Iterator[tuple[str, Terms]]) -> Iterator[tuple[str, Terms]]:
    for name, part in parts:
        yield name, _where(point.holding.running > 0, part)


def _activations(rank: _Rank, holding: Holding) -> Numbers:
    """Saved tensors that are held, with what passes between stages."""
    job = rank.job
    units = rank.units
    # In a block that computes itself again a stage's input is what the block keeps.
    whole_blocks = np.asarray(job.layouts.recompute) == RECOMPUTE.index("full")
    messages: Numbers = np.where(whole_blocks, holding.inputs, holding.messages)
    blocks = holding.blocks / np.maximum(units.layers, 1) * _kept(rank, units.layers)
    held = (
        blocks
        + messages * rank.message
        + holding.fronts * rank.mask
        + holding.losses * rank.kept_by_loss
    )
    if not np.any(holding.deferred > 0):
        return held
    block, ends = rank.deferred
    return held + holding.deferred * block * job.tokens + holding.late_losses * ends


def _added(rank: _Rank, holding: Holding) -> Numbers:
    """Gradients that are there before a backward: unsharded, where they are added up until a
    stage's last, else shards.
    """
    units = rank.units
    growing = holding.growing * units.block + holding.root * units.root
    ended = holding.ended * units.block + holding.root_ended * units.root
    shard = (1 - rank.held["offloaded"]) * _REDUCED / rank.shards
    return np.where(rank.stage <= 1, _REDUCED * growing + shard * ended, shard * (growing + ended))


def _loss(rank: _Rank, point: _Point) -> Iterator[tuple[str, Terms]]:
    """Of the model's last stage."""
    yield (
        "loss",
        {
            "gradients": point.added + rank.head_sums,
            "gathered": _gathered(rank, left=rank.units.layers - point.holding.ended, ahead=0),
            "activations": point.activations,
            "logits": rank.logits,
        },
    )


def _backward(rank: _Rank, point: _Point) -> Iterator[tuple[str, Terms]]:
    """Of a micro-batch that is not the last."""
    units = rank.units
    added = point.added
    if np.any(point.holding.head):
        norm = {
            "gradients": added + _of_head(rank, point, last=False),
            "gathered": (
                _gathered(
                    rank,
                    left=units.layers - point.holding.ended,
                    ahead=1,
                    after_head=rank.stage == 3,
                )
                + np.where(_reduces(rank, last=False), _REDUCED * units.head_unit, 0.0)
            ),
        }
        norm |= {
            "activations": point.activations,
            "working": last_norm_backward(rank.job) * rank.job.tokens,
        }
        yield "backward of the last norm", norm
        yield from _head(rank, point, last=False)
    yield from _block(rank, point, done=0, last=False)
    yield from _block(rank, point, done=1, last=False)
    if np.any(_reduces(rank, last=False)):
        yield from _ends(rank, point, last=False)


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
    return (
        (1 - rank.held["offloaded"])
        * _REDUCED
        * (units.layers * units.block + units.root)
        / rank.shards
    )


def _gathered(rank: _Rank, *, left: Numbers, ahead: int, after_head: Numbers = False) -> Numbers:
    """Return the bytes of gathered weights in the dtype of computation.

    Args: rank: The rank. left: Blocks whose weights are gathered. ahead: Largest number of gathered
        blocks at stage 3. Stage 3 also frees embeddings that are outer
            units.
        after_head: Whether a head that is an outer unit has been freed.
    """
    units = rank.units
    blocks = np.where(rank.stage == 3, np.minimum(ahead, left), left)
    ends = (
        units.root
        - np.where(rank.stage == 3, units.embedding_units, 0.0)
        - np.where(after_head, units.head_unit, 0.0)
    )
    return np.where(units.sharded, units.width * (ends + blocks * units.block), 0.0)


def _adds_up(rank: _Rank, point: _Point) -> Numbers:
    """Return whether unsharded gradients of earlier micro-batches exist. The reduction of a unit
    frees its own.
    """
    return (rank.stage <= 1) & (np.asarray(point.holding.growing) > 0)


def _change(rank: _Rank, point: _Point, elements: Numbers) -> Numbers:
    """Return the bytes of gradients that the reduction of a unit adds (positive) or frees
    (negative).
    """
    sums = _adds_up(rank, point)
    shards = (1 - rank.held["offloaded"]) * _REDUCED * elements / rank.shards
    has_no_shards = (np.asarray(point.added) == 0) | sums
    return np.where(sums, -_REDUCED * elements, 0.0) + np.where(has_no_shards, shards, 0.0)


def _of_head(rank: _Rank, point: _Point, *, last: bool) -> Numbers:
    """Return the bytes of the head's gradients after its backward: of shards if it is an outer unit
    that is reduced.
    """
    units = rank.units
    reduced = _reduces(rank, last) & (units.head_unit > 0)
    return point.holding.head * np.where(
        reduced, _change(rank, point, units.head_unit), units.width * units.head
    )


def _head(rank: _Rank, point: _Point, *, last: bool) -> Iterator[tuple[str, Terms]]:
    """Yield the memory at the reduction of a head that is an outer unit."""
    units = rank.units
    added = np.asarray(point.added)
    there = _reduces(rank, last) & (units.head_unit > 0) & (np.asarray(point.holding.head) > 0)
    if not np.any(there):
        return
    sums = _adds_up(rank, point)
    shards = (1 - rank.held["offloaded"]) * _REDUCED * units.head_unit / rank.shards
    terms = {
        "gradients": (
            added
            + _change(rank, point, units.head_unit)
            + np.where((added > 0) & ~sums, shards, 0.0)
        ),
        "gathered": (
            _gathered(
                rank,
                left=units.layers - point.holding.ended,
                ahead=1,
                after_head=last | (rank.stage == 3),
            )
            + _buffers(rank, units.head_unit, added=np.where(sums, added, 0))
        ),
        "activations": point.activations,
        "working": rank.hidden,
    }
    yield "reduction of the head", _where(there, terms)


def _reduces(rank: _Rank, last: bool) -> Numbers:
    """Whether units reduce their gradients at the end of this backward."""
    return np.asarray(rank.units.sharded, dtype=bool) & (last | (rank.stage >= 2))


def _buffers(rank: _Rank, elements: Numbers, *, added: Numbers) -> Numbers:
    """Of the reduction of a unit: its gradients in a row, and a second time what they are made of
    or what they become.
    """
    source = np.where(added > 0, _REDUCED, rank.units.width)
    return elements * (_REDUCED + np.where(rank.wide, _REDUCED, source))


def _block(rank: _Rank, point: _Point, *, done: Numbers, last: bool) -> Iterator[tuple[str, Terms]]:
    """The backward of a block of the running stage when `done` have had theirs, and the reduction
    at its end.
    """
    units = rank.units
    added = np.asarray(point.added)
    done = np.asarray(done)
    running = np.asarray(point.holding.running)
    reduces = _reduces(rank, last)
    there = (done < running) & ((done == 0) | reduces)
    if not np.any(there):
        return
    sums = _adds_up(rank, point)
    shards = (1 - rank.held["offloaded"]) * _REDUCED * units.block / rank.shards
    change = _change(rank, point, units.block)
    of_head = _of_head(rank, point, last=last)
    freed = last | (rank.stage == 3)
    left = running - 1 - done
    gathered = units.layers - point.holding.ended
    stays = point.activations - (_kept(rank, running) - _kept(rank, left))
    working = rank.block_working + np.where(left % rank.job.layouts.every == 0, rank.spent, 0.0)
    # The flat buffer of the unit that was reduced before still exists.
    before = np.where(
        reduces,
        _REDUCED * np.where(done > 0, units.block, point.holding.head * units.head_unit),
        0.0,
    )
    terms = {
        "gradients": added + np.where(reduces, done * change, 0.0) + of_head + rank.block_weights,
        "gathered": (
            _gathered(rank, left=gathered - np.where(freed, done, 0), ahead=2, after_head=freed)
            + before
        ),
        "activations": stays,
        "working": working,
    }
    yield "backward of a block", _where(there, terms)
    if not np.any(there & reduces):
        return
    again = np.where((added > 0) & ~sums, shards, 0.0)  # the new shards, before they are added
    terms = {
        "gradients": added + (done + 1) * change + again + of_head,
        "gathered": (
            _gathered(rank, left=gathered - np.where(freed, done + 1, 0), ahead=1, after_head=freed)
            + _buffers(rank, units.block, added=np.where(sums, added, 0))
        ),
        "activations": stays,
        "working": rank.hidden,
    }
    yield "reduction of a block", _where(there & reduces, terms)


def _ends(rank: _Rank, point: _Point, *, last: bool) -> Iterator[tuple[str, Terms]]:
    """The reduction of what is outside of the blocks."""
    units = rank.units
    added = np.asarray(point.added)
    sums = (rank.stage <= 1) & (added > 0)
    shard = (1 - rank.held["offloaded"]) * _REDUCED / rank.shards
    again = np.where((added > 0) & ~sums, shard * units.late_unit, 0.0)
    others = units.layers - point.holding.running - point.holding.ended
    # Unsharded gradients of stages that have not ended, which add up until they have.
    apart = np.where(
        sums, np.minimum(others, np.maximum(point.holding.growing - point.holding.running, 0)), 0.0
    )
    freed = last | (rank.stage == 3)
    left = np.where(freed, others, units.layers - point.holding.ended)
    whole = np.where(
        freed & (np.asarray(left) == 0), 0.0, _gathered(rank, left=left, ahead=0, after_head=freed)
    )
    terms = {
        "gradients": (
            shard * ((units.layers - others) * units.block + units.root)
            + np.where(sums, _REDUCED, shard) * apart * units.block
            + again
        ),
        "gathered": whole + _buffers(rank, units.late_unit, added=np.where(sums, added, 0)),
        "activations": np.maximum(point.activations - _kept(rank, point.holding.running), 0.0),
    }
    there = point.holding.ends_root if last else point.holding.head + (point.holding.fronts > 0)
    yield "reduction of embedding and head", _where(_reduces(rank, last) & (there > 0), terms)
