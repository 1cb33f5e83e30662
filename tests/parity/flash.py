"""FlashAttention's interface on CPUs, in plain products, and torch's FlexAttention with a backward.

The stand-in asserts that its arguments are what FlashAttention's documentation asks for, in any
dtype.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    """Compute attention on [batch, tokens, heads, head_dim].

    A window is inclusive on both sides, and -1 is none.
    """
    assert not dropout_p and q.shape[3] == k.shape[3] == v.shape[3]
    groups = q.shape[2] // k.shape[2]
    keys = k.repeat_interleave(groups, 2)
    values = v.repeat_interleave(groups, 2)
    if softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)

    query_position = torch.arange(q.shape[1])[:, None]
    key_position = torch.arange(k.shape[1])
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    left, right = window_size
    if causal:
        right = 0
    if left >= 0:
        visible &= key_position >= query_position - left
    if right >= 0:
        visible &= key_position <= query_position + right
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    """Compute attention per document on [tokens of all documents, heads, head_dim]."""
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    bounds = cu_seqlens_q.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == len(q) and min(lengths) > 0
    assert max_seqlen_q == max_seqlen_k == max(lengths)

    settings: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
    }
    outputs = []
    documents = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    for queries, keys, values in documents:
        output = flash_attn_func(queries[None], keys[None], values[None], **settings)
        outputs.append(output[0])
    return torch.cat(outputs)


@contextmanager
def installed():
    """Let Transformers find the stand-in as the package `flash_attn`."""
    from transformers import modeling_flash_attention_utils as utils

    package = ModuleType("flash_attn")
    vars(package).update(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=None,
    )
    padding = ModuleType("flash_attn.bert_padding")
    vars(padding).update(pad_input=None, unpad_input=None)
    modules = {"flash_attn": package, "flash_attn.bert_padding": padding}
    with (
        patch.dict(sys.modules, modules),
        patch.object(utils, "is_flash_attn_2_available", lambda: True),
    ):
        yield


@contextmanager
def flex_backward():
    """Allow FlexAttention's backward on CPUs.

    Its unfused implementation has one, but torch refuses the device before it gets there.
    """
    from torch.nn.attention import flex_attention

    from plait.parallel.context import families

    with (
        patch.object(flex_attention, "_validate_device", lambda *_: None),
        patch.object(families, "WITHOUT_FLEX_BACKWARD", ()),
    ):
        yield
