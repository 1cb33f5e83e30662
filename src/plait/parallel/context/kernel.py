"""Attention of some queries to some keys, as part of a softmax over more keys.

The mask follows from the positions of queries and keys in the sequence, so none is passed. On a GPU
one fused kernel computes a complete block. If the kernel does not support the shape of a block, the
block is divided into parts without a mask or with a causal mask, or into tiles that are small
enough for a mask in memory. Scores are computed in float32 or wider. This module does not
communicate.

FlexAttention receives the mask as a function of positions, and skips blocks of scores that are
fully masked. It is compiled, except on CPUs, where torch has no backward for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch.utils.weak import WeakIdKeyDictionary

from plait._torch.attention import (
    CPU,
    EFFICIENT,
    FLASH,
    Band,
    FusedAttention,
    Softmax,
    why_not_efficient,
    why_not_flash,
    why_not_flex,
)
from plait._torch.operators import FakeTensor, view_base
from plait.cluster import accelerator
from plait.sizes import wide_dtype

TILE_ELEMENTS = 2**22
"""Largest number of scores per tile. 2^22 scores in float32 are 16 MiB."""


# Log-sum-exp of a query that sees no key. It is finite, so that the difference of two of them is
# not NaN.
LOWEST = -1e30


Kernel = Literal["sdpa", "cpu", "flash", "efficient", "flex", "products"]
"""Kernel of a layer. "sdpa" means the best one, and "products" matrix products in tiles."""


FUSED: dict[Kernel, FusedAttention] = {"cpu": CPU, "flash": FLASH, "efficient": EFFICIENT}
"""Fused kernels of torch that return the log-sum-exp."""


@dataclass(frozen=True)
class AttentionRule:
    """Attention settings of a layer.

    Attributes:
        scale: Factor of the scores.
        window: Number of tokens that a token attends to, itself included, or None for all previous
            tokens.
        softcap: Cap of the scores, which become `softcap * tanh(score / softcap)`, or None.
        kernel: Kernel of the layer. "sdpa" stands for the best kernel of the device (`kernel_for`).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    kernel: Kernel = "sdpa"


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and keys whose scores are computed together.

    Attributes:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, width].
        query_at: Position of the first query in the sequence.
        key_at: Position of the first key in the sequence.
        starts: Position at which the document of each query begins [batch, queries], or None if
            there is only one document.
        row: Index of the first query in the tensors to which results are added.
        column: Index of the first key in the tensors to which gradients are added.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_at: int
    key_at: int
    starts: torch.Tensor | None = None
    row: int = 0
    column: int = 0

    def rows(self, start: int, end: int) -> AttentionBlock:
        """Return the block with the queries from index `start` up to but not including `end`."""
        return replace(
            self,
            query=self.query[:, :, start:end],
            query_at=self.query_at + start,
            starts=None if self.starts is None else self.starts[:, start:end],
            row=self.row + start,
        )

    def keys(self, low: int, high: int) -> AttentionBlock:
        """Return the block with the keys from position `low` up to but not including `high`."""
        start = low - self.key_at
        end = high - self.key_at
        return replace(
            self,
            key=self.key[:, :, start:end],
            value=self.value[:, :, start:end],
            key_at=low,
            column=self.column + start,
        )

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.query.shape[1] // self.key.shape[1]


def attend(block: AttentionBlock, rule: AttentionRule, into: PartialSoftmax) -> None:
    """Add the keys of a block to the softmax of its queries.

    Args:
        block: Queries and keys.
        rule: Rule of the layer.
        into: Softmax of all queries. Results are added starting at index `block.row`.
    """
    visible = _drop_masked(block, rule)
    if visible is None:
        return
    block = visible
    kernel = _choose_kernel(block, rule)
    if kernel == "flex":
        output, log_sum_exp = _attend_flex(block, rule)
        into.add(block.row, output, log_sum_exp.clamp_(min=LOWEST))
        return

    fused = FUSED.get(kernel)
    band = _band(block, rule)
    if fused is not None and _supports(fused, block, band):
        key, value = _heads_for(fused, block)
        into.add(block.row, *fused.forward((block.query, key, value), band, rule.scale))
        return

    # Without a window the keys before the first query are fully visible and the others causal.
    # Fused kernels support both.
    halves = _divide_keys(block)
    if halves is not None:
        for half in halves:
            attend(half, rule, into)
        return

    results = [_attend_tile(tile, rule) for tile in _divide_queries(block)]
    outputs, log_sum_exps = zip(*results, strict=True)
    into.add(block.row, torch.cat(outputs, 2), torch.cat(log_sum_exps, 2))


def attend_backward(
    block: AttentionBlock, rule: AttentionRule, outputs: BackwardInputs, into: GradientSums
) -> None:
    """Add the gradients that flow through the keys of a block.

    Args:
        block: Queries and keys.
        rule: Rule of the layer.
        outputs: Inputs of the backward for all queries. Those of the block begin at `block.row`.
        into: Sums that receive the gradients.
    """
    visible = _drop_masked(block, rule)
    if visible is None:
        return
    block = visible
    kernel = _choose_kernel(block, rule)
    first_row = block.row
    end_row = first_row + block.query.shape[2]
    if kernel == "flex":
        into.add(block, *_flex_gradients(block, rule, outputs.rows(first_row, end_row)))
        return

    fused = FUSED.get(kernel)
    band = _band(block, rule)
    if fused is not None and _supports(fused, block, band):
        key, value = _heads_for(fused, block)
        rows = outputs.rows(first_row, end_row)
        softmax = Softmax(rows.grad, rows.output, rows.log_sum_exp)
        gradients = fused.backward((block.query, key, value), softmax, band, rule.scale)
        into.add(block, *gradients)
        return

    halves = _divide_keys(block)
    if halves is not None:
        for half in halves:
            attend_backward(half, rule, outputs, into)
        return

    for tile in _divide_queries(block):
        visible = _drop_masked(tile, rule)
        if visible is not None:
            into.add(visible, *_tile_gradients(visible, rule, outputs))


class PartialSoftmax:
    """Running softmax: the output and the log-sum-exp over the keys that were added so far."""

    def __init__(self, query: torch.Tensor, width: int) -> None:
        """Create a softmax to which no keys were added yet.

        Args:
            query: [batch, heads, queries, head_dim], all queries of this softmax.
            width: Width of a value.
        """
        self._query = query
        self._width = width
        self._output: torch.Tensor | None = None
        self._log_sum_exp: torch.Tensor | None = None

    def add(self, row: int, output: torch.Tensor, log_sum_exp: torch.Tensor) -> None:
        """Add the softmax over more keys for the queries starting at index `row`.

        This object may change both tensors in place, so the caller must not use them afterwards.
        """
        count = output.shape[2]
        dtype = wide_dtype(self._query.dtype)
        if self._output is None or self._log_sum_exp is None:
            if count == self._query.shape[2]:
                # One kernel often computes all keys. Its results are then neither cast nor merged.
                self._output = output
                self._log_sum_exp = log_sum_exp
                return
            shape = self._query.shape[:3]
            self._output = self._query.new_zeros(*shape, self._width, dtype=dtype)
            self._log_sum_exp = self._query.new_full(shape, LOWEST, dtype=dtype)

        self._output = self._output.to(dtype)
        merged_output = self._output[:, :, row : row + count]
        merged_log_sum_exp = self._log_sum_exp[:, :, row : row + count]
        # Let l be the new log-sum-exp, m the previous one, and L that of both. The new output has
        # the weight exp(l - L) = sigmoid(l - m).
        weight = torch.sigmoid(log_sum_exp - merged_log_sum_exp)
        merged_output.lerp_(output.to(dtype), weight.unsqueeze(-1))
        torch.logaddexp(merged_log_sum_exp, log_sum_exp, out=merged_log_sum_exp)

    def finished(self, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (output in the dtype of the queries, log-sum-exp over all keys).

        Args:
            sinks: Score of one additional key per head [heads]. The value vector of this key is 0.
                The key is added once, after the parts of the sequence are combined.
        """
        output = self._output
        log_sum_exp = self._log_sum_exp
        # Each token sees itself, so something was added.
        assert output is not None and log_sum_exp is not None
        if sinks is not None:
            total = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype)[:, None])
            output = output * torch.exp(log_sum_exp - total).unsqueeze(-1)
            log_sum_exp = total
        return output.to(self._query.dtype), log_sum_exp


@dataclass(frozen=True)
class BackwardInputs:
    """Inputs of the backward for some queries.

    Attributes:
        grad: Gradient of `output`.
        output: Output over all keys.
        log_sum_exp: Log-sum-exp over all keys.
    """

    grad: torch.Tensor
    output: torch.Tensor
    log_sum_exp: torch.Tensor
    _rows: dict[tuple[int, int], BackwardInputs] = field(default_factory=dict)

    def rows(self, start: int, end: int) -> BackwardInputs:
        """Return the inputs for the queries from index `start` up to but not including `end`.

        The tensors of the result are contiguous, as fused kernels require. The result is cached
        for the next block with the same queries.
        """
        if (start, end) == (0, self.output.shape[2]):
            return self
        if (start, end) not in self._rows:
            self._rows[start, end] = BackwardInputs(
                grad=_pack_tokens(self.grad[:, :, start:end]),
                output=_pack_tokens(self.output[:, :, start:end]),
                log_sum_exp=self.log_sum_exp[:, :, start:end].contiguous(),
            )
        return self._rows[start, end]


def _pack_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, tokens, width] with tokens contiguous in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class GradientSum:
    """Gradient of one tensor, summed over blocks.

    A sum of several terms has the dtype that `wide_dtype` returns.
    """

    def __init__(self, like: torch.Tensor, total: torch.Tensor | None = None) -> None:
        """Create a sum without terms.

        Args:
            like: The tensor whose gradient this is.
            total: Tensor of zeros that receives the sum. Without it, a first gradient that covers
                all tokens becomes the sum and is not copied.
        """
        self.like = like
        self._total = total

    def add(self, start: int, gradient: torch.Tensor) -> None:
        """Add a gradient of the tokens starting at index `start`.

        This object may change the tensor in place, so the caller must not use it afterwards.
        """
        if self._total is None and gradient.shape[2] == self.like.shape[2]:
            # One kernel often computes the full gradient. It is then neither copied nor added.
            self._total = gradient
            return
        self._total = self.total.to(wide_dtype(self.like.dtype))
        self._total[:, :, start : start + gradient.shape[2]].add_(gradient)

    @property
    def total(self) -> torch.Tensor:
        """Sum of the gradients added so far."""
        if self._total is None:
            self._total = torch.zeros_like(self.like, dtype=wide_dtype(self.like.dtype))
        return self._total


@dataclass(frozen=True)
class GradientSums:
    """Sums of the gradients of queries, keys and values."""

    query: GradientSum
    key: GradientSum
    value: GradientSum

    def add(
        self, block: AttentionBlock, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Add the gradients of a block.

        The gradients of keys and values may have one head per query head. They are then summed over
        the query heads of each key-value head.
        """
        self.query.add(block.row, query)
        self.key.add(block.column, _sum_heads(key, block.key.shape[1]))
        self.value.add(block.column, _sum_heads(value, block.value.shape[1]))


def sink_gradient(
    sinks: torch.Tensor | None,
    grad: torch.Tensor,
    output: torch.Tensor,
    log_sum_exps: Sequence[torch.Tensor],
) -> torch.Tensor | None:
    """Return the contribution of some queries to the gradient of the attention sinks.

    Args:
        sinks: Attention sinks [heads], or None for a layer without sinks.
        grad: Gradient of `output`.
        output: First result of `PartialSoftmax.finished`.
        log_sum_exps: Second results of `PartialSoftmax.finished`, for consecutive queries.
    """
    if sinks is None:
        return None
    log_sum_exp = torch.cat(list(log_sum_exps), 2)
    weights = torch.exp(sinks.to(log_sum_exp.dtype)[:, None] - log_sum_exp)
    grad_dot_output = (grad.to(weights.dtype) * output.to(weights.dtype)).sum(-1)
    return -(weights * grad_dot_output).sum((0, 2)).to(sinks.dtype)


def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int],
    rule: AttentionRule,
    *,
    documents: bool,
) -> tuple[Kernel, str]:
    """Choose the kernel of a layer.

    Args:
        device: Device of the tensors.
        dtype: Dtype of queries, keys and values.
        widths: Head dimensions of queries and of values.
        rule: Rule of the layer.
        documents: Whether sequences consist of several documents.

    Returns:
        (kernel, reason). The reason says why a GPU uses "products" and no fused kernel.
    """
    if rule.kernel == "products":
        return "products", 'attn_implementation is "eager"'
    if rule.kernel != "sdpa":
        return rule.kernel, ""

    has_mask = documents or rule.softcap is not None
    if device.type == "cpu":
        if has_mask or widths[0] != widths[1]:
            return "products", ""
        return "cpu", ""
    if not accelerator.is_accelerator(device):
        return "products", f"no fused kernel of torch is known for devices of type {device.type!r}"

    why_not = []
    if not has_mask:
        reason = why_not_flash(device, dtype, max(widths))
        if not reason and (rule.window is None or FLASH.bands):
            return "flash", ""
        why_not.append(
            reason or "ROCm's FlashAttention supports no window between parts of a sequence"
        )
        reason = why_not_efficient(dtype)
        if not reason and rule.window is None:
            return "efficient", ""
        why_not.append(reason or "efficient attention has no window between parts of a sequence")

    reason = why_not_flex(dtype, min(widths))
    if not reason:
        return "flex", ""
    return "products", "; ".join([*why_not, reason])


def _choose_kernel(block: AttentionBlock, rule: AttentionRule) -> Kernel:
    widths = block.query.shape[3], block.value.shape[3]
    return kernel_for(
        block.query.device, block.query.dtype, widths, rule, documents=block.starts is not None
    )[0]


def _drop_masked(block: AttentionBlock, rule: AttentionRule) -> AttentionBlock | None:
    """Drop keys that are masked for all queries, and queries whose window is after all keys.

    Returns:
        The smaller block, or None if nothing remains.
    """
    count = block.query.shape[2]
    low = block.key_at
    high = min(block.key_at + block.key.shape[2], block.query_at + count)
    if rule.window is not None:
        low = max(low, block.query_at - rule.window + 1)
        count = min(count, high + rule.window - 1 - block.query_at)
    starts = block.starts
    # Only on CPUs, because on a GPU the host would wait for the device.
    if starts is not None and starts.device.type == "cpu" and not isinstance(starts, FakeTensor):
        low = max(low, int(starts.min()))
    if low >= high or count <= 0:
        return None

    if count < block.query.shape[2]:
        block = block.rows(0, count)
    if high - low < block.key.shape[2]:
        block = block.keys(low, high)
    return block


def _band(block: AttentionBlock, rule: AttentionRule) -> Band:
    """Return the band of keys that are not masked by causality or by the sliding window."""
    queries = block.query.shape[2]
    keys = block.key.shape[2]
    # Query i attends to key j if i + ahead - window < j <= i + ahead. A band counts from i + keys -
    # queries. `_drop_masked` has left no query without a key, so neither limit is negative.
    ahead = block.query_at - block.key_at
    right = ahead - (keys - queries) if ahead < keys - 1 else None
    if rule.window is None:
        return Band(None, right)
    # First key that the first query attends to.
    first_key = ahead - rule.window + 1
    left = keys - queries - first_key if first_key + queries > 1 else None
    return Band(left, right)


def _supports(fused: FusedAttention, block: AttentionBlock, band: Band) -> bool:
    return block.starts is None and (
        fused.bands or band.is_square(block.query.shape[2], block.key.shape[2])
    )


def _heads_for(fused: FusedAttention, block: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
    if fused.shares_heads:
        return block.key, block.value
    return _repeat_heads(block.key, block.groups), _repeat_heads(block.value, block.groups)


def _divide_keys(block: AttentionBlock) -> tuple[AttentionBlock, AttentionBlock] | None:
    """Divide the keys at the position of the first query.

    Returns:
        (block with the keys from that position on, block with the keys before it), or None if one
        of the two would be empty or the block has documents.
    """
    low = block.key_at
    high = low + block.key.shape[2]
    if block.starts is not None or not low < block.query_at < high:
        return None
    return block.keys(block.query_at, high), block.keys(low, block.query_at)


def _divide_queries(block: AttentionBlock) -> list[AttentionBlock]:
    """Divide the queries into tiles of at most TILE_ELEMENTS scores, but at least one query."""
    batch, heads, count, _ = block.query.shape
    step = max(1, TILE_ELEMENTS // (batch * heads * block.key.shape[2]))
    return [block.rows(start, min(start + step, count)) for start in range(0, count, step)]


def _attend_tile(block: AttentionBlock, rule: AttentionRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, log-sum-exp) of a tile, in the dtype that `wide_dtype` returns."""
    visible = _drop_masked(block, rule)
    # Every query of the tile needs a result, even if it sees no key.
    if visible is None or visible.query.shape[2] < block.query.shape[2]:
        visible = block
    scores, _ = _scores(visible, rule)
    log_sum_exp = torch.logsumexp(scores, -1).clamp_(min=LOWEST)
    weights = torch.exp(scores - log_sum_exp.unsqueeze(-1))
    output = weights.to(visible.value.dtype) @ _repeat_heads(visible.value, visible.groups)
    return output.to(scores.dtype), log_sum_exp


def _tile_gradients(
    block: AttentionBlock, rule: AttentionRule, outputs: BackwardInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = slice(block.row, block.row + block.query.shape[2])
    grad, output, log_sum_exp = (
        x[:, :, rows] for x in (outputs.grad, outputs.output, outputs.log_sum_exp)
    )
    scores, slope = _scores(block, rule)
    weights = torch.exp(scores - log_sum_exp.unsqueeze(-1))
    dtype = block.query.dtype
    key = _repeat_heads(block.key, block.groups)
    value = _repeat_heads(block.value, block.groups)

    grad_dot_output = (grad.to(scores.dtype) * output.to(scores.dtype)).sum(-1, keepdim=True)
    grad_scores = weights * ((grad @ value.transpose(-1, -2)).to(scores.dtype) - grad_dot_output)
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_scores = (grad_scores * rule.scale).to(dtype)

    grad_query = grad_scores @ key
    grad_key = grad_scores.transpose(-1, -2) @ block.query
    grad_value = weights.to(dtype).transpose(-1, -2) @ grad
    return grad_query, grad_key, grad_value


def _scores(block: AttentionBlock, rule: AttentionRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (scores [batch, heads, queries, keys], derivative of the softcap).

    Scores of masked keys are -inf. The derivative is None if the layer has no softcap.
    """
    key = _repeat_heads(block.key, block.groups)
    scores = (block.query @ key.transpose(-1, -2)).to(wide_dtype(block.query.dtype)) * rule.scale
    slope = None
    if rule.softcap is not None:
        capped = torch.tanh(scores / rule.softcap)
        scores = capped * rule.softcap
        slope = 1 - capped * capped
    mask = _mask(block, rule)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores, slope


def _mask(block: AttentionBlock, rule: AttentionRule) -> torch.Tensor | None:
    """Return the mask [1 or batch, 1, queries, keys], or None if no key is masked."""
    if block.starts is None and _band(block, rule) == Band():
        return None
    query = torch.arange(
        block.query_at, block.query_at + block.query.shape[2], device=block.query.device
    )[:, None]
    key = torch.arange(block.key_at, block.key_at + block.key.shape[2], device=block.query.device)
    is_visible = (key <= query)[None]
    if block.starts is not None:
        is_visible = is_visible & (key >= block.starts[..., None])
    if rule.window is not None:
        is_visible = is_visible & (key > query - rule.window)
    return is_visible[:, None]


def _repeat_heads(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat key-value heads [batch, kv_heads, ...], once per query head that shares them."""
    if groups == 1:
        return x
    return x.repeat_interleave(groups, dim=1)


def _sum_heads(gradient: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum the gradients of the query heads that share a key-value head."""
    if gradient.shape[1] == kv_heads:
        return gradient
    return gradient.unflatten(1, (kv_heads, -1)).sum(2)


def _attend_flex(block: AttentionBlock, rule: AttentionRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of a block with FlexAttention. The result is differentiable.

    Returns:
        (output [batch, heads, queries, width], log-sum-exp [batch, heads, queries]). The
        log-sum-exp is -inf for a query with only masked keys.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    device = block.query.device
    softcap = _scalar(rule.softcap or 1.0, device)

    def cap_score(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / softcap) * softcap

    output, auxiliary = _function("flex_attention", device.type)(
        block.query,
        block.key,
        block.value,
        score_mod=None if rule.softcap is None else cap_score,
        block_mask=_block_mask(block, rule),
        scale=rule.scale,
        enable_gqa=block.groups > 1,
        return_aux=AuxRequest(lse=True),
    )
    return output, auxiliary.lse


def _flex_gradients(
    block: AttentionBlock, rule: AttentionRule, outputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    """Return the contribution of a block to the gradients of query, key and value.

    Let o and l be the output and the log-sum-exp over these keys, and O and L those over all keys.
    O is the sum of w o over all parts of the keys, with w = exp(l - L). A gradient g of O therefore
    gives the gradient w g for o, and w (g o - g O) for l.

    Args:
        block: Queries and keys.
        rule: Rule of the layer.
        outputs: Inputs of the backward for the queries of the block.
    """
    query, key, value = (x.detach().requires_grad_() for x in (block.query, block.key, block.value))
    with torch.enable_grad():
        part, part_log_sum_exp = _attend_flex(
            replace(block, query=query, key=key, value=value), rule
        )
    wide = part_log_sum_exp.dtype
    weight = torch.exp(part_log_sum_exp.detach() - outputs.log_sum_exp.to(wide))
    part_grad = weight.unsqueeze(-1) * outputs.grad.to(wide)
    log_sum_exp_grad = (part_grad * (part.detach().to(wide) - outputs.output.to(wide))).sum(-1)
    return torch.autograd.grad(
        (part, part_log_sum_exp), (query, key, value), (part_grad.to(part.dtype), log_sum_exp_grad)
    )


# Block masks of a micro-batch, keyed by its tensor of document starts. All layers share them.
_document_masks: Any = WeakIdKeyDictionary()


def _block_mask(block: AttentionBlock, rule: AttentionRule) -> Any:
    device = block.query.device
    sizes = (block.query.shape[2], block.key.shape[2], block.query_at, block.key_at, rule.window)
    starts = block.starts
    if starts is None:
        # A dry run's tensors have no values, so its masks are not shared with real runs.
        if isinstance(block.query, FakeTensor):
            return _new_mask(device, *sizes, None)
        return _position_mask(device, *sizes, None)
    masks = _document_masks.setdefault(view_base(starts), {})
    if sizes not in masks:
        # The mask refers to a copy, because an entry that refers to its own weak key would live
        # forever.
        masks[sizes] = _new_mask(device, *sizes, starts.clone())
    return masks[sizes]


# A mask that an evaluation makes is used by training too.
@torch.inference_mode(False)
def _new_mask(
    device: torch.device,
    queries: int,
    keys: int,
    query_at: int,
    key_at: int,
    window: int | None,
    starts: torch.Tensor | None,
) -> Any:
    # Positions are passed as tensors. Python numbers would recompile the code for each value, and
    # torch runs a function uncompiled after it has compiled it eight times.
    first_query = _scalar(query_at, device)
    first_key = _scalar(key_at, device)
    # Without a window the last query sees all tokens before it.
    window_tokens = _scalar(query_at + queries if window is None else window, device)

    def is_visible(
        batch: torch.Tensor, _head: torch.Tensor, query_index: torch.Tensor, key_index: torch.Tensor
    ) -> torch.Tensor:
        query_position = query_index + first_query
        key_position = key_index + first_key
        visible = (key_position <= query_position) & (key_position > query_position - window_tokens)
        if starts is not None:
            visible = visible & (key_position >= starts[batch, query_index])
        return visible

    rows = None if starts is None else len(starts)
    return _function("create_block_mask", device.type)(
        is_visible, rows, None, queries, keys, device=device
    )


# Block masks that depend on positions only. All layers and micro-batches share them.
_position_mask = lru_cache(maxsize=64)(_new_mask)


def _scalar(number: float, device: torch.device) -> torch.Tensor:
    """Return a number as a 0-dimensional tensor, without waiting for the device."""
    # `torch.full` fills the tensor on the device. A copy from the host would wait.
    return torch.full((), number, device=device)


@cache
def _function(name: str, device_type: str) -> Any:
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    if device_type == "cpu":
        return function
    return torch.compile(function)
