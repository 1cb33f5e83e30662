"""Which models a sequence can be cut for, and why another cannot: decided from the model's class
and configuration.

Between the parts of a sequence only attention may pass anything on, and it has to be called through
Transformers' attention interface, with masks that are causal, of a window or of documents. The
families listed are those that tests compare with one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plait.errors import ConfigError, ModelError, Problem
from plait.model.adapters import without_wrapper
from plait.parallel.context.flash import IMPLEMENTATIONS
from plait.parallel.context.kernel import Kernel, Rule, kernel_for
from plait.parallel.context.kinds import Kind

FAMILIES = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "gpt2",
        "gpt_neox",
    ),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"),
)
"""`config.model_type` of the causal language models that are compared with one process."""
WITHOUT_DOCUMENTS = ("gpt_oss",)
"""Those whose masks Transformers makes without `position_ids`: documents in one row see each other,
which one process does not tell.
"""
WITH_CAPPED_SCORES = ("gemma2",)
"""Families whose attention caps its scores. On GPUs FlexAttention computes them."""
KERNELS = ("sdpa", "eager", "flex_attention", *IMPLEMENTATIONS)
"""What computes attention: SDPA's kernels, products and a softmax, FlexAttention, or
FlashAttention.
"""
WITHOUT_FLEX_BACKWARD = ("cpu",)
"""Device types for which torch's FlexAttention raises NotImplementedError where it would need a
backward.
"""
_KERNEL_NAMES: Mapping[str, Kernel] = {"eager": "products", "flex_attention": "flex"}
"""Kernels of `Rule.kernel`, keyed by Transformers' names. "sdpa" stands for all other names."""
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow from the longest position of a batch."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_LAYERS = ("full_attention", "sliding_attention")


def refuse_unknown_model(
    model: nn.Module, *, cp: int, kind: Kind, tp: int, device_type: str
) -> None:
    """Raise ModelError or ConfigError for a model that would not compute what one process does, on
    devices of that type.
    """
    model = without_wrapper(model)
    config: Any = getattr(model, "config", None)
    reason = (
        _unknown(model, config) or next(_unfit(config), None) or _kernel(config, kind, device_type)
    )
    if reason is not None:
        raise ModelError(f"parallel.cp = {cp}: {type(model).__name__} {reason}, or parallel.cp = 1")
    heads = config.num_attention_heads
    if kind == "ulysses" and heads % (tp * cp):
        per = f"{heads} / parallel.tp {tp} = {heads // tp}" if tp > 1 else str(heads)
        rule = (
            f'num_attention_heads is {per}, parallel.context = "ulysses" gives each rank its heads,'
            f" and {heads // tp} % {cp} != 0"
        )
        raise ConfigError(
            Problem(
                "parallel.cp",
                cp,
                rule,
                'use a divisor, or parallel.context = "all-gather-kv" or "ring"',
            )
        )


def _unknown(model: nn.Module, config: Any) -> str | None:
    kind = getattr(config, "model_type", None)
    name = type(model).__name__
    own = type(model).__module__.startswith("transformers.models.")
    if not own or not hasattr(model, "set_attn_implementation"):
        return (
            "is no model of Transformers, whose attention is called through its attention"
            " interface, so nothing says what passes from token to token; use one of the families"
            f" {', '.join(FAMILIES)}"
        )
    if kind not in FAMILIES or not name.endswith(("ForCausalLM", "LMHeadModel")):
        return (
            f"(model_type {kind!r}) is not among the causal language models that are compared with"
            f" one process: {', '.join(FAMILIES)}"
        )
    if config._attn_implementation not in KERNELS:
        return (
            f"computes attention with {config._attn_implementation!r}, which does not say what"
            f" parts of a softmax add up to; use attn_implementation = {', '.join(KERNELS[:-1])} or"
            f" {KERNELS[-1]}"
        )
    return None


def _kernel(config: Any, kind: Kind, device_type: str) -> str | None:
    chosen = config._attn_implementation
    if chosen == "flex_attention" and device_type in WITHOUT_FLEX_BACKWARD:
        return (
            f"computes attention with {chosen!r}, of which torch has no backward on devices of type"
            f' {device_type!r}; use attn_implementation="sdpa" or "eager"'
        )
    if chosen in IMPLEMENTATIONS and kind != "ulysses":
        return (
            f"computes attention with {chosen!r}, which is given complete sequences, and with"
            f' parallel.context = {kind!r} a rank has none; use parallel.context = "ulysses", or'
            ' attn_implementation="sdpa"'
        )
    if chosen in IMPLEMENTATIONS and config.model_type == "gpt_oss":
        return (
            f"has attention sinks, which {chosen!r} leaves out in silence in some of its versions;"
            ' use attn_implementation="eager"'
        )
    return None


def _unfit(config: Any) -> Iterator[str]:
    """Settings that a part of a sequence does not go with."""
    for name in _DROPOUTS:
        value = getattr(config, name, 0) or 0
        if value:
            yield (
                f"has config.{name} = {value:g}, and dropout of attention weights is not computed"
                " in parts; set it to 0"
            )
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope in _LENGTH_DEPENDENT:
            yield (
                f"has rotary embeddings of type {rope!r}, whose frequencies follow from the longest"
                " position, which a rank does not have; use another type"
            )
    if (
        getattr(config, "use_bidirectional_attention", False)
        or getattr(config, "is_causal", True) is False
    ):
        yield "attends in both directions, and only causal attention is cut; use a causal model"
    if getattr(config, "add_cross_attention", False):
        yield "has cross-attention, which is not cut; set config.add_cross_attention = False"
    if getattr(config, "reorder_and_upcast_attn", False):
        yield (
            "has config.reorder_and_upcast_attn, which does not call the attention interface; set"
            " it to False"
        )
    other = next(
        (layer for layer in getattr(config, "layer_types", None) or () if layer not in _LAYERS),
        None,
    )
    if other is not None:
        yield (
            f"has layers of type {other!r}, and only {' and '.join(_LAYERS)} are cut; use another"
            " model"
        )


def implementation_of(model: nn.Module) -> str:
    """Return Transformers' name of the attention implementation of a model.

    Transformers does not offer "sdpa" for GPT-OSS and Gemma 2, because its SDPA supports neither
    sinks nor capped scores. Their "eager" is therefore not a choice of the user. Plait has fused
    kernels for both models, so it treats their "eager" as "sdpa".
    """
    config: Any = model.config
    chosen = str(config._attn_implementation)
    return "sdpa" if chosen == "eager" and not getattr(model, "_supports_sdpa", True) else chosen


def kernel_named(implementation: str) -> Kernel:
    """Return the kernel that a result of `implementation_of` stands for."""
    return _KERNEL_NAMES.get(implementation, "sdpa")


def why_in_tiles(
    config: Any, implementation: str, device: torch.device, dtype: torch.dtype, *, documents: bool
) -> str:
    """Return why attention is computed in tiles of matrix products on a GPU.

    Args:
        config: Configuration of the model.
        implementation: Result of `implementation_of`.
        device: Device of the model.
        dtype: Dtype in which attention is computed.
        documents: Whether sequences consist of several documents.

    Returns:
        The reason, or an empty string if a fused kernel computes attention.
    """
    if device.type == "cpu" or implementation in IMPLEMENTATIONS:
        return ""
    softcap = getattr(config, "attn_logit_softcapping", None)
    rule = Rule(1.0, _window(config), softcap, kernel_named(implementation))
    kernel, reason = kernel_for(device, dtype, _head_widths(config), rule, documents=documents)
    return reason if kernel == "products" else ""


def _window(config: Any) -> int | None:
    """Return the length of the model's sliding window, or None if no layer has one."""
    layers = getattr(config, "layer_types", None)
    if layers:
        has_window = "sliding_attention" in layers
    else:
        has_window = getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if has_window else None


def _head_widths(config: Any) -> tuple[int, int]:
    """Return the head dimensions of queries and of values."""
    if getattr(config, "v_head_dim", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width, width


def _ropes(parameters: Any) -> Iterator[str]:
    if not isinstance(parameters, Mapping):
        return
    kind = parameters.get("rope_type", parameters.get("type"))
    if isinstance(kind, str):
        yield kind
    for inner in parameters.values():
        yield from _ropes(inner)
