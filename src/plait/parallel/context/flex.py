"""FlexAttention of torch as a part of a softmax over more keys: outputs, log-sum-exps, gradients.

Visibility is a function of positions, so that blocks of scores without a visible pair are skipped.
FlexAttention is compiled, except on CPUs, where torch has no backward for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from plait._torch.operators import FakeTensor, view_base

# Block masks of a micro-batch, keyed by its tensor of document starts. All layers share them.
_document_masks: Any = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Scores:
    """Visibility and scaling of the scores of some queries and keys.

    Attributes:
        query_at: Position of the first query in the sequence.
        key_at: Position of the first key in the sequence.
        starts: [batch, queries], position at which the document of a query begins, or None.
        window: Number of tokens that a query sees, itself included; None for all.
        scale: Factor of the scores.
        softcap: Cap of the scores, see `kernel.Rule`.
    """

    query_at: int
    key_at: int
    starts: torch.Tensor | None
    window: int | None
    scale: float
    softcap: float | None


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention. The result is differentiable.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, width].
        scores: Visibility and scaling of the scores.

    Returns:
        The output [batch, heads, queries, width], and the log-sum-exp [batch, heads, queries],
        which is -inf where a query sees no key.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    softcap = _scalar(scores.softcap or 1.0, query.device)

    def cap_score(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / softcap) * softcap

    output, auxiliary = _function("flex_attention", query.device.type)(
        query,
        key,
        value,
        score_mod=None if scores.softcap is None else cap_score,
        block_mask=_block_mask(query, key, scores),
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return output, auxiliary.lse


def gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, ...]:
    """Return the share of the gradients of query, key and value that flows through these keys.

    Let o and l be the output and the log-sum-exp over these keys, and O and L those over all keys.
    O is the sum of w o over all parts of the keys, with w = exp(l - L). A gradient g of O therefore
    gives the gradient w g for o, and w (g o - g O) for l.

    Args:
        grad: Gradient of `output`.
        query: See `attention`.
        key: See `attention`.
        value: See `attention`.
        output: Output over all keys.
        log_sum_exp: Log-sum-exp over all keys.
        scores: Visibility and scaling of the scores.
    """
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    with torch.enable_grad():
        part, part_log_sum_exp = attention(query, key, value, scores)
    wide = part_log_sum_exp.dtype
    weight = torch.exp(part_log_sum_exp.detach() - log_sum_exp.to(wide))
    part_grad = weight.unsqueeze(-1) * grad.to(wide)
    log_sum_exp_grad = (part_grad * (part.detach().to(wide) - output.to(wide))).sum(-1)
    return torch.autograd.grad(
        (part, part_log_sum_exp), (query, key, value), (part_grad.to(part.dtype), log_sum_exp_grad)
    )


def _block_mask(query: torch.Tensor, key: torch.Tensor, scores: Scores) -> Any:
    sizes = (query.shape[2], key.shape[2], scores.query_at, scores.key_at, scores.window)
    starts = scores.starts
    if starts is None:
        # A dry run's tensors have no values, so its masks are not shared with real runs.
        if isinstance(query, FakeTensor):
            return _new_mask(query.device, *sizes, None)
        return _position_mask(query.device, *sizes, None)
    masks = _document_masks.setdefault(view_base(starts), {})
    if sizes not in masks:
        # The mask refers to a copy, because an entry that refers to its own weak key would live
        # forever.
        masks[sizes] = _new_mask(query.device, *sizes, starts.clone())
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
    # Numbers are tensors, because code would be recompiled for each of them, and torch runs a
    # function uncompiled after it has compiled it eight times.
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
    """Return a 0-dimensional tensor."""
    # `torch.full` fills it on the device. A copy from the host would wait.
    return torch.full((), number, device=device)


@cache
def _function(name: str, device_type: str) -> Any:
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    if device_type == "cpu":
        return function
    return torch.compile(function)
