"""A package with FlashAttention's interface on CPUs, in plain products: what is passed to it is what its documentation says, in any dtype.
And torch's FlexAttention with a backward on CPUs. Imported by workers."""

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
    """Of [batch, tokens, heads, head_dim]; a window is inclusive on both sides, and -1 is none."""
    assert not dropout_p and q.shape[3] == k.shape[3] == v.shape[3]
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (
        q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = seen & (key >= query - left) if left >= 0 else seen
    seen = seen & (key <= query + right) if right >= 0 else seen
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


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
    """Of [tokens of all documents, heads, head_dim], of which each document is computed by itself."""
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    bounds = cu_seqlens_q.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    assert (
        bounds[0] == 0
        and bounds[-1] == len(q)
        and min(lengths) > 0
        and max_seqlen_q == max_seqlen_k == max(lengths)
    )
    documents = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    settings: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
    }
    return torch.cat([flash_attn_func(*(x[None] for x in one), **settings)[0] for one in documents])


@contextmanager
def installed():
    """Transformers finds the package."""
    from transformers import modeling_flash_attention_utils as utils

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=None,
    )
    vars(padding).update(pad_input=None, unpad_input=None)
    modules = {"flash_attn": package, "flash_attn.bert_padding": padding}
    with (
        patch.dict(sys.modules, modules),
        patch.object(utils, "is_flash_attn_2_available", lambda: True),
    ):
        yield


@contextmanager
def flex_backward():
    """torch's own check refuses it; its unfused implementation has one."""
    from torch.nn.attention import flex_attention

    from plait.parallel.context import families

    with (
        patch.object(flex_attention, "_validate_device", lambda *_: None),
        patch.object(families, "WITHOUT_FLEX_BACKWARD", ()),
    ):
        yield
