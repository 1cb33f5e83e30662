"""Three ways in which queries reach the keys of other ranks. Each is an autograd function of local tensors.

    all-gather-kv   keys and values are all-gathered, in the forward and again in the backward, and their
                    gradients are reduce-scattered
    ring            keys and values travel from rank to rank, and their gradients follow them
    ulysses         heads are exchanged for tokens: each rank has all tokens of some of the heads

For each layer a rank stores its local queries, keys, values and outputs. Tensors are
[batch, heads, tokens, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait._torch.flat_collectives import all_gather_single
from plait.comm.reduce_scatter import reduce_scatter
from plait.parallel.context.kernel import (
    Gradients,
    GradientSum,
    Outputs,
    PartialSoftmax,
    Piece,
    Rule,
    attend,
    attend_backward,
    sink_gradient,
    wide,
)
from plait.parallel.context.layout import SequenceLayout

Kind = Literal["all-gather-kv", "ulysses", "ring"]


@dataclass(frozen=True)
class Place:
    """Layout of a sequence over ranks, and their process group."""

    layout: SequenceLayout
    group: ProcessGroup


def attention(
    kind: Kind,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    place: Place,
    rule: Rule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of this rank's queries to the keys of all ranks. Collective.

    Args:
        kind: How queries reach the keys of other ranks.
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, tokens, head_dim].
        value: [batch, kv_heads, tokens, width].
        starts: [batch, tokens], position at which the document of each query begins (see `visible`). With
            `ulysses` it has all tokens of the sequence.
        place: Layout and process group.
        rule: What the layer does to its scores.
        sinks: [heads], see `PartialSoftmax.finished`. Their gradient covers the queries of this rank, with
            `ulysses` the heads of this rank.

    Returns:
        [batch, heads, tokens, width].
    """
    if kind == "ulysses":
        return _ulysses(query, key, value, starts, place, rule, sinks)
    function = _Gathered if kind == "all-gather-kv" else _Ring
    return function.apply(query, key, value, starts, place, rule, sinks)


def kv_copies(kv_heads: int, ranks: int) -> int:
    """Return how often `ulysses` repeats a key-value head so that the heads divide evenly over the ranks."""
    return lcm(kv_heads, ranks) // kv_heads


def _joined(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the results of consecutive queries."""
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), 2)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None,
        place: Place,
        rule: Rule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        whole_key, whole_value = _gathered(key, value, place)
        results = []
        for piece in _pieces(query, whole_key, whole_value, starts, place):
            softmax = PartialSoftmax(piece.query, value.shape[3])
            attend(piece, rule, softmax)
            results.append(softmax.finished(sinks))
        outputs, log_sum_exps = zip(*results, strict=True)
        output = _joined(outputs)
        ctx.place, ctx.rule = place, rule
        ctx.save_for_backward(query, key, value, output, starts, sinks, *log_sum_exps)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, starts, sinks, *log_sum_exps = ctx.saved_tensors
        place: Place = ctx.place
        gathered = _gathered(key, value, place)
        tokens, width = gathered[0].shape[2], key.shape[3]
        both = key.new_zeros(*key.shape[:2], tokens, width + value.shape[3], dtype=wide(key.dtype))
        sums = GradientSum(gathered[0], both[..., :width]), GradientSum(gathered[1], both[..., width:])
        grad_queries = []
        pieces = _pieces(query, *gathered, starts, place)
        for piece, chunk, log_sum_exp in zip(pieces, place.layout.chunks(query.shape[2]), log_sum_exps, strict=True):
            rows = slice(chunk.local, chunk.local + chunk.size)
            into = Gradients(GradientSum(piece.query), *sums)
            attend_backward(piece, ctx.rule, Outputs(grad[:, :, rows], output[:, :, rows], log_sum_exp), into)
            grad_queries.append(into.query.total)
        stacked = place.layout.stacked(both.to(key.dtype), dim=2)
        own = stacked.new_empty(*key.shape[:3], both.shape[3])
        reduce_scatter(own, stacked, place.group)
        grad_key, grad_value = own.split([width, value.shape[3]], -1)
        grad_sinks = sink_gradient(sinks, grad, output, _joined(log_sum_exps)) if sinks is not None else None
        return _joined(grad_queries).to(query.dtype), grad_key, grad_value, None, None, None, grad_sinks


def _gathered(key: torch.Tensor, value: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of the sequence, in the order of its tokens. Collective."""
    own = torch.cat([key, value], -1)
    ranks = place.layout.ranks
    stacked = own.new_empty(ranks * own.shape[0], *own.shape[1:])
    all_gather_single(stacked, own, group=place.group)
    whole = place.layout.join(stacked.chunk(ranks), dim=2)
    return whole[..., : key.shape[3]], whole[..., key.shape[3] :]


def _pieces(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None, place: Place) -> Iterator[Piece]:
    """Yield each chunk of the queries with all keys."""
    for chunk in place.layout.chunks(query.shape[2]):
        start, end = chunk.local, chunk.local + chunk.size
        own_starts = None if starts is None else starts[:, start:end]
        yield Piece(query[:, :, start:end], key, value, chunk.at, 0, own_starts)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None,
        place: Place,
        rule: Rule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ring = _RingOfParts(query, key.shape[3], starts, place, rule)
        softmaxes = [PartialSoftmax(query[:, :, start:end], value.shape[3]) for start, end in ring.runs]
        for source, both in _going_round(torch.cat([key, value], -1), place):
            for run, piece in ring.pieces(both, source):
                attend(piece, rule, softmaxes[run])
        outputs, log_sum_exps = zip(*(softmax.finished(sinks) for softmax in softmaxes), strict=True)
        output = _joined(outputs)
        ctx.place, ctx.rule = place, rule
        ctx.save_for_backward(query, key, value, output, starts, sinks, *log_sum_exps)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, starts, sinks, *log_sum_exps = ctx.saved_tensors
        place: Place = ctx.place
        width = key.shape[3]
        ring = _RingOfParts(query, width, starts, place, ctx.rule)
        outputs, grad_queries = [], []
        for (start, end), log_sum_exp in zip(ring.runs, log_sum_exps, strict=True):
            outputs.append(Outputs(grad[:, :, start:end], output[:, :, start:end], log_sum_exp))
            grad_queries.append(GradientSum(query[:, :, start:end]))
        exchange: _Exchange | None = None
        for source, both in _going_round(torch.cat([key, value], -1), place):
            # The gradients of a part follow it from rank to rank. They arrive while this rank's share
            # of them is computed, and after as many steps as there are ranks they are at home.
            travelling = _TravellingGradients(both, exchange)
            sums = _SumsOfTravelling(travelling, 0, width), _SumsOfTravelling(travelling, width, both.shape[3])
            for run, piece in ring.pieces(both, source):
                attend_backward(piece, ctx.rule, outputs[run], Gradients(grad_queries[run], *sums))
            exchange = _Exchange(travelling.total, place)
        assert exchange is not None
        grad_key, grad_value = exchange.wait().to(key.dtype).split([width, value.shape[3]], -1)
        grad_query = _joined([total.total for total in grad_queries]).to(query.dtype)
        grad_sinks = sink_gradient(sinks, grad, output, _joined(log_sum_exps)) if sinks is not None else None
        return grad_query, grad_key, grad_value, None, None, None, grad_sinks


class _RingOfParts:
    """Pieces that combine this rank's queries with the keys of one rank at a time.

    If visibility depends on the order of tokens only, each step of the ring is one piece: the tokens of a
    rank are in order, and its queries see a rectangle of another rank's keys in full (see
    `SequenceLayout.block`). With a window or documents, each pair of chunks is a piece.
    """

    def __init__(self, query: torch.Tensor, width: int, starts: torch.Tensor | None, place: Place, rule: Rule) -> None:
        self._query, self._width, self._starts, self._layout = query, width, starts, place.layout
        self._in_pairs = starts is not None or rule.window is not None
        tokens = query.shape[2]
        self.runs = [(0, tokens)]
        """First and last index of the queries that share one softmax."""
        if self._in_pairs:
            self.runs = [(chunk.local, chunk.local + chunk.size) for chunk in place.layout.chunks(tokens)]

    def pieces(self, both: torch.Tensor, source: int) -> Iterator[tuple[int, Piece]]:
        """Yield (index of the run of queries, piece) for the keys and values of one rank.

        Args:
            both: Keys and values, concatenated in the last dimension.
            source: The rank that they come from.
        """
        if self._in_pairs:
            yield from self._pairs(both, source)
            return
        block = self._layout.block(both.shape[2], source)
        if block is None:
            return
        held = both[:, :, : block.keys]
        # Positions by order alone: tokens of this rank are causal, and see all of another rank's block.
        query_at = 0 if source == self._layout.rank else block.keys
        key, value = held[..., : self._width], held[..., self._width :]
        yield 0, Piece(self._query[:, :, block.first_query :], key, value, query_at, 0, row=block.first_query)

    def _pairs(self, both: torch.Tensor, source: int) -> Iterator[tuple[int, Piece]]:
        for run, chunk in enumerate(self._layout.chunks(self._query.shape[2])):
            rows = slice(chunk.local, chunk.local + chunk.size)
            starts = None if self._starts is None else self._starts[:, rows]
            for other in self._layout.chunks(both.shape[2], source):
                held = both[:, :, other.local : other.local + other.size]
                key, value = held[..., : self._width], held[..., self._width :]
                yield run, Piece(self._query[:, :, rows], key, value, chunk.at, other.at, starts, column=other.local)


class _TravellingGradients:
    """Gradients of the keys and values of one rank, summed over the ranks that have visited them."""

    def __init__(self, both: torch.Tensor, exchange: _Exchange | None) -> None:
        self.both, self._exchange = both, exchange

    @cached_property
    def total(self) -> torch.Tensor:
        """Sum to which this rank adds its share. The first access waits until the sum has arrived."""
        if self._exchange is None:
            return torch.zeros_like(self.both, dtype=wide(self.both.dtype))
        return self._exchange.wait()


class _SumsOfTravelling(GradientSum):
    """Gradient of keys or of values, which travel in one tensor."""

    def __init__(self, travelling: _TravellingGradients, low: int, high: int) -> None:
        super().__init__(travelling.both[..., low:high])
        self._travelling, self._low, self._high = travelling, low, high

    def add(self, start: int, gradient: torch.Tensor) -> None:
        total = self._travelling.total[..., self._low : self._high]
        total[:, :, start : start + gradient.shape[2]].add_(gradient)


def _going_round(own: torch.Tensor, place: Place) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, its tensor) for every rank, beginning with this one.

    The next tensor is received while the caller works with the current one.
    """
    ranks, rank = place.layout.ranks, place.layout.rank
    part = own.contiguous()
    for step in range(ranks):
        arriving = _Exchange(part, place) if step < ranks - 1 else None
        yield (rank - step) % ranks, part
        if arriving is not None:
            part = arriving.wait()


class _Exchange:
    """Exchange that sends a tensor to the next rank and receives one from the previous rank."""

    def __init__(self, tensor: torch.Tensor, place: Place) -> None:
        ranks, rank = place.layout.ranks, place.layout.rank
        self._sent, self._received = tensor, torch.empty_like(tensor)
        after, before = (dist.get_global_rank(place.group, (rank + step) % ranks) for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, place.group),
                dist.P2POp(dist.irecv, self._received, before, place.group),
            ]
        )

    def wait(self) -> torch.Tensor:
        """Wait for both messages and return the received tensor."""
        for work in self._works:
            work.wait()
        return self._received


def _ulysses(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    place: Place,
    rule: Rule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    own = None if sinks is None else sinks.chunk(place.layout.ranks)[place.layout.rank]
    return exchanged(query, key, value, place, lambda *all_tokens: _AllTokens.apply(*all_tokens, starts, rule, own))


def exchanged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, place: Place, compute: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Outputs of this rank's queries, where `compute` is given queries, keys and values [batch, heads, tokens, ...] of all tokens for this
    rank's heads, and returns their outputs."""
    copies = kv_copies(key.shape[1], place.layout.ranks)
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    query, key, value = (_Exchanged.apply(x, place, True) for x in (query, key, value))
    return _Exchanged.apply(compute(query, key, value), place, False)


class _Exchanged(torch.autograd.Function):
    """[batch, heads, tokens / n, width] to [batch, heads / n, tokens, width] where `to_tokens`, else back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: Place, to_tokens: bool) -> torch.Tensor:
        ctx.place, ctx.to_tokens = place, to_tokens
        return _exchanged(x, place, to_tokens=to_tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(grad, ctx.place, to_tokens=not ctx.to_tokens), None, None


def _exchanged(x: torch.Tensor, place: Place, *, to_tokens: bool) -> torch.Tensor:
    ranks = place.layout.ranks
    cut, joined = (1, 2) if to_tokens else (2, 1)
    sent = torch.stack(x.chunk(ranks, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=place.group)
    return torch.cat(received.unbind(), joined)


class _AllTokens(torch.autograd.Function):
    """Attention of complete sequences on this rank."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None,
        rule: Rule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        softmax = PartialSoftmax(query, value.shape[3])
        attend(Piece(query, key, value, 0, 0, starts), rule, softmax)
        output, log_sum_exp = softmax.finished(sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, starts, sinks)
        ctx.rule = rule
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum_exp, starts, sinks = ctx.saved_tensors
        into = Gradients(GradientSum(query), GradientSum(key), GradientSum(value))
        attend_backward(Piece(query, key, value, 0, 0, starts), ctx.rule, Outputs(grad, output, log_sum_exp), into)
        grads = [total.total.to(total.like.dtype) for total in (into.query, into.key, into.value)]
        return *grads, None, None, sink_gradient(sinks, grad, output, log_sum_exp)
