"""Attention function that Transformers' models call for a part of a sequence.

Transformers has one table of attention functions by name, for all models of the process. What
differs between models is attached to their modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from plait.errors import InputError, ModelError
from plait.parallel.context.families import kernel_named
from plait.parallel.context.flash import IMPLEMENTATIONS, PackedDocuments, flash_attention
from plait.parallel.context.kernel import AttentionRule
from plait.parallel.context.kinds import Kind, SequencePlacement, attention, exchange_heads
from plait.parallel.context.visible import is_ours, of_mask
from plait.parallel.micro_batches import to_device
from plait.parallel.tokens import mark, tokens_of

NAME = "plait_context_parallel"
"""Name of the attention function in Transformers' table."""

_ATTRIBUTE = "_plait_context"
_DOCUMENTS = "_plait_documents"


@dataclass(frozen=True)
class PartialAttention:
    """Settings of the attention of one model.

    Attributes:
        kind: How queries reach the keys of other ranks.
        place: Layout of sequences and process group.
        implementation: Transformers' name of the implementation, see `implementation_of`.
    """

    kind: Kind
    place: SequencePlacement
    implementation: str

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        # A copy of the model, or a model from a file, has no ranks.
        return _no_attention, ()


def _no_attention() -> None:
    return None


def install(model: Any, attention: PartialAttention) -> None:
    """Replace the attention of a model."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        object.__setattr__(module, _ATTRIBUTE, attention)


def remove(model: Any, original: str) -> None:
    """Give a model the attention implementation that it had before `install`."""
    model.set_attn_implementation(original)
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
    settings: PartialAttention = getattr(model, _ATTRIBUTE)
    starts = of_mask(mask)
    if starts is not None and settings.implementation in IMPLEMENTATIONS:
        setattr(moved["attention_mask"], _DOCUMENTS, PackedDocuments.of(starts, device))
    return moved


def _documents_of(mask: torch.Tensor) -> PackedDocuments | None:
    """Return the documents that are attached to a mask.

    A copy of the mask has lost them. They are then computed again and attached to the copy.
    """
    attached: PackedDocuments | None = getattr(mask, _DOCUMENTS, None)
    starts = of_mask(mask)
    if starts is None or attached is not None:
        return attached
    documents = PackedDocuments.of(starts, mask.device)
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
    """Compute attention with the signature of Transformers' attention functions. Collective.

    Args:
        module: Attention module of a layer.
        query: [batch, heads, tokens, head_dim], tokens of this rank.
        key: [batch, kv_heads, tokens, head_dim].
        value: [batch, kv_heads, tokens, width].
        attention_mask: Result of `visible.as_mask`.
        scaling: Factor of the scores; head_dim ** -0.5 by default.
        dropout: Must be 0.
        sliding_window: Number of tokens that a token sees, itself included.
        softcap: Cap of the scores.
        s_aux: [heads], attention sinks.
        other: Further arguments that a model passes.

    Returns:
        The output [batch, tokens, heads, width], and no attention weights.

    Raises:
        InputError: The batch was not cut.
        ModelError: The module belongs to a copy of the model, or needs what is not supported.
    """
    settings: PartialAttention | None = getattr(module, _ATTRIBUTE, None)
    if settings is None:
        raise ModelError(
            f"this {type(module).__name__} belongs to a copy of a model under parallel.cp, and has"
            " no ranks with the other parts of a sequence; call"
            ' model.set_attn_implementation("sdpa") on the copy'
        )
    _refuse_unsupported(module, dropout, other)
    if attention_mask is None or not is_ours(attention_mask):
        raise InputError(
            "parallel.cp: the model was called with a batch that is not split over cp ranks; call"
            " engine.train_batch, engine.eval_batch or engine.predict, which select this rank's"
            " part of every sequence"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if query.is_meta:
        # Only shapes are of interest, so no other rank takes part.
        output = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None

    rule = AttentionRule(
        float(scaling), sliding_window, softcap, kernel_named(settings.implementation)
    )
    place = settings.place
    if settings.implementation in IMPLEMENTATIONS:
        documents = _documents_of(attention_mask)

        def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return flash_attention(query, key, value, documents, rule, settings.implementation)

        output = exchange_heads(query, key, value, place, flash)
    else:
        starts = of_mask(attention_mask)
        output = attention(settings.kind, query, key, value, starts, place, rule, s_aux)
    # [batch, heads, tokens, width] to [batch, tokens, heads, width]
    return output.transpose(1, 2).contiguous(), None


def _refuse_unsupported(module: nn.Module, dropout: float, other: dict[str, Any]) -> None:
    reason = None
    if other.get("position_bias") is not None:
        reason = "`position_bias`"
    if dropout:
        reason = f"dropout of {dropout:g}"
    causal = other.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal is False:
        reason = "attention in both directions"
    if reason is not None:
        raise ModelError(
            f"parallel.cp: {type(module).__name__} computes attention with {reason}, which is not"
            " supported for cut sequences; use parallel.cp = 1"
        )


@dataclass(frozen=True)
class InstalledAttention:
    """Record of what `ContextParallel.apply` has changed."""

    original: str
    """Name of the model's attention implementation before the change."""
    implementation: str
    """Result of `implementation_of`."""
    place: SequencePlacement
    """Layout of sequences, and process group."""
