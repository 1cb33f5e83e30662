"""The attention function that Transformers' models call on a part of a sequence, and the change of
a model to it and back.

Transformers has one table of attention functions by name. The function in it is one for all models;
what differs is kept at the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from plait.errors import InputError, ModelError
from plait.parallel.context.families import kernel_named
from plait.parallel.context.flash import IMPLEMENTATIONS, Documents, flash_attention
from plait.parallel.context.kernel import Rule
from plait.parallel.context.kinds import Kind, Place, attention, exchanged
from plait.parallel.context.visible import is_ours, of_mask
from plait.parallel.micro_batches import to_device
from plait.parallel.tokens import mark, tokens_of

NAME = "plait_context_parallel"
_ATTRIBUTE = "_plait_context"
_DOCUMENTS = "_plait_documents"


@dataclass(frozen=True)
class PartialAttention:
    """How the attention of one model is computed."""

    kind: Kind
    place: Place
    implementation: str
    """Transformers' name of the implementation."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _nobody, ()  # a copy of the model, or one from a file, has no ranks


def _nobody() -> None:
    return None


def install(model: Any, chosen: PartialAttention) -> str:
    """Make `model` compute attention so. Returns the name of what it did before."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    before = str(model.config._attn_implementation)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        object.__setattr__(module, _ATTRIBUTE, chosen)
    return before


def remove(model: Any, before: str) -> None:
    """As it was."""
    model.set_attn_implementation(before)
    for module in model.modules():
        if hasattr(module, _ATTRIBUTE):
            object.__delattr__(module, _ATTRIBUTE)


def on_device(model: nn.Module, part: Any, device: torch.device) -> Any:
    """Move this rank's part of a micro-batch to the device.

    If the attention of `model` is FlashAttention, the documents of the rows are computed once for
    all layers and attached to the mask. This does not wait for the device if the part is on the
    host.

    Args:
        model: The model, after `install`.
        part: Result of `ContextParallel.part`.
        device: Device of the model.
    """
    mask = part["attention_mask"]
    moved = to_device(part, device)
    mark(moved["attention_mask"], to_device(tokens_of(mask), device))
    chosen: PartialAttention = getattr(model, _ATTRIBUTE)
    starts = of_mask(mask)
    if starts is not None and chosen.implementation in IMPLEMENTATIONS:
        setattr(moved["attention_mask"], _DOCUMENTS, Documents.of(starts, device))
    return moved


def _documents_of(mask: torch.Tensor) -> Documents | None:
    """Return the documents that are attached to a mask.

    A copy of the mask has lost them. They are then computed again and attached to the copy.
    """
    attached: Documents | None = getattr(mask, _DOCUMENTS, None)
    starts = of_mask(mask)
    if starts is None or attached is not None:
        return attached
    documents = Documents.of(starts, mask.device)
    setattr(mask, _DOCUMENTS, documents)
    return documents


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function: query [batch, heads, tokens, head_dim], key and value
    [batch, kv_heads, tokens, ...] of this rank's tokens; returns [batch, tokens, heads, width].
    `attention_mask` is what `visible.as_mask` made, `s_aux` [heads] are attention sinks.
    """
    chosen: PartialAttention | None = getattr(module, _ATTRIBUTE, None)
    if chosen is None:
        raise ModelError(
            f"this {type(module).__name__} is of a copy of a model under parallel.cp, and has no"
            ' ranks that hold the rest of a sequence; call model.set_attn_implementation("sdpa")'
            " on the copy"
        )
    _refuse_what_is_not_cut(module, dropout, other)
    if attention_mask is None or not is_ours(attention_mask):
        raise InputError(
            "parallel.cp: the model was called with a batch that is not cut; call"
            " engine.train_batch, engine.eval_batch or engine.predict, which give each rank its"
            " part of every sequence"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_meta:  # a model that is run for its shapes: its ranks are not asked
        output = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    else:
        rule = Rule(float(scale), sliding_window, softcap, kernel_named(chosen.implementation))
        place = chosen.place
        if chosen.implementation in IMPLEMENTATIONS:
            documents = _documents_of(attention_mask)

            def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
                return flash_attention(query, key, value, documents, rule, chosen.implementation)

            output = exchanged(query, key, value, place, flash)
        else:
            output = attention(
                chosen.kind, query, key, value, of_mask(attention_mask), place, rule, s_aux
            )
    return output.transpose(1, 2).contiguous(), None


def _refuse_what_is_not_cut(module: nn.Module, dropout: float, other: dict[str, Any]) -> None:
    reason = "`position_bias`" if other.get("position_bias") is not None else None
    if dropout:
        reason = f"dropout of {dropout:g}"
    causal = other.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        reason = "attention in both directions"
    if reason is not None:
        raise ModelError(
            f"parallel.cp: {type(module).__name__} computes attention with {reason}, which is not"
            " cut; use parallel.cp = 1"
        )
