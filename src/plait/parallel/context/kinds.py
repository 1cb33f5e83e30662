"""How a query sees the keys of other parts of its sequence, in three kinds, each as an autograd function over local tensors.

    all-gather-kv   keys and values of all parts are gathered, again in the backward, and their gradients reduce-scattered
    ring            each rank's keys and values go round, and the softmax is put together from the parts; gradients go round with them
    ulysses         heads are exchanged for tokens: a rank has all tokens of its part of the heads

Per layer a rank keeps its own queries, keys, values and outputs, whatever the kind. Tensors are [batch, heads, tokens, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait._torch.flat_collectives import all_gather_single
from plait.comm.reduce_scatter import reduce_scatter
from plait.parallel.context.kernel import Found, Gradients, Piece, Rule, attend, attend_backward, finished, merged, sink_gradient, wide
from plait.parallel.context.layout import SequenceLayout

Kind = Literal["all-gather-kv", "ulysses", "ring"]


@dataclass(frozen=True)
class Place:
    """This rank's part of every sequence, and the ranks that have the others."""

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
    """Outputs [batch, heads, tokens, width] of this rank's queries. `starts`: see `visible`, of these; under `ulysses` of all. `sinks`
    [heads]: see `kernel.finished`; their gradient is of this rank's queries, or heads."""
    if kind == "ulysses":
        return _ulysses(query, key, value, starts, place, rule, sinks)
    function = _Gathered if kind == "all-gather-kv" else _Ring
    return function.apply(query, key, value, starts, place, rule, sinks)


def kv_copies(kv_heads: int, ranks: int) -> int:
    """How often `ulysses` repeats a key-value head, so that every rank has those of its queries."""
    return lcm(kv_heads, ranks) // kv_heads


def _kept(
    ctx: Any, given: Sequence[torch.Tensor], chunks: Sequence[Found], starts: torch.Tensor | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The outputs of all chunks of queries. Kept for the backward, with their denominators."""
    output, denominator = (torch.cat(parts, 2) for parts in zip(*chunks, strict=True))
    ctx.save_for_backward(*given, output, denominator, starts, sinks)
    return output


# ---- all-gather-kv --------------------------------------------------------------------------------------------------------------------


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
        found = [finished(attend(piece, rule), query, sinks) for piece in _pieces(query, whole_key, whole_value, starts, place)]
        ctx.place, ctx.rule = place, rule
        return _kept(ctx, (query, key, value), found, starts, sinks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, denominator, starts, sinks = ctx.saved_tensors
        place: Place = ctx.place
        grad = grad.contiguous()
        whole = _gathered(key, value, place)
        into = Gradients(*(torch.zeros_like(x, dtype=wide(x.dtype), memory_format=torch.contiguous_format) for x in (query, *whole)))
        for piece, chunk in zip(_pieces(query, *whole, starts, place), place.layout.chunks(query.shape[2]), strict=True):
            start, end = chunk.local, chunk.local + chunk.size
            found = (output[:, :, start:end], denominator[:, :, start:end])
            attend_backward(piece, ctx.rule, grad[:, :, start:end], found, into.rows(start, end))
        both = torch.cat([into.key, into.value], -1).to(key.dtype)
        stacked = torch.cat(place.layout.parts(both, dim=2))
        own = both.new_empty(key.shape[0], *both.shape[1:2], key.shape[2], both.shape[3])
        reduce_scatter(own, stacked, place.group)
        grad_key, grad_value = own.split([key.shape[3], value.shape[3]], -1)
        grad_sinks = sink_gradient(sinks, grad, (output, denominator))
        return into.query.to(query.dtype), grad_key, grad_value, None, None, None, grad_sinks


def _gathered(key: torch.Tensor, value: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the sequence, in its order."""
    own = torch.cat([key, value], -1)
    ranks = place.layout.ranks
    stacked = own.new_empty(ranks * own.shape[0], *own.shape[1:])
    all_gather_single(stacked, own, group=place.group)
    whole = place.layout.join(stacked.chunk(ranks), dim=2)
    return whole[..., : key.shape[3]], whole[..., key.shape[3] :]


def _pieces(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None, place: Place) -> Iterator[Piece]:
    """Each chunk of the queries with all keys."""
    for chunk in place.layout.chunks(query.shape[2]):
        start, end = chunk.local, chunk.local + chunk.size
        yield Piece(query[:, :, start:end], key, value, chunk.at, 0, None if starts is None else starts[:, start:end])


# ---- ring -----------------------------------------------------------------------------------------------------------------------------


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
        chunks = place.layout.chunks(query.shape[2])
        found: list[Any] = [None] * len(chunks)
        for source, both in _going_round(torch.cat([key, value], -1), place):
            for index, _, piece in _pairs(query, both, key.shape[3], starts, place, source):
                found[index] = merged(found[index], attend(piece, rule))
        ctx.place, ctx.rule = place, rule
        return _kept(ctx, (query, key, value), [finished(one, query, sinks) for one in found], starts, sinks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, denominator, starts, sinks = ctx.saved_tensors
        place: Place = ctx.place
        grad, width = grad.contiguous(), key.shape[3]
        chunks = place.layout.chunks(query.shape[2])
        grad_query = torch.zeros_like(query, dtype=wide(query.dtype), memory_format=torch.contiguous_format)
        travelling: torch.Tensor | None = None
        for source, both in _going_round(torch.cat([key, value], -1), place):
            here = torch.zeros_like(both, dtype=wide(both.dtype))
            for index, keys, piece in _pairs(query, both, width, starts, place, source):
                start, end = chunks[index].local, chunks[index].local + chunks[index].size
                into = Gradients(grad_query, here[..., :width], here[..., width:]).rows(start, end).keys(*keys)
                attend_backward(piece, ctx.rule, grad[:, :, start:end], (output[:, :, start:end], denominator[:, :, start:end]), into)
            # The gradients of a part follow it from rank to rank; after as many steps as there are ranks they are at home.
            travelling = _Exchange(here if travelling is None else here.add_(travelling), place).wait()
        assert travelling is not None
        grad_key, grad_value = travelling.to(key.dtype).split([width, value.shape[3]], -1)
        grad_sinks = sink_gradient(sinks, grad, (output, denominator))
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None, grad_sinks


def _going_round(own: torch.Tensor, place: Place) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its part) for every rank, this one first; the next part arrives while one is used."""
    ranks, rank = place.layout.ranks, place.layout.rank
    here = own.contiguous()
    for step in range(ranks):
        arriving = _Exchange(here, place) if step < ranks - 1 else None
        yield (rank - step) % ranks, here
        if arriving is not None:
            here = arriving.wait()


def _pairs(
    query: torch.Tensor, both: torch.Tensor, width: int, starts: torch.Tensor | None, place: Place, source: int
) -> Iterator[tuple[int, tuple[int, int], Piece]]:
    """(number of the chunk of queries, first and last key in `source`'s part, piece) for every chunk of queries and of keys."""
    for index, chunk in enumerate(place.layout.chunks(query.shape[2])):
        start, end = chunk.local, chunk.local + chunk.size
        for other in place.layout.chunks(both.shape[2], source):
            keys = (other.local, other.local + other.size)
            held = both[:, :, keys[0] : keys[1]]
            own = None if starts is None else starts[:, start:end]
            yield index, keys, Piece(query[:, :, start:end], held[..., :width], held[..., width:], chunk.at, other.at, own)


class _Exchange:
    """A tensor to the next rank, and that of the one before (`tensors`, read after `wait`)."""

    def __init__(self, tensor: torch.Tensor, place: Place) -> None:
        ranks, rank = place.layout.ranks, place.layout.rank
        self._sent, self.tensors = tensor, torch.empty_like(tensor)
        after, before = (dist.get_global_rank(place.group, (rank + step) % ranks) for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, place.group),
                dist.P2POp(dist.irecv, self.tensors, before, place.group),
            ]
        )

    def wait(self) -> torch.Tensor:
        """What has arrived."""
        for work in self._works:
            work.wait()
        return self.tensors


# ---- ulysses --------------------------------------------------------------------------------------------------------------------------


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
    """Attention of a full sequence on this rank."""

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
        output, denominator = finished(attend(Piece(query, key, value, 0, 0, starts), rule), query, sinks)
        ctx.save_for_backward(query, key, value, output, denominator, starts, sinks)
        ctx.rule = rule
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, denominator, starts, sinks = ctx.saved_tensors
        grad, found = grad.contiguous(), (output, denominator)
        into = Gradients(*(torch.zeros_like(x, dtype=wide(x.dtype)) for x in (query, key, value)))
        attend_backward(Piece(query, key, value, 0, 0, starts), ctx.rule, grad, found, into)
        grads = into.query.to(query.dtype), into.key.to(key.dtype), into.value.to(value.dtype)
        return *grads, None, None, sink_gradient(sinks, grad, found)
