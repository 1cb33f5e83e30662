"""Memory of one rank of Plait at the points of a training step that may be its peak, by term.

The terms are model states, the tensors that `fully_shard` gathers, accumulates and reduces per
unit, and the saved tensors of blocks (`block_bytes`). The backward runs from the last block to the
first. It frees gathered weights and activations and allocates gradient shards, so the sum is
largest at the start or the end of the backward. The memory is therefore computed only for the first
two and the last two blocks of the backward. (The gradients of the first block are reduced during
the second.)

In this module a "moment" is a point in time of the step.

Note [Memory of a step]
    Three parts of Plait determine the peak of a rank, at different cost:

    1. The planner (this module): closed-form expressions over arrays, which take microseconds per
       candidate. The bytes of blocks are computed from a model's sizes, and only moments that may
       be the peak are considered.
    2. `parallel.accounting.peak`: a simulation of every action of one rank, which takes
       milliseconds. The bytes of blocks are measured on fake tensors first
       (`dryrun.predicted_peak`), which takes seconds.
    3. `engine.single_rank`: the step itself on fake tensors, which takes seconds to minutes. It
       models nothing, so tests compare the other two with it.

    All three take model states from the ledger, whose rules decide what a ZeRO stage reduces and
    frees. In 2 and 3, `dryrun.recorder` measures the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from plait.parallel.accounting.ledger import frees_parameters, reduces_gradients
from plait.planner.block_bytes import (
    block_backward,
    deferred_bytes,
    deferred_bytes_of_ends,
    embedding_mask,
    head_gradient_bytes,
    head_sums_bytes,
    hidden_width,
    last_norm_backward,
    logits_bytes,
    reduces_on_host,
    saved_by_ends,
    saved_by_recomputation,
    spent_while_recomputed,
)
from plait.planner.hardware import Numbers
from plait.planner.job import RECOMPUTE, Job
from plait.planner.pipeline import Holding, Holdings

_GRADIENT_BYTES = 4
"""Bytes per element of a gradient that is accumulated and reduced (float32)."""

Terms = dict[str, Numbers]


@dataclass(frozen=True)
class Units:
    """Numbers of elements of a rank's sharding units, as `fully_shard` gathers and reduces them.

    Arrays have one entry per candidate.
    """

    layers: Numbers
    block: Numbers
    """Elements of one block after tp, padded to equal shards."""
    root: Numbers
    """Elements outside the blocks, in the root unit and in outer units."""
    embedding_units: Numbers
    """Elements of embeddings that are outer units. Stage 3 frees them after their forward."""
    head_unit: Numbers
    """Elements of a head that is an outer unit. It is reduced after its backward."""
    late_unit: Numbers
    """Elements of the largest unit that is reduced after the backward of the blocks."""
    head: Numbers
    """Elements of the matrix that computes the logits; 0 on a rank without it."""
    width: Numbers
    """Bytes of a weight in forward and backward."""
    sharded: Numbers
    """True if `fully_shard` is used. Otherwise weights and gradients stay unsharded."""
    holdings: Holdings
    """Micro-batches in flight and gradients of the rank."""


RANKS = ("first", "last", "inner")
"""Ranks of a pipeline: the two ends, and the fullest one between them.

If the stages form a V, the first rank has both ends.
"""


@dataclass(frozen=True)
class States:
    """Bytes of model states (weights, gradients, optimizer, gathered copies) per pipeline rank."""

    first: dict[str, Numbers]
    last: dict[str, Numbers]
    inner: dict[str, Numbers] | None = None
    units: Mapping[str, Units] | None = None
    """Units of every rank in RANKS if known."""

    def of(self, rank: str) -> dict[str, Numbers]:
        """Return the bytes of each memory term of `rank`, which is a name in RANKS."""
        states = {"first": self.first, "last": self.last, "inner": self.inner}[rank]
        assert states is not None
        return states


@dataclass(frozen=True)
class _Rank:
    """Pipeline rank with all inputs of the memory formulas. Bytes are per micro-batch."""

    job: Job
    states: Terms
    """Bytes of model states by term."""
    units: Units
    saved: tuple[Numbers, Numbers]
    """(Saved bytes of a recomputed block, saved bytes of any other block)."""
    spent: Numbers
    """Saved bytes of a recomputed block that its backward no longer needs but holds."""
    logits: Numbers
    """Peak bytes of head and loss."""
    head_sums: Numbers
    """Bytes of the head's gradients, accumulated over the chunks of a loss."""
    hidden: Numbers
    """Bytes of hidden states."""
    message: Numbers
    """Bytes of a boundary activation between two pipeline stages; 0 without a pipeline."""
    mask: Numbers
    """Bytes of the dropout mask after the embedding."""
    saved_by_loss: Numbers
    """Saved bytes of everything after the last block."""
    deferred: tuple[Numbers, Numbers]
    """Bytes for deferred weight gradients: (per token of one block, after the last block)."""
    shards: Numbers
    stage: Numbers
    """ZeRO stage."""
    block_weights: Numbers
    """Bytes of weight gradients at the peak of a block's backward."""
    block_working: Numbers
    """Bytes of activations and their gradients at the peak of a block's backward."""
    wide: Numbers
    """True if a reduction needs a second full buffer.

    This is the case with gloo, and if there is no other rank to reduce with, because torch then
    copies the gradients.
    """


@dataclass(frozen=True)
class _Moment:
    """Memory of a rank at the start of one backward."""

    holding: Holding
    activations: Numbers
    added: Numbers
    """Bytes of gradients."""


def _rank(job: Job, states: Terms, units: Units) -> _Rank:
    layouts = job.layouts
    saved_without, saved_with = saved_by_recomputation(job)
    kind = np.asarray(layouts.recompute).astype(int)
    shards = np.asarray(layouts.dp_shard)
    by_operators, by_all = spent_while_recomputed(job)
    spent = np.choose(kind, np.broadcast_arrays(0.0, 0.0, by_all, by_operators, by_operators))
    hidden = job.element_bytes * job.tokens * hidden_width(job)
    width = np.where(units.sharded, units.width, _GRADIENT_BYTES)
    points = block_backward(job)
    sizes = [width * point.weights for point in points]
    sizes += [point.token_bytes * job.tokens for point in points]
    weights, working = np.split(np.stack(np.broadcast_arrays(*sizes)), 2)
    largest = np.argmax(weights + working, axis=0)
    head_gradient = head_gradient_bytes(job, width=units.width) * units.head

    return _Rank(
        job=job,
        states=states,
        units=units,
        saved=(saved_with, saved_without),
        spent=spent * job.tokens,
        logits=logits_bytes(job),
        head_sums=head_sums_bytes(job, width=units.width) * units.head,
        hidden=hidden,
        message=np.where(np.asarray(layouts.pp) > 1, hidden, 0),
        mask=embedding_mask(job) * job.tokens,
        saved_by_loss=saved_by_ends(job) * job.tokens + head_gradient,
        deferred=(deferred_bytes(job), deferred_bytes_of_ends(job) * job.tokens + head_gradient),
        shards=shards,
        stage=np.asarray(layouts.stage),
        block_weights=np.choose(largest, weights),
        block_working=np.choose(largest, working),
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


def moments(job: Job, states: Terms, units: Units) -> Iterator[tuple[int, Terms]]:
    """Yield (index into MOMENTS, bytes by term) for every point of a step that may be the peak.

    Args:
        job: The candidates.
        states: Bytes of model states of one rank.
        units: Sharding units of that rank.
    """
    rank = _rank(job, states, units)
    constant = {"weights": states["weights"], "optimizer": states["optimizer"]}
    for name, terms in _moments_of_step(rank):
        yield MOMENTS.index(name), terms | constant


def _moments_of_step(rank: _Rank) -> Iterator[tuple[str, Terms]]:
    holdings = rank.units.holdings
    running = []
    for candidates in (holdings.headed, holdings.others):
        if not np.any(candidates.running):
            continue
        moment = _moment(rank, _largest_holding(rank, candidates))
        running.append(moment)
        for name, terms in _backward(rank, moment):
            yield name, _where(moment.holding.running > 0, terms)

    staged = np.asarray(rank.job.layouts.pp) > 1
    if np.any(staged & (rank.stage == 3)):
        # If forwards and backwards of stages alternate, a forward also gathers blocks: the one that
        # is computed and the next two.
        transient = (
            3 * rank.job.model.hidden * rank.job.element_bytes * rank.job.tokens + 3.5 * rank.hidden
        )
        for moment in running:
            forward = {
                "gradients": moment.added,
                "gathered": _gathered(rank, left=2, ahead=2),
                "activations": moment.activations,
                "working": transient,
            }
            exists = staged & (rank.stage == 3) & (moment.holding.running > 0)
            yield "forward of a block", _where(exists, forward)

    closing = _moment(rank, holdings.closing)
    yield from _head(rank, closing, last=True)
    for done in (0, 1, np.maximum(holdings.closing.running - 2, 0), holdings.closing.running - 1):
        yield from _block(rank, closing, done=done, last=True)
    yield from _ends(rank, closing, last=True)
    if holdings.endings is not None and np.any(np.asarray(rank.job.layouts.vpp) > 1):
        ending = _moment(rank, _largest_holding(rank, holdings.endings))
        for done in (0, 1):
            yield from _block(rank, ending, done=done, last=True)
        yield from _ends(rank, ending, last=True)

    elements = rank.units.layers * rank.units.block + rank.units.root
    yield "optimizer step", {"gradients": _shard_bytes(rank, elements)}


def _largest_holding(rank: _Rank, candidates: Holding) -> Holding:
    """Return the entry of `candidates` with the most bytes, for every layout.

    The COUNT entries of `candidates` are described in Note [Peaks of a rank] in
    `plait.planner.pipeline`.
    """
    sums = (
        _activations(rank, candidates)
        + _gradients(rank, candidates)
        + _gathered(rank, left=rank.units.layers - candidates.ended, ahead=1)
    )
    largest = np.argmax(sums, axis=0)[None]

    columns = vars(candidates).values()
    return Holding(*(np.take_along_axis(column, largest, axis=0)[0] for column in columns))


def _moment(rank: _Rank, holding: Holding) -> _Moment:
    return _Moment(holding, _activations(rank, holding), _gradients(rank, holding))


def _activations(rank: _Rank, holding: Holding) -> Numbers:
    """Return the bytes of saved tensors and boundary activations on a rank."""
    job = rank.job
    # With full recomputation the input of a stage is also the saved input of its first block, so
    # it must not count twice.
    whole_blocks = np.asarray(job.layouts.recompute) == RECOMPUTE.index("full")
    messages: Numbers = np.where(whole_blocks, holding.inputs, holding.messages)
    layers = rank.units.layers
    blocks = holding.blocks / np.maximum(layers, 1) * _saved_bytes(rank, layers)
    saved = (
        blocks
        + messages * rank.message
        + holding.fronts * rank.mask
        + holding.losses * rank.saved_by_loss
    )
    if not np.any(holding.deferred > 0):
        return saved
    block, ends = rank.deferred
    return saved + holding.deferred * block * job.tokens + holding.late_losses * ends


def _gradients(rank: _Rank, holding: Holding) -> Numbers:
    """Return the bytes of gradients that exist before a backward.

    With ZeRO stage 0 or 1 the gradients of a pipeline stage are unsharded until the last backward
    of this pipeline stage, and sharded afterwards.
    """
    units = rank.units
    growing = holding.growing * units.block + holding.root * units.root
    ended = holding.ended * units.block + holding.root_ended * units.root
    shard = (1 - rank.states["offloaded"]) * _GRADIENT_BYTES / rank.shards

    return np.where(
        rank.stage <= 1, _GRADIENT_BYTES * growing + shard * ended, shard * (growing + ended)
    )


def _backward(rank: _Rank, moment: _Moment) -> Iterator[tuple[str, Terms]]:
    """Yield the memory in the loss and the backward of any micro-batch except the last one."""
    if np.any(moment.holding.head):
        left = rank.units.layers - moment.holding.ended
        loss = {
            "gradients": moment.added + rank.head_sums,
            "gathered": _gathered(rank, left=left, ahead=0),
            "activations": moment.activations,
            "logits": rank.logits,
        }
        yield "loss", loss
        gathered = _gathered(rank, left=left, ahead=1, after_head=rank.stage == 3)
        # Flat buffer of the head's reduction.
        buffer = np.where(_reduces(rank, last=False), _GRADIENT_BYTES * rank.units.head_unit, 0.0)
        norm = {
            "gradients": moment.added + _head_gradients(rank, moment, last=False),
            "gathered": gathered + buffer,
            "activations": moment.activations,
            "working": last_norm_backward(rank.job) * rank.job.tokens,
        }
        yield "backward of the last norm", norm
        yield from _head(rank, moment, last=False)

    yield from _block(rank, moment, done=0, last=False)
    yield from _block(rank, moment, done=1, last=False)
    if np.any(_reduces(rank, last=False)):
        yield from _ends(rank, moment, last=False)


def _saved_bytes(rank: _Rank, blocks: Numbers) -> Numbers:
    """Return the saved bytes of the first `blocks` blocks for one micro-batch."""
    saved_if_recomputed, saved = rank.saved
    recomputed = np.ceil(blocks / rank.job.layouts.every)
    return recomputed * saved_if_recomputed + (blocks - recomputed) * saved


def _where(exists: Numbers, terms: Terms) -> Terms:
    """Return `terms`, with zeros for candidates where `exists` is False."""
    return {name: np.where(exists, value, 0.0) for name, value in terms.items()}


def _shard_bytes(rank: _Rank, elements: Numbers) -> Numbers:
    """Return the bytes of the gradient shards of `elements` parameters on the device."""
    return (1 - rank.states["offloaded"]) * _GRADIENT_BYTES * elements / rank.shards


def _new_shard_bytes(rank: _Rank, moment: _Moment, elements: Numbers) -> Numbers:
    """Return the bytes of new gradient shards that have yet to be added to accumulated shards."""
    has_shards = (np.asarray(moment.added) > 0) & ~_has_unsharded_sums(rank, moment)
    return np.where(has_shards, _shard_bytes(rank, elements), 0.0)


def _gathered(rank: _Rank, *, left: Numbers, ahead: int, after_head: Numbers = False) -> Numbers:
    """Return the bytes of gathered weights in the compute dtype.

    Args:
        rank: The rank.
        left: Number of blocks whose weights are gathered at stages below 3.
        ahead: Largest number of blocks whose weights are gathered at stage 3. Stage 3 also frees
            embeddings that are units of their own.
        after_head: Whether the head's gathered weights have been freed. Only used if the head is a
            unit of its own.
    """
    units = rank.units
    blocks = np.where(rank.stage == 3, np.minimum(ahead, left), left)
    ends = (
        units.root
        - np.where(rank.stage == 3, units.embedding_units, 0.0)
        - np.where(after_head, units.head_unit, 0.0)
    )
    return np.where(units.sharded, units.width * (ends + blocks * units.block), 0.0)


def _has_unsharded_sums(rank: _Rank, moment: _Moment) -> Numbers:
    """Return True if unsharded gradients of earlier micro-batches are accumulated.

    The reduction of a unit frees the unsharded gradients of that unit.
    """
    return (rank.stage <= 1) & (np.asarray(moment.holding.growing) > 0)


def _gradient_change(rank: _Rank, moment: _Moment, elements: Numbers) -> Numbers:
    """Return by how many bytes the reduction of a unit changes the gradients in memory."""
    sums = _has_unsharded_sums(rank, moment)
    freed = np.where(sums, -_GRADIENT_BYTES * elements, 0.0)
    # Shards of earlier micro-batches are added in place.
    has_no_shards = (np.asarray(moment.added) == 0) | sums
    return freed + np.where(has_no_shards, _shard_bytes(rank, elements), 0.0)


def _head_gradients(rank: _Rank, moment: _Moment, *, last: bool) -> Numbers:
    """Return the bytes that the head's backward adds to the gradients.

    The gradients of the head are sharded if the head is a unit of its own and has been reduced.
    """
    units = rank.units
    reduced = _reduces(rank, last) & (units.head_unit > 0)
    return moment.holding.head * np.where(
        reduced, _gradient_change(rank, moment, units.head_unit), units.width * units.head
    )


def _head(rank: _Rank, moment: _Moment, *, last: bool) -> Iterator[tuple[str, Terms]]:
    """Yield the memory during the reduction of the head's gradients, if the head is a unit."""
    units = rank.units
    added = np.asarray(moment.added)
    exists = _reduces(rank, last) & (units.head_unit > 0) & (np.asarray(moment.holding.head) > 0)
    if not np.any(exists):
        return
    sums = _has_unsharded_sums(rank, moment)
    gathered = _gathered(
        rank,
        left=units.layers - moment.holding.ended,
        ahead=1,
        after_head=frees_parameters(rank.stage, last=last),
    )
    terms = {
        "gradients": (
            added
            + _gradient_change(rank, moment, units.head_unit)
            + _new_shard_bytes(rank, moment, units.head_unit)
        ),
        "gathered": gathered + _buffers(rank, units.head_unit, added=np.where(sums, added, 0)),
        "activations": moment.activations,
        "working": rank.hidden,
    }
    yield "reduction of the head", _where(exists, terms)


def _reduces(rank: _Rank, last: bool) -> Numbers:
    """Return True if units reduce their gradients in a backward.

    Args:
        rank: The rank.
        last: Whether the backward is the last one of the stage in the step.
    """
    return np.asarray(rank.units.sharded, dtype=bool) & reduces_gradients(rank.stage, last=last)


def _buffers(rank: _Rank, elements: Numbers, *, added: Numbers) -> Numbers:
    """Return the bytes of the buffers for the reduce-scatter of a unit's gradients.

    One buffer has the flattened gradients. A second one has the output if `rank.wide` is set,
    otherwise the gradients that are copied into the first buffer.
    """
    source = np.where(added > 0, _GRADIENT_BYTES, rank.units.width)
    return elements * (_GRADIENT_BYTES + np.where(rank.wide, _GRADIENT_BYTES, source))


def _block(
    rank: _Rank, moment: _Moment, *, done: Numbers, last: bool
) -> Iterator[tuple[str, Terms]]:
    """Yield the memory during the backward of a block, and during its gradient reduction.

    Args:
        rank: The rank.
        moment: Memory of the rank before the backward of the stage.
        done: Number of blocks of the stage whose backward is complete.
        last: Whether this is the last backward of the stage in the step.
    """
    units = rank.units
    added = np.asarray(moment.added)
    done = np.asarray(done)
    running = np.asarray(moment.holding.running)
    reduces = _reduces(rank, last)
    exists = (done < running) & ((done == 0) | reduces)
    if not np.any(exists):
        return
    sums = _has_unsharded_sums(rank, moment)
    change = _gradient_change(rank, moment, units.block)
    of_head = _head_gradients(rank, moment, last=last)
    freed = frees_parameters(rank.stage, last=last)
    left = running - 1 - done
    gathered_blocks = units.layers - moment.holding.ended
    activations = moment.activations - (_saved_bytes(rank, running) - _saved_bytes(rank, left))
    working = rank.block_working + np.where(left % rank.job.layouts.every == 0, rank.spent, 0.0)

    # The flat buffer of the unit that was reduced before still exists.
    previous_buffer = np.where(
        reduces,
        _GRADIENT_BYTES * np.where(done > 0, units.block, moment.holding.head * units.head_unit),
        0.0,
    )
    left_gathered = gathered_blocks - np.where(freed, done, 0)
    gathered = _gathered(rank, left=left_gathered, ahead=2, after_head=freed)
    terms = {
        "gradients": added + np.where(reduces, done * change, 0.0) + of_head + rank.block_weights,
        "gathered": gathered + previous_buffer,
        "activations": activations,
        "working": working,
    }
    yield "backward of a block", _where(exists, terms)
    if not np.any(exists & reduces):
        return
    new_shards = _new_shard_bytes(rank, moment, units.block)
    left_gathered = gathered_blocks - np.where(freed, done + 1, 0)
    gathered = _gathered(rank, left=left_gathered, ahead=1, after_head=freed)
    terms = {
        "gradients": added + (done + 1) * change + new_shards + of_head,
        "gathered": gathered + _buffers(rank, units.block, added=np.where(sums, added, 0)),
        "activations": activations,
        "working": rank.hidden,
    }
    yield "reduction of a block", _where(exists & reduces, terms)


def _ends(rank: _Rank, moment: _Moment, *, last: bool) -> Iterator[tuple[str, Terms]]:
    """Yield the memory during the reduction of the gradients outside the blocks."""
    units = rank.units
    added = np.asarray(moment.added)
    sums = (rank.stage <= 1) & (added > 0)
    shard = (1 - rank.states["offloaded"]) * _GRADIENT_BYTES / rank.shards
    new_shards = np.where((added > 0) & ~sums, shard * units.late_unit, 0.0)
    others = units.layers - moment.holding.running - moment.holding.ended

    # Blocks of other stages whose backwards have not ended, and whose unsharded gradients therefore
    # exist.
    unsharded_others = np.where(
        sums,
        np.minimum(others, np.maximum(moment.holding.growing - moment.holding.running, 0)),
        0.0,
    )
    freed = frees_parameters(rank.stage, last=last)
    left = np.where(freed, others, units.layers - moment.holding.ended)
    gathered = np.where(
        freed & (np.asarray(left) == 0), 0.0, _gathered(rank, left=left, ahead=0, after_head=freed)
    )
    terms = {
        "gradients": (
            shard * ((units.layers - others) * units.block + units.root)
            + np.where(sums, _GRADIENT_BYTES, shard) * unsharded_others * units.block
            + new_shards
        ),
        "gathered": gathered + _buffers(rank, units.late_unit, added=np.where(sums, added, 0)),
        "activations": np.maximum(
            moment.activations - _saved_bytes(rank, moment.holding.running), 0.0
        ),
    }
    exists = moment.holding.head + (moment.holding.fronts > 0)
    if last:
        exists = moment.holding.ends_root
    yield "reduction of embedding and head", _where(_reduces(rank, last) & (exists > 0), terms)
