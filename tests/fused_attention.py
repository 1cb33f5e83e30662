"""References of torch's fused CUDA attention kernels in plain products, for other devices.

They have the layouts, paddings and mask alignment of the real kernels, return the same for a query
without keys, and raise where a real kernel would. Callers that rely on anything else fail. Scores
are in float32, or in float64 for float64 inputs.
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
    """Attend on [batch, tokens, heads, head_dim].

    Causal masks and windows are aligned at the last query and the last key.
    """
    _check_flash(query, key, value)
    assert cum_seq_q is None and cum_seq_k is None and dropout_p == 0.0 and not return_debug_mask
    assert (max_q, max_k) == (query.shape[1], key.shape[1]) and scale is not None
    seen = _band(query, key, is_causal, window_size_left, window_size_right)
    output, log_sum_exp = _attention(*(x.transpose(1, 2) for x in (query, key, value)), seen, scale)
    # FlashAttention 2 writes infinity for a query that sees no key.
    log_sum_exp = torch.where(seen.any(-1), log_sum_exp, math.inf)
    rng_state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return (
        torch.empty_like(query).copy_(output.transpose(1, 2)),
        log_sum_exp.contiguous(),
        rng_state,
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
    """Return gradients with as many heads as their tensors.

    The real kernel reads `logsumexp` [batch, heads, queries] without its strides.
    """
    _check_flash(query, key, value)
    batch, queries, heads, _ = query.shape
    assert logsumexp.is_contiguous(), logsumexp.stride()
    assert logsumexp.shape == (batch, heads, queries)
    assert grad_out.shape == out.shape == query.shape
    assert grad_out.dtype == out.dtype == query.dtype
    assert cum_seq_q is None and cum_seq_k is None and dropout_p == 0.0
    assert (max_q, max_k) == (queries, key.shape[1]) and scale is not None
    seen = _band(query, key, is_causal, window_size_left, window_size_right)
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = _attention_backward(*tensors, logsumexp, seen, scale)
    return tuple(x.transpose(1, 2) for x in gradients)


def efficient_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    """Attend on [batch, heads, tokens, head_dim].

    Causal masks are aligned at the first query and the first key.
    """
    _check_efficient(query, key, value)
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0 and scale is not None
    output, log_sum_exp = _attention(query, key, value, _top_left(query, key, is_causal), scale)
    rows = query.shape[2]
    padded = log_sum_exp.new_full((*log_sum_exp.shape[:2], -(-rows // 32) * 32), math.inf)
    padded[..., :rows] = log_sum_exp
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.empty((), dtype=torch.int64)
    return output, padded, seed, seed


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
    """Return the gradients.

    `logsumexp` is padded to a multiple of 32 queries. The real kernel reads `out` as if tokens had
    no gaps.
    """
    _check_efficient(query, key, value)
    rows = query.shape[2]
    assert attn_bias is None and dropout_p == 0.0 and scale is not None
    assert list(grad_input_mask) == [True, True, True, False]
    assert logsumexp.shape == (*query.shape[:2], -(-rows // 32) * 32)
    assert logsumexp.is_contiguous(), logsumexp.stride()
    assert out.transpose(1, 2).is_contiguous(), out.stride()
    seen = _top_left(query, key, is_causal)
    return (
        *_attention_backward(grad_out_, query, key, value, out, logsumexp[..., :rows], seen, scale),
        None,
    )


def _check_flash(query, key, value):
    width = query.shape[3]
    assert width % 8 == 0 and width <= 256, f"head_dim {width}"
    assert key.shape == value.shape and key.shape[3] == width
    assert query.shape[2] % key.shape[2] == 0, (query.shape, key.shape)
    assert all(x.stride(3) == 1 for x in (query, key, value))


def _check_efficient(query, key, value):
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert query.shape[3] == key.shape[3]
    for x in (query, key, value):
        assert x.shape[3] % 8 == 0 and x.stride(3) == 1, (x.shape, x.stride())
        assert x.stride(1) % 8 == 0 and x.stride(2) % 8 == 0, (x.shape, x.stride())


def _band(query, key, is_causal, left, right):
    queries = query.shape[1]
    keys = key.shape[1]
    diagonal = torch.arange(queries, device=query.device)[:, None] + keys - queries
    positions = torch.arange(keys, device=query.device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    # The operator takes None or -1 for an unlimited side.
    if left is not None and left >= 0:
        seen = seen & (positions >= diagonal - left)
    if is_causal:
        right = 0
    if right is not None and right >= 0:
        seen = seen & (positions <= diagonal + right)
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
    grad = _wide(grad)
    keys = _wide(key).repeat_interleave(groups, 1)
    values = _wide(value).repeat_interleave(groups, 1)
    grad_weights = grad @ values.transpose(-1, -2)
    mean = (grad * _wide(output)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - mean) * scale

    grad_query = grad_scores @ keys
    # Query heads that share a key head add up.
    grad_key = (grad_scores.transpose(-1, -2) @ _wide(query)).unflatten(1, (-1, groups)).sum(2)
    grad_value = (weights.transpose(-1, -2) @ grad).unflatten(1, (-1, groups)).sum(2)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
