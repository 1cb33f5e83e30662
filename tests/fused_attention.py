"""References of torch's fused attention kernels for CUDA, in plain products, for devices that have no such kernels.

They take and return what the real kernels do (layouts, paddings, which key the mask is aligned at, what a query without keys gets), and
raise where a real kernel would, so that a caller that relies on anything else fails. Scores are in float32, or float64 for float64 inputs.
"""

import math
from contextlib import contextmanager

import torch


@contextmanager
def registered(dispatch_key):
    """Make the references the kernels of a dispatch key, "CPU" or "CUDA"."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, dispatch_key)
    library.impl("_flash_attention_backward", flash_backward, dispatch_key)
    library.impl("_scaled_dot_product_efficient_attention", efficient_forward, dispatch_key)
    library.impl(
        "_scaled_dot_product_efficient_attention_backward", efficient_backward, dispatch_key
    )
    try:
        yield
    finally:
        library._destroy()


def flash_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    """[batch, tokens, heads, head_dim]; causal and windows are aligned at the last query and the last key."""
    _check_flash(query, key, value)
    assert cum_seq_q is None and cum_seq_k is None and dropout_p == 0.0 and not return_debug_mask
    assert (max_q, max_k) == (query.shape[1], key.shape[1]) and scale is not None
    seen = _band(query, key, is_causal, window_size_left, window_size_right)
    output, log_sum_exp = _attention(*(x.transpose(1, 2) for x in (query, key, value)), seen, scale)
    # What FlashAttention 2 writes for a query that sees no key.
    log_sum_exp = torch.where(seen.any(-1), log_sum_exp, math.inf)
    made = torch.empty_like(query).copy_(output.transpose(1, 2))
    random = torch.empty(2, dtype=torch.uint64, device=query.device)
    return (
        made,
        log_sum_exp.contiguous(),
        random,
        torch.empty((), dtype=torch.uint64, device=query.device),
        query.new_empty(0),
    )


def flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    """Gradients with as many heads as their tensors. `logsumexp` [batch, heads, queries] is read without its strides."""
    _check_flash(query, key, value)
    batch, queries, heads, _ = query.shape
    assert logsumexp.is_contiguous() and logsumexp.shape == (batch, heads, queries), (
        logsumexp.shape,
        logsumexp.stride(),
    )
    assert (
        grad_out.shape == out.shape == query.shape
        and grad_out.dtype == out.dtype == query.dtype
        and scale is not None
    )
    assert (
        cum_seq_q is None
        and cum_seq_k is None
        and (max_q, max_k) == (queries, key.shape[1])
        and dropout_p == 0.0
    )
    seen = _band(query, key, is_causal, window_size_left, window_size_right)
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = _attention_backward(*tensors, logsumexp, seen, scale)
    return tuple(x.transpose(1, 2) for x in gradients)


def efficient_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    """[batch, heads, tokens, head_dim]; causal is aligned at the first query and the first key."""
    _check_efficient(query, key, value)
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0 and scale is not None
    output, log_sum_exp = _attention(query, key, value, _top_left(query, key, is_causal), scale)
    rows = query.shape[2]
    padded = log_sum_exp.new_full((*log_sum_exp.shape[:2], -(-rows // 32) * 32), math.inf)
    padded[..., :rows] = log_sum_exp
    made = output.transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.empty((), dtype=torch.int64)
    return made, padded, seed, seed


def efficient_backward(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    """`logsumexp` is padded to a multiple of 32 queries, and `out` is read as if tokens had no gaps."""
    _check_efficient(query, key, value)
    rows = query.shape[2]
    assert (
        attn_bias is None
        and dropout_p == 0.0
        and list(grad_input_mask) == [True, True, True, False]
        and scale is not None
    )
    assert (
        logsumexp.shape == (*query.shape[:2], -(-rows // 32) * 32) and logsumexp.is_contiguous()
    ), logsumexp.shape
    assert out.transpose(1, 2).is_contiguous(), out.stride()
    seen = _top_left(query, key, is_causal)
    return (
        *_attention_backward(grad_out_, query, key, value, out, logsumexp[..., :rows], seen, scale),
        None,
    )


def _check_flash(query, key, value):
    width = query.shape[3]
    assert width % 8 == 0 and width <= 256, f"head_dim {width}"
    assert (
        key.shape == value.shape and key.shape[3] == width and query.shape[2] % key.shape[2] == 0
    ), (query.shape, key.shape, value.shape)
    assert all(x.stride(3) == 1 for x in (query, key, value))


def _check_efficient(query, key, value):
    assert query.shape[1] == key.shape[1] == value.shape[1] and query.shape[3] == key.shape[3], (
        query.shape,
        key.shape,
    )
    for x in (query, key, value):
        assert (
            x.shape[3] % 8 == 0
            and x.stride(3) == 1
            and x.stride(1) % 8 == 0
            and x.stride(2) % 8 == 0
        ), (x.shape, x.stride())


def _band(query, key, is_causal, left, right):
    queries, keys = query.shape[1], key.shape[1]
    diagonal = torch.arange(queries, device=query.device)[:, None] + keys - queries
    at = torch.arange(keys, device=query.device)
    left, right = (-1 if side is None else side for side in (left, right))
    right = 0 if is_causal else right
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    if left >= 0:
        seen = seen & (at >= diagonal - left)
    if right >= 0:
        seen = seen & (at <= diagonal + right)
    return seen


def _top_left(query, key, is_causal):
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    return seen.tril() if is_causal else seen


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _scores(query, key, seen, scale):
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (_wide(query) @ _wide(repeated).transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)


def _attention(query, key, value, seen, scale):
    scores = _scores(query, key, seen, scale)
    log_sum_exp = torch.logsumexp(scores, -1)
    weights = torch.exp(
        scores - torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp).unsqueeze(-1)
    )
    output = weights @ _wide(value).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return output.to(query.dtype), log_sum_exp


def _attention_backward(grad, query, key, value, output, log_sum_exp, seen, scale):
    groups = query.shape[1] // key.shape[1]
    weights = torch.exp(_scores(query, key, seen, scale) - log_sum_exp.unsqueeze(-1))
    grad, output = _wide(grad), _wide(output)
    keys, values = (_wide(x).repeat_interleave(groups, 1) for x in (key, value))
    back = (
        weights * (grad @ values.transpose(-1, -2) - (grad * output).sum(-1, keepdim=True)) * scale
    )
    grad_key = (back.transpose(-1, -2) @ _wide(query)).unflatten(1, (-1, groups)).sum(2)
    grad_value = (weights.transpose(-1, -2) @ grad).unflatten(1, (-1, groups)).sum(2)
    return (back @ keys).to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
