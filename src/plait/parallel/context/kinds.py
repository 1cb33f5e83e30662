"""Three implementations of attention to the keys of other ranks.

Each kind is an autograd function of local tensors:

    all-gather-kv   keys and values are all-gathered, in the forward and again in the backward, and
                    their gradients are reduce-scattered
    ring            keys and values move from rank to rank, and their gradients follow them
    ulysses         an all-to-all sends each rank all tokens of some heads

For each layer a rank stores its local queries, keys, values and outputs. Tensors are
[batch, heads, tokens, head_dim].

`SequenceLayout` assigns the tokens of a sequence to the ranks of the cp axis. A sequence is padded
at its end and divided into equal chunks. With one chunk per rank, rank r has the r-th chunk. With
two chunks per rank (zigzag), it has the r-th from the front and the r-th from the end. With causal
attention, zigzag gives every rank the same amount of work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from plait._torch.groups import all_gather_single
from plait._torch.passes import differentiable_once
from plait.comm.collectives import reduce_scatter
from plait.parallel.context.kernel import (
    AttentionBlock,
    AttentionRule,
    BackwardInputs,
    GradientSum,
    GradientSums,
    PartialSoftmax,
    attend,
    attend_backward,
    sink_gradient,
)
from plait.sizes import wide_dtype

Kind = Literal["all-gather-kv", "ulysses", "ring"]
"""Implementation of attention to the keys of other ranks."""

_NO_CONTEXT_PARALLELISM = "use parallel.cp = 1"
"""Remedy for a model whose gradient is differentiated."""


@dataclass(frozen=True)
class SequencePlacement:
    """Layout of a sequence over ranks, and the process group of these ranks.

    Attributes:
        layout: Tokens of each rank.
        group: Process group of the cp axis.
    """

    layout: SequenceLayout
    group: ProcessGroup


def attention(
    kind: Kind,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    place: SequencePlacement,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of this rank's queries to the keys of all ranks. Collective.

    Args:
        kind: Implementation of attention to the keys of other ranks.
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, tokens, head_dim].
        value: [batch, kv_heads, tokens, width].
        starts: Position at which the document of each query begins [batch, tokens], or None (see
            `attention_function.document_starts`). With `ulysses`, `starts` has an entry for every
            token of the sequence.
        place: Layout and process group.
        rule: Rule of the layer.
        sinks: Attention sinks [heads] or None, see `PartialSoftmax.finished`. Their gradient on
            this rank contains only the contribution of this rank's queries. With `ulysses` it
            contains only the contribution of this rank's heads.

    Returns:
        [batch, heads, tokens, width].
    """
    if kind == "ulysses":
        return _ulysses(query, key, value, starts, place, rule, sinks)
    if kind == "ring":
        return _RingAttention.apply(query, key, value, starts, place, rule, sinks)
    return _GatheredAttention.apply(query, key, value, starts, place, rule, sinks)


@dataclass(frozen=True)
class SequenceLayout:
    """Distribution of the chunks of a sequence over the ranks of an axis.

    Attributes:
        ranks: Number of ranks.
        rank: This rank.
        zigzag: Whether a rank has two chunks, one from each half of the sequence, instead of one.
    """

    ranks: int
    rank: int
    zigzag: bool

    @property
    def per_rank(self) -> int:
        """Number of chunks per rank."""
        return 2 if self.zigzag else 1

    @property
    def count(self) -> int:
        """Number of chunks of a sequence."""
        return self.ranks * self.per_rank

    def padded(self, length: int) -> int:
        """Return the length to which a sequence is padded so that chunks have equal lengths."""
        return -(-length // self.count) * self.count

    def indices(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's chunks in the sequence."""
        return (rank, self.count - 1 - rank) if self.zigzag else (rank,)

    def chunks(self, part: int, rank: int | None = None) -> tuple[Chunk, ...]:
        """Return the chunks of a rank, by default this one. Each rank has `part` tokens."""
        if rank is None:
            rank = self.rank
        size = part // self.per_rank
        return tuple(
            Chunk(local_start=local * size, start=index * size, size=size)
            for local, index in enumerate(self.indices(rank))
        )

    def block(self, part: int, source: int) -> UnmaskedBlock | None:
        """Return the block of this rank's queries with the keys of `source` that are not masked.

        The result is for plain causal attention, without a sliding window or documents.

        With two chunks per rank, the first chunk of an earlier rank is before both chunks of this
        rank, and its second chunk is after them. Both chunks of a later rank are between the chunks
        of this rank. The block therefore needs no mask, or a causal one if `source` is this rank.

        Args:
            part: Number of tokens per rank.
            source: The rank that has the keys.

        Returns:
            The block, or None if all keys are masked for all queries.
        """
        if source == self.rank:
            return UnmaskedBlock(0, part)
        if source < self.rank:
            return UnmaskedBlock(0, part // self.per_rank)
        if not self.zigzag:
            return None
        return UnmaskedBlock(part // 2, part)

    def shard(self, sequence: torch.Tensor, *, dim: int, fill: int = 0) -> torch.Tensor:
        """Return this rank's part of a tensor.

        Args:
            sequence: Tensor of all tokens.
            dim: Dimension of the tokens.
            fill: Value of the padding.

        Returns:
            A contiguous tensor.
        """
        length = sequence.shape[dim]
        missing = self.padded(length) - length
        if missing:
            # `pad` counts dimensions from the last one.
            later_dims = sequence.ndim - 1 - dim
            sequence = F.pad(sequence, (0, 0) * later_dims + (0, missing), value=fill)
        size = sequence.shape[dim] // self.count
        chunks = [sequence.narrow(dim, index * size, size) for index in self.indices(self.rank)]
        return torch.cat(chunks, dim).contiguous()

    def join(self, parts: Iterable[torch.Tensor], *, dim: int) -> torch.Tensor:
        """Return the padded sequence that consists of the parts of all ranks, in rank order."""
        chunks: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            chunks.update(zip(self.indices(rank), part.chunk(self.per_rank, dim), strict=True))
        return torch.cat([chunks[index] for index in range(self.count)], dim)

    def stacked(self, sequence: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, concatenated along the first dimension.

        Args:
            sequence: The padded sequence.
            dim: Dimension of its tokens.
        """
        chunks = sequence.chunk(self.count, dim)
        rank_order = [index for rank in range(self.ranks) for index in self.indices(rank)]
        in_order = torch.cat([chunks[index] for index in rank_order], dim)
        # [..., ranks * part, ...] to [ranks * first dimension, ..., part, ...]
        return in_order.unflatten(dim, (self.ranks, -1)).movedim(dim, 0).flatten(0, 1).contiguous()


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a rank.

    Attributes:
        local_start: Index of the first token in the rank's part.
        start: Position of the first token in the padded sequence.
        size: Number of tokens.
    """

    local_start: int
    start: int
    size: int


@dataclass(frozen=True)
class UnmaskedBlock:
    """Smallest block with all unmasked pairs of this rank's queries and another rank's keys.

    Attributes:
        first_query: Index of the first query in this rank's part. The block extends to the last
            query.
        keys: Number of keys in the block. The block begins with the first key of the other rank.
    """

    first_query: int
    keys: int


class _GatheredAttention(torch.autograd.Function):
    """Attention to keys and values that are all-gathered."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None,
        place: SequencePlacement,
        rule: AttentionRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        gathered_key, gathered_value = _gather_kv(key, value, place)
        results = []
        for block in _query_chunks(query, gathered_key, gathered_value, starts, place):
            softmax = PartialSoftmax(block.query, value.shape[3])
            attend(block, rule, softmax)
            results.append(softmax.finished(sinks))
        outputs, log_sum_exps = zip(*results, strict=True)
        output = _concatenate(outputs)
        ctx.place = place
        ctx.rule = rule
        ctx.save_for_backward(query, key, value, output, starts, sinks, *log_sum_exps)
        return output

    @staticmethod
    @differentiable_once(_NO_CONTEXT_PARALLELISM)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, starts, sinks, *log_sum_exps = ctx.saved_tensors
        place: SequencePlacement = ctx.place
        gathered_key, gathered_value = _gather_kv(key, value, place)

        # One tensor for the gradients of keys and values, so that one reduce-scatter suffices.
        width = key.shape[3]
        # [batch, kv_heads, tokens of the sequence, head_dim + width]
        shape = (*key.shape[:2], gathered_key.shape[2], width + value.shape[3])
        grad_kv = key.new_zeros(shape, dtype=wide_dtype(key.dtype))
        key_sum = GradientSum(gathered_key, grad_kv[..., :width])
        value_sum = GradientSum(gathered_value, grad_kv[..., width:])
        grad_queries = []
        blocks = _query_chunks(query, gathered_key, gathered_value, starts, place)
        for block, chunk, log_sum_exp in zip(
            blocks, place.layout.chunks(query.shape[2]), log_sum_exps, strict=True
        ):
            rows = slice(chunk.local_start, chunk.local_start + chunk.size)
            into = GradientSums(GradientSum(block.query), key_sum, value_sum)
            attend_backward(
                block,
                ctx.rule,
                BackwardInputs(grad[:, :, rows], output[:, :, rows], log_sum_exp),
                into,
            )
            grad_queries.append(into.query.total)

        # [ranks * batch, kv_heads, tokens, head_dim + width]
        stacked = place.layout.stacked(grad_kv.to(key.dtype), dim=2)
        local_grad_kv = stacked.new_empty(*key.shape[:3], grad_kv.shape[3])
        reduce_scatter(local_grad_kv, stacked, place.group)
        grad_key, grad_value = local_grad_kv.split([width, value.shape[3]], -1)
        return (
            _concatenate(grad_queries).to(query.dtype),
            grad_key,
            grad_value,
            None,
            None,
            None,
            sink_gradient(sinks, grad, output, log_sum_exps),
        )


def _gather_kv(
    key: torch.Tensor, value: torch.Tensor, place: SequencePlacement
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of the sequence, in the order of its tokens. Collective."""
    # [batch, kv_heads, tokens, head_dim + width]
    local_kv = torch.cat([key, value], -1)
    ranks = place.layout.ranks
    # [ranks * batch, kv_heads, tokens, head_dim + width]
    stacked = local_kv.new_empty(ranks * local_kv.shape[0], *local_kv.shape[1:])
    all_gather_single(stacked, local_kv, group=place.group)
    sequence_kv = place.layout.join(stacked.chunk(ranks), dim=2)
    return sequence_kv[..., : key.shape[3]], sequence_kv[..., key.shape[3] :]


def _query_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    place: SequencePlacement,
) -> Iterator[AttentionBlock]:
    """Yield an attention block for each chunk of the local queries, with all keys."""
    for chunk in place.layout.chunks(query.shape[2]):
        rows = slice(chunk.local_start, chunk.local_start + chunk.size)
        chunk_starts = None if starts is None else starts[:, rows]
        yield AttentionBlock(query[:, :, rows], key, value, chunk.start, 0, chunk_starts)


def _concatenate(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the results of consecutive queries along the tokens."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(list(chunks), 2)


class _RingAttention(torch.autograd.Function):
    """Attention to keys and values that move from rank to rank."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None,
        place: SequencePlacement,
        rule: AttentionRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ring = _RingBlocks(query, key.shape[3], starts, place, rule)
        softmaxes = [
            PartialSoftmax(query[:, :, start:end], value.shape[3]) for start, end in ring.runs
        ]
        for source, kv in _ring_steps(torch.cat([key, value], -1), place):
            for run, block in ring.blocks(kv, source):
                attend(block, rule, softmaxes[run])
        results = [softmax.finished(sinks) for softmax in softmaxes]
        outputs, log_sum_exps = zip(*results, strict=True)
        output = _concatenate(outputs)
        ctx.place = place
        ctx.rule = rule
        ctx.save_for_backward(query, key, value, output, starts, sinks, *log_sum_exps)
        return output

    @staticmethod
    @differentiable_once(_NO_CONTEXT_PARALLELISM)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, starts, sinks, *log_sum_exps = ctx.saved_tensors
        place: SequencePlacement = ctx.place
        width = key.shape[3]
        ring = _RingBlocks(query, width, starts, place, ctx.rule)
        outputs = []
        grad_queries = []
        for (start, end), log_sum_exp in zip(ring.runs, log_sum_exps, strict=True):
            outputs.append(
                BackwardInputs(grad[:, :, start:end], output[:, :, start:end], log_sum_exp)
            )
            grad_queries.append(GradientSum(query[:, :, start:end]))
        exchange: _RingExchange | None = None
        for source, kv in _ring_steps(torch.cat([key, value], -1), place):
            # The gradients of a rank's keys and values follow them from rank to rank. They arrive
            # while this rank computes its share of them. After one step per rank they are back at
            # their rank.
            grad_kv = _RingGradients(kv, exchange)
            key_sum = _RingGradientSum(grad_kv, 0, width)
            value_sum = _RingGradientSum(grad_kv, width, kv.shape[3])
            for run, block in ring.blocks(kv, source):
                attend_backward(
                    block,
                    ctx.rule,
                    outputs[run],
                    GradientSums(grad_queries[run], key_sum, value_sum),
                )
            exchange = _RingExchange(grad_kv.total, place)
        assert exchange is not None
        grad_key, grad_value = exchange.wait().to(key.dtype).split([width, value.shape[3]], -1)
        grad_query = _concatenate([gradient.total for gradient in grad_queries]).to(query.dtype)
        grad_sinks = sink_gradient(sinks, grad, output, log_sum_exps)
        return grad_query, grad_key, grad_value, None, None, None, grad_sinks


class _RingBlocks:
    """Attention blocks of this rank's queries with the keys of one rank at a time.

    Without a sliding window or documents, each step of the ring is one block, because the unmasked
    keys of another rank form a rectangle (`SequenceLayout.block`). Otherwise each pair of chunks is
    a block.
    """

    def __init__(
        self,
        query: torch.Tensor,
        width: int,
        starts: torch.Tensor | None,
        place: SequencePlacement,
        rule: AttentionRule,
    ) -> None:
        self._query = query
        self._width = width
        self._starts = starts
        self._layout = place.layout
        self._in_pairs = starts is not None or rule.window is not None
        tokens = query.shape[2]
        # Ranges of the queries that share one softmax.
        self.runs = [(0, tokens)]
        if self._in_pairs:
            self.runs = [
                (chunk.local_start, chunk.local_start + chunk.size)
                for chunk in place.layout.chunks(tokens)
            ]

    def blocks(self, kv: torch.Tensor, source: int) -> Iterator[tuple[int, AttentionBlock]]:
        """Yield (index in `runs`, block) for the keys and values of one rank.

        Args:
            kv: Keys and values, concatenated in the last dimension.
            source: Rank whose tokens these are.
        """
        if self._in_pairs:
            yield from self._pairs(kv, source)
            return

        visible = self._layout.block(kv.shape[2], source)
        if visible is None:
            return
        # Only the order of these positions matters: attention to keys of this rank is causal, and
        # keys of another rank in this block come before all queries.
        query_at = 0 if source == self._layout.rank else visible.keys
        key, value = self._split(kv[:, :, : visible.keys])
        block = AttentionBlock(
            query=self._query[:, :, visible.first_query :],
            key=key,
            value=value,
            query_at=query_at,
            key_at=0,
            row=visible.first_query,
        )
        yield 0, block

    def _split(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (view of the keys, view of the values)."""
        return kv[..., : self._width], kv[..., self._width :]

    def _pairs(self, kv: torch.Tensor, source: int) -> Iterator[tuple[int, AttentionBlock]]:
        """Yield a block for each pair of a chunk of queries and a chunk of keys."""
        for run, chunk in enumerate(self._layout.chunks(self._query.shape[2])):
            rows = slice(chunk.local_start, chunk.local_start + chunk.size)
            starts = None if self._starts is None else self._starts[:, rows]
            for keys in self._layout.chunks(kv.shape[2], source):
                key, value = self._split(kv[:, :, keys.local_start : keys.local_start + keys.size])
                block = AttentionBlock(
                    query=self._query[:, :, rows],
                    key=key,
                    value=value,
                    query_at=chunk.start,
                    key_at=keys.start,
                    starts=starts,
                    column=keys.local_start,
                )
                yield run, block


class _RingGradients:
    """Gradients of one rank's keys and values, summed over the ranks that they have visited."""

    def __init__(self, kv: torch.Tensor, exchange: _RingExchange | None) -> None:
        self.kv = kv
        self._exchange = exchange

    @cached_property
    def total(self) -> torch.Tensor:
        """Sum over the previous ranks, to which this rank adds.

        The first access waits until the sum has arrived.
        """
        if self._exchange is None:
            return torch.zeros_like(self.kv, dtype=wide_dtype(self.kv.dtype))
        return self._exchange.wait()


class _RingGradientSum(GradientSum):
    """Sum of the gradients of keys or of values, as columns of `_RingGradients.total`."""

    def __init__(self, gradients: _RingGradients, low: int, high: int) -> None:
        super().__init__(gradients.kv[..., low:high])
        self._gradients = gradients
        self._low = low
        self._high = high

    def add(self, start: int, gradient: torch.Tensor) -> None:
        total = self._gradients.total[..., self._low : self._high]
        total[:, :, start : start + gradient.shape[2]].add_(gradient)


def _ring_steps(
    local: torch.Tensor, place: SequencePlacement
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, its tensor) for every rank, starting with this one.

    The next tensor is received while the caller uses the current one.
    """
    ranks = place.layout.ranks
    rank = place.layout.rank
    current = local.contiguous()
    for step in range(ranks):
        source = (rank - step) % ranks
        if step == ranks - 1:
            yield source, current
            return
        exchange = _RingExchange(current, place)
        yield source, current
        current = exchange.wait()


class _RingExchange:
    """Exchange that sends a tensor to the next rank and receives one from the previous rank."""

    def __init__(self, tensor: torch.Tensor, place: SequencePlacement) -> None:
        ranks = place.layout.ranks
        rank = place.layout.rank
        following = dist.get_global_rank(place.group, (rank + 1) % ranks)
        previous = dist.get_global_rank(place.group, (rank - 1) % ranks)
        # The tensor must stay alive until the message has left.
        self._sent = tensor
        self._received = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, place.group),
                dist.P2POp(dist.irecv, self._received, previous, place.group),
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
    place: SequencePlacement,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if sinks is not None:
        # Only the sinks of this rank's heads.
        sinks = sinks.chunk(place.layout.ranks)[place.layout.rank]

    def compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _SequenceAttention.apply(query, key, value, starts, rule, sinks)

    return exchange_heads(query, key, value, place, compute)


def exchange_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    place: SequencePlacement,
    compute: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Compute attention with all tokens of some heads on each of n ranks. Collective.

    Args:
        query: [batch, heads, tokens / n, head_dim].
        key: [batch, kv_heads, tokens / n, head_dim].
        value: [batch, kv_heads, tokens / n, width].
        place: Layout and process group.
        compute: Function that computes the attention output from queries, keys and values of
            complete sequences, for the heads of this rank.

    Returns:
        [batch, heads, tokens / n, width].
    """
    # Key-value heads are repeated until their number is a multiple of the number of ranks.
    copies = lcm(key.shape[1], place.layout.ranks) // key.shape[1]
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    query, key, value = (_HeadExchange.apply(x, place, True) for x in (query, key, value))
    return _HeadExchange.apply(compute(query, key, value), place, False)


class _HeadExchange(torch.autograd.Function):
    """Exchange between a part of the tokens with all heads and all tokens with a part of the heads.

    On n ranks it converts [batch, heads, tokens / n, width] to [batch, heads / n, tokens, width] if
    `to_tokens` is set, and does the reverse otherwise.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, place: SequencePlacement, to_tokens: bool
    ) -> torch.Tensor:
        ctx.place = place
        ctx.to_tokens = to_tokens
        return _all_to_all(x, place, to_tokens=to_tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _HeadExchange.apply(grad, ctx.place, not ctx.to_tokens), None, None


def _all_to_all(x: torch.Tensor, place: SequencePlacement, *, to_tokens: bool) -> torch.Tensor:
    ranks = place.layout.ranks
    # Tensors are [batch, heads, tokens, width].
    split_dim, joined_dim = (1, 2) if to_tokens else (2, 1)
    # [ranks, batch, ...]
    sent = torch.stack(x.chunk(ranks, split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=place.group)
    return torch.cat(received.unbind(), joined_dim)


class _SequenceAttention(torch.autograd.Function):
    """Attention of complete sequences for the heads of this rank."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None,
        rule: AttentionRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        softmax = PartialSoftmax(query, value.shape[3])
        attend(AttentionBlock(query, key, value, 0, 0, starts), rule, softmax)
        output, log_sum_exp = softmax.finished(sinks)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, starts, sinks)
        ctx.rule = rule
        return output

    @staticmethod
    @differentiable_once(_NO_CONTEXT_PARALLELISM)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum_exp, starts, sinks = ctx.saved_tensors
        into = GradientSums(GradientSum(query), GradientSum(key), GradientSum(value))
        attend_backward(
            AttentionBlock(query, key, value, 0, 0, starts),
            ctx.rule,
            BackwardInputs(grad, output, log_sum_exp),
            into,
        )
        grads = [
            gradient.total.to(gradient.like.dtype)
            for gradient in (into.query, into.key, into.value)
        ]
        return *grads, None, None, sink_gradient(sinks, grad, output, [log_sum_exp])
