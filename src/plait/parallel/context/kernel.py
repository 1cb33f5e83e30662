"""Attention of some queries to some keys, as a part of a softmax over more keys: outputs, denominators, and gradients.

Queries and keys are told by where they stand in the sequence, so no mask is passed. The work is cut until a piece is visible in full, or
causal from its first token on (there SDPA's CPU kernel is used), or small enough for a mask; FlexAttention cuts it itself. Scores are
computed in float32 or wider. Nothing is communicated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from plait._torch.attention import cpu_attention, cpu_attention_backward
from plait._torch.operators import FakeTensor
from plait.parallel.context import flex

TILE_ELEMENTS = 2**22
"""Scores that exist at a time where a mask is needed; 2^22 are 16 MiB of float32."""
Form = Literal["full", "causal", "masked"]
Kernel = Literal["products", "sdpa", "flex"]


@dataclass(frozen=True)
class Rule:
    """What a layer does to its scores."""

    scale: float
    window: int | None = None
    """A token sees this many tokens, itself included; None: all before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    kernel: Kernel = "sdpa"
    """products: plain ones, in tiles. sdpa: SDPA's kernel where it computes this, else products. flex: FlexAttention."""


@dataclass(frozen=True)
class Piece:
    """Queries [batch, heads, n, head_dim] from place `query_at` of the sequence on, and keys and values [batch, kv_heads, m, ...] from
    `key_at` on. `starts` [batch, n]: where the document of a query begins; None where each sees all keys before it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_at: int
    key_at: int
    starts: torch.Tensor | None

    def rows(self, start: int, end: int) -> Piece:
        """Some of the queries."""
        starts = None if self.starts is None else self.starts[:, start:end]
        return Piece(self.query[:, :, start:end], self.key, self.value, self.query_at + start, self.key_at, starts)

    def keys(self, low: int, high: int) -> Piece:
        """The keys from place `low` to before `high` of the sequence."""
        start, end = low - self.key_at, high - self.key_at
        return Piece(self.query, self.key[:, :, start:end], self.value[:, :, start:end], self.query_at, low, self.starts)


Found = tuple[torch.Tensor, torch.Tensor]
"""Output [batch, heads, n, width], and the logarithm of the denominator [batch, heads, n], -inf for a query that sees none of the keys; in
the dtype of `wide`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(piece: Piece, rule: Rule) -> Found | None:
    """What these keys give these queries; None where none of them is visible to any."""
    low, high = _visible_keys(piece, rule)
    if low >= high:
        return None
    piece = piece.keys(low, high)
    if rule.kernel == "flex":
        output, denominator = flex.attention(piece.query, piece.key, piece.value, _scores_of(piece, rule))
        return output.to(wide(piece.query.dtype)), denominator.to(wide(piece.query.dtype))
    query_at, count = piece.query_at, piece.query.shape[2]
    if piece.starts is None and low < query_at < high:
        return merged(attend(piece.keys(query_at, high), rule), attend(piece.keys(low, query_at), rule))
    form = _form(piece, rule)
    if _is_fused(piece, rule, form):
        groups = piece.query.shape[1] // piece.key.shape[1]
        key, value = (_repeated(x, groups) for x in (piece.key, piece.value))
        output, denominator = cpu_attention(piece.query, key, value, causal=form == "causal", scale=rule.scale)
        return output.to(wide(piece.query.dtype)), denominator
    step = _tile_rows(piece)
    if step < count:
        tiles = [piece.rows(start, min(start + step, count)) for start in range(0, count, step)]
        outputs = [attend(tile, rule) or _nothing(tile) for tile in tiles]
        return torch.cat([output for output, _ in outputs], 2), torch.cat([denominator for _, denominator in outputs], 2)
    return _products(piece, rule, masked=form != "full")


def merged(one: Found | None, other: Found | None) -> Found | None:
    """Of a softmax over the keys of both."""
    if one is None or other is None:
        return one or other
    largest = torch.maximum(one[1], other[1])
    largest = torch.where(largest == -torch.inf, 0, largest)  # a query that sees none of these keys
    weights = [torch.exp(denominator - largest) for _, denominator in (one, other)]
    total = weights[0] + weights[1]
    output = one[0] * weights[0].unsqueeze(-1) + other[0] * weights[1].unsqueeze(-1)
    return output / total.clamp(min=torch.finfo(total.dtype).tiny).unsqueeze(-1), largest + torch.log(total)


def finished(found: Found | None, query: torch.Tensor, sinks: torch.Tensor | None = None) -> Found:
    """The output in the dtype of the queries, contiguous, of a softmax over all keys. `sinks` [heads] is the score of one more key of each
    head, whose value is 0: it counts here, once, after the parts of the sequence are put together."""
    assert found is not None  # each token sees itself
    output, denominator = found
    if sinks is not None:
        total = torch.logaddexp(denominator, sinks.to(denominator.dtype)[:, None])
        output, denominator = output * torch.exp(denominator - total).unsqueeze(-1), total
    return output.to(query.dtype).contiguous(), denominator.contiguous()


def sink_gradient(sinks: torch.Tensor | None, grad: torch.Tensor, found: Found) -> torch.Tensor | None:
    """Of `sinks` [heads], from these queries. `grad` is of the output; `found` is what `finished` returned."""
    if sinks is None:
        return None
    weights = torch.exp(sinks.to(found[1].dtype)[:, None] - found[1])
    expected = (grad.to(weights.dtype) * found[0].to(weights.dtype)).sum(-1)
    return -(weights * expected).sum((0, 2)).to(sinks.dtype)


@dataclass(frozen=True)
class Gradients:
    """Where gradients are added up, in the dtype of `wide`; of all queries and keys of a piece."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def rows(self, start: int, end: int) -> Gradients:
        """Of some of the queries."""
        return Gradients(self.query[:, :, start:end], self.key, self.value)

    def keys(self, start: int, end: int) -> Gradients:
        """Of some of the keys, by their place in the piece."""
        return Gradients(self.query, self.key[:, :, start:end], self.value[:, :, start:end])


def attend_backward(piece: Piece, rule: Rule, grad: torch.Tensor, found: Found, into: Gradients) -> None:
    """Add the gradients that go through these keys. `grad` is of the output; `found` is the output and the denominator over all keys."""
    low, high = _visible_keys(piece, rule)
    if low >= high:
        return
    into = into.keys(low - piece.key_at, high - piece.key_at)
    piece = piece.keys(low, high)
    if rule.kernel == "flex":
        found_by_flex = flex.gradients(piece.query, piece.key, piece.value, _scores_of(piece, rule), grad, found)
        for total, gradient in zip((into.query, into.key, into.value), found_by_flex, strict=True):
            total.add_(gradient)
        return
    query_at, count = piece.query_at, piece.query.shape[2]
    if piece.starts is None and low < query_at < high:
        attend_backward(piece.keys(query_at, high), rule, grad, found, into.keys(query_at - low, high - low))
        attend_backward(piece.keys(low, query_at), rule, grad, found, into.keys(0, query_at - low))
        return
    form = _form(piece, rule)
    fused, step = _is_fused(piece, rule, form), _tile_rows(piece)
    if not fused and step < count:
        for start in range(0, count, step):
            end = min(start + step, count)
            part = (found[0][:, :, start:end], found[1][:, :, start:end])
            attend_backward(piece.rows(start, end), rule, grad[:, :, start:end], part, into.rows(start, end))
        return
    groups = piece.query.shape[1] // piece.key.shape[1]
    if fused:
        key, value = (_repeated(x, groups) for x in (piece.key, piece.value))
        query, key, value = cpu_attention_backward(
            grad, piece.query, key, value, found[0], found[1], causal=form == "causal", scale=rule.scale
        )
    else:
        query, key, value = _gradients(piece, rule, grad, found, masked=form != "full")
    into.query.add_(query)
    into.key.add_(_summed(key, groups))
    into.value.add_(_summed(value, groups))


# ---- what is visible ------------------------------------------------------------------------------------------------------------------


def _visible_keys(piece: Piece, rule: Rule) -> tuple[int, int]:
    """The keys, by place in the sequence, outside of which no query of the piece sees any."""
    low, high = piece.key_at, min(piece.key_at + piece.key.shape[2], piece.query_at + piece.query.shape[2])
    if rule.window is not None:
        low = max(low, piece.query_at - rule.window + 1)
    starts = piece.starts
    if starts is not None and starts.device.type == "cpu" and not isinstance(starts, FakeTensor):  # a GPU would be waited for
        low = max(low, int(starts.min()))
    return low, high


def _form(piece: Piece, rule: Rule) -> Form:
    first, count = piece.query_at, piece.query.shape[2]
    low, high = piece.key_at, piece.key_at + piece.key.shape[2]
    if piece.starts is not None:
        return "masked"
    if rule.window is not None and low < first + count - rule.window:
        return "masked"
    if high <= first + 1:
        return "full"
    return "causal" if low == first and high == first + count else "masked"


def _tile_rows(piece: Piece) -> int:
    batch, heads, _, _ = piece.query.shape
    return max(1, TILE_ELEMENTS // (batch * heads * piece.key.shape[2]))


def _mask(piece: Piece, rule: Rule) -> torch.Tensor:
    """[1 or batch, 1, queries, keys], whether a query sees a key."""
    query = torch.arange(piece.query_at, piece.query_at + piece.query.shape[2], device=piece.query.device)[:, None]
    key = torch.arange(piece.key_at, piece.key_at + piece.key.shape[2], device=piece.query.device)
    seen = (key <= query)[None]
    if piece.starts is not None:
        seen = seen & (key >= piece.starts[..., None])
    if rule.window is not None:
        seen = seen & (key > query - rule.window)
    return seen[:, None]


# ---- arithmetic -----------------------------------------------------------------------------------------------------------------------


def _is_fused(piece: Piece, rule: Rule, form: Form) -> bool:
    fits = piece.query.device.type == "cpu" and piece.query.shape[3] == piece.value.shape[3] and rule.softcap is None
    return rule.kernel == "sdpa" and fits and form != "masked"


def _scores_of(piece: Piece, rule: Rule) -> flex.Scores:
    return flex.Scores(piece.query_at, piece.key_at, piece.starts, rule.window, rule.scale, rule.softcap)


def _products(piece: Piece, rule: Rule, *, masked: bool) -> Found:
    scores, _ = _scores(piece, rule)
    if masked:
        scores = scores.masked_fill(~_mask(piece, rule), -torch.inf)
    denominator = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - _finite(denominator).unsqueeze(-1))
    output = weights.to(piece.value.dtype) @ _repeated(piece.value, piece.query.shape[1] // piece.key.shape[1])
    return output.to(scores.dtype), denominator


def _scores(piece: Piece, rule: Rule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [batch, heads, queries, keys], and the derivative of their cap."""
    key = _repeated(piece.key, piece.query.shape[1] // piece.key.shape[1])
    scores = (piece.query @ key.transpose(-1, -2)).to(wide(piece.query.dtype)) * rule.scale
    if rule.softcap is None:
        return scores, None
    bent = torch.tanh(scores / rule.softcap)
    return bent * rule.softcap, 1 - bent * bent


def _gradients(
    piece: Piece, rule: Rule, grad: torch.Tensor, found: Found, *, masked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores, slope = _scores(piece, rule)
    if masked:
        scores = scores.masked_fill(~_mask(piece, rule), -torch.inf)
    weights = torch.exp(scores - _finite(found[1]).unsqueeze(-1))
    groups, dtype = piece.query.shape[1] // piece.key.shape[1], piece.query.dtype
    key, value = (_repeated(x, groups) for x in (piece.key, piece.value))
    expected = (grad.to(scores.dtype) * found[0].to(scores.dtype)).sum(-1, keepdim=True)
    back = weights * ((grad @ value.transpose(-1, -2)).to(scores.dtype) - expected)
    back = back * rule.scale if slope is None else back * slope * rule.scale
    back = back.to(dtype)
    return back @ key, back.transpose(-1, -2) @ piece.query, weights.to(dtype).transpose(-1, -2) @ grad


def _finite(denominator: torch.Tensor) -> torch.Tensor:
    return torch.where(denominator == -torch.inf, 0, denominator)


def _nothing(piece: Piece) -> Found:
    shape, dtype = piece.query.shape[:3], wide(piece.query.dtype)
    output = piece.query.new_zeros(*shape, piece.value.shape[3], dtype=dtype)
    return output, piece.query.new_full(shape, -torch.inf, dtype=dtype)


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[batch, kv_heads, ...] for every query head."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse of `_repeated` for gradients."""
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)
