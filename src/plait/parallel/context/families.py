"""Models that context parallelism supports, according to their class and configuration.

Only attention may pass information between the parts of a sequence. The model must call it through
Transformers' attention interface, with causal, sliding-window or document masks. For the listed
families, tests compare the results with those of a single process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plait.errors import ConfigError, ModelError, Problem
from plait.model.adapters import refuse_prompts, without_wrapper
from plait.parallel.context.kernel import AttentionRule, Kernel, kernel_for
from plait.parallel.context.kinds import Kind

IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3")
"""Transformers' names of the FlashAttention implementations."""


FAMILIES = (
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
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
)
"""`config.model_type` of the supported causal language models, which tests compare."""


WITHOUT_DOCUMENTS = ("gpt_oss",)
"""Families whose attention masks do not depend on `position_ids` in Transformers.

In one process, the documents of a row therefore see each other, without a warning.
"""


WITH_CAPPED_SCORES = ("gemma2",)
"""Families whose attention caps its scores. On GPUs it is computed by FlexAttention."""


KERNELS = ("sdpa", "eager", "flex_attention", *IMPLEMENTATIONS)
"""Supported values of `attn_implementation`.

"sdpa" uses the kernels of torch's SDPA, and "eager" matrix products and a softmax. The others are
FlexAttention and FlashAttention.
"""


WITHOUT_FLEX_BACKWARD = ("cpu",)
"""Device types for which torch's FlexAttention has no backward (it raises NotImplementedError)."""


# Kernels of a rule by Transformers' names. "sdpa" stands for all other names.
_KERNEL_NAMES: Mapping[str, Kernel] = {"eager": "products", "flex_attention": "flex"}


# Rotary embeddings whose frequencies follow from the longest position of a batch.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


_LAYERS = ("full_attention", "sliding_attention")


def refuse_unknown_model(
    model: nn.Module, *, cp: int, kind: Kind, tp: int, device_type: str
) -> None:
    """Refuse models whose results with split sequences may differ from those of one process.

    Args:
        model: The model.
        cp: Degree of the cp axis.
        kind: Implementation of attention to the keys of other ranks.
        tp: Degree of the tp axis.
        device_type: Type of the devices.

    Raises:
        ModelError: The model, one of its settings or its attention kernel is not supported.
        ConfigError: The kind is "ulysses", and tp * cp does not divide the number of heads.
    """
    refuse_prompts(model, "parallel.cp")
    model = without_wrapper(model)
    config: Any = getattr(model, "config", None)
    reason = (
        _why_unknown(model, config)
        or next(_unsupported_settings(config), None)
        or _why_no_kernel(model, kind, device_type)
    )
    if reason is not None:
        raise ModelError(f"parallel.cp = {cp}: {type(model).__name__} {reason}, or parallel.cp = 1")

    heads = config.num_attention_heads
    if kind == "ulysses" and heads % (tp * cp):
        heads_text = str(heads)
        if tp > 1:
            heads_text = f"{heads} / parallel.tp {tp} = {heads // tp}"
        rule = (
            f'parallel.context = "ulysses" gives each rank equally many heads, num_attention_heads'
            f" is {heads_text}, and {heads // tp} % {cp} != 0"
        )
        raise ConfigError(
            Problem(
                "parallel.cp",
                cp,
                rule,
                'use a divisor, or parallel.context = "all-gather-kv" or "ring"',
            )
        )


def _why_unknown(model: nn.Module, config: Any) -> str | None:
    """Return the reason why a model's attention is not supported, or None if it is."""
    family = getattr(config, "model_type", None)
    name = type(model).__name__
    is_of_transformers = type(model).__module__.startswith("transformers.models.")
    if not is_of_transformers or not hasattr(model, "set_attn_implementation"):
        return (
            "does not call attention through the attention interface of Transformers, so it is not"
            f" known which modules mix tokens; use one of the families {', '.join(FAMILIES)}"
        )
    if family not in FAMILIES or not name.endswith(("ForCausalLM", "LMHeadModel")):
        return (
            f"(model_type {family!r}) is not among the causal language models that are compared"
            f" with one process; use one of the families {', '.join(FAMILIES)}"
        )
    if config._attn_implementation not in KERNELS:
        return (
            f"computes attention with {config._attn_implementation!r}, whose results for parts of"
            " the keys cannot be combined; use attn_implementation ="
            f" {', '.join(KERNELS[:-1])} or {KERNELS[-1]}"
        )
    return None


def _why_no_kernel(model: nn.Module, kind: Kind, device_type: str) -> str | None:
    """Return why a model's attention implementation is not supported, or None if it is."""
    config: Any = model.config
    implementation = config._attn_implementation
    instead = "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
    if implementation == "flex_attention" and device_type in WITHOUT_FLEX_BACKWARD:
        return (
            f"computes attention with {implementation!r}, whose backward torch does not"
            f" implement on devices of type {device_type!r}; use"
            f' attn_implementation="{instead}"'
        )
    if implementation in IMPLEMENTATIONS and config.model_type == "gpt_oss":
        return (
            f"has attention sinks, which some versions of {implementation!r} silently ignore;"
            ' use attn_implementation="eager"'
        )
    if implementation in IMPLEMENTATIONS and kind != "ulysses":
        return (
            f"computes attention with {implementation!r}, which requires complete sequences, but"
            f" with parallel.context = {kind!r} a rank has only parts; use parallel.context ="
            f' "ulysses", or attn_implementation="{instead}"'
        )
    return None


def _unsupported_settings(config: Any) -> Iterator[str]:
    """Yield an explanation for each setting that is not supported for split sequences."""
    for name in _DROPOUTS:
        value = getattr(config, name, 0) or 0
        if value:
            yield (
                f"has config.{name} = {value:g}, and dropout of attention weights is not computed"
                " in parts; set it to 0"
            )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT:
            yield (
                f"has rotary embeddings of type {rope_type!r}, whose frequencies depend on the"
                " longest position, which a rank does not know; use another type"
            )
    is_bidirectional = getattr(config, "use_bidirectional_attention", False)
    if is_bidirectional or getattr(config, "is_causal", True) is False:
        yield (
            "attends in both directions, and only causal attention is supported; use a causal model"
        )
    if getattr(config, "add_cross_attention", False):
        yield "has cross-attention, which is not split; set config.add_cross_attention = False"
    if getattr(config, "reorder_and_upcast_attn", False):
        yield (
            "has config.reorder_and_upcast_attn = True, which bypasses the attention interface; set"
            " it to False"
        )
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in _LAYERS:
            yield (
                f"has layers of type {layer_type!r}, but only {' and '.join(_LAYERS)} are"
                " supported; use another model"
            )


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the RoPE types in the RoPE parameters of a configuration.

    The parameters may be nested by layer type.
    """
    if not isinstance(parameters, Mapping):
        return
    rope_type = parameters.get("rope_type", parameters.get("type"))
    if isinstance(rope_type, str):
        yield rope_type
    for nested in parameters.values():
        yield from _rope_types(nested)


def implementation_of(model: nn.Module) -> str:
    """Return Transformers' name of the attention implementation of a model.

    Transformers runs GPT-OSS and Gemma 2 with "eager" and not with "sdpa", because torch's SDPA has
    neither sinks nor capped scores. Plait has fused kernels for both models, so "eager" becomes
    "sdpa" for them.
    """
    config: Any = model.config
    implementation = str(config._attn_implementation)
    if implementation == "eager" and not getattr(model, "_supports_sdpa", True):
        return "sdpa"
    return implementation


def kernel_named(implementation: str) -> Kernel:
    """Return the kernel for a name that `implementation_of` has returned."""
    return _KERNEL_NAMES.get(implementation, "sdpa")


def why_in_tiles(
    config: Any, implementation: str, device: torch.device, dtype: torch.dtype, *, documents: bool
) -> str:
    """Return the reason why a GPU computes attention by matrix products in tiles.

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
    rule = AttentionRule(1.0, _window(config), softcap, kernel_named(implementation))
    kernel, reason = kernel_for(device, dtype, _head_widths(config), rule, documents=documents)
    return reason if kernel == "products" else ""


def _window(config: Any) -> int | None:
    """Return the length of the model's sliding window, or None if no layer has one."""
    layers = getattr(config, "layer_types", None)
    if layers:
        has_window = "sliding_attention" in layers
    else:
        has_window = getattr(config, "use_sliding_window", True)
    if not has_window:
        return None
    return getattr(config, "sliding_window", None)


def _head_widths(config: Any) -> tuple[int, int]:
    """Return (head dimension of queries, head dimension of values)."""
    if getattr(config, "v_head_dim", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width, width
