"""Attention function that models of Transformers call for a part of a sequence.

Transformers has one table of attention functions by name, for all models of the process. Settings
that differ between models are attached to their modules (`install`).

A token attends to itself and to earlier tokens of its document, as in Transformers. Instead of a
mask [seq, seq], each token has the position at which its document begins. These positions are
computed from the full batch (`document_starts`). They do not describe sliding windows, which may
differ between layers. They need not describe padding on the right, because no other token attends
to padding and the loss ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from plait._torch.operators import FakeTensor
from plait.errors import InputError, ModelError
from plait.parallel.context.families import IMPLEMENTATIONS, kernel_named
from plait.parallel.context.kernel import AttentionRule
from plait.parallel.context.kinds import Kind, SequencePlacement, attention, exchange_heads
from plait.parallel.micro_batches import (
    IGNORED,
    SHIFTED,
    attach_token_mask,
    to_device,
    token_mask_of,
)

NAME = "plait_context_parallel"
"""Name of the attention function in Transformers' table."""


_ATTRIBUTE = "_plait_context"


_DOCUMENTS = "_plait_documents"


# Size of the second dimension of a mask without documents. It is 1 with documents.
_NO_DOCUMENTS = 2


@dataclass(frozen=True)
class InstalledAttention:
    """Attention implementation that `ContextParallel.apply` has installed in a model."""

    original: str
    """Name of the model's attention implementation before the change."""
    implementation: str
    """Result of `implementation_of`."""
    place: SequencePlacement
    """Layout of the sequences over ranks, and their process group."""


@dataclass(frozen=True)
class PartialAttention:
    """Settings of context-parallel attention that are attached to the modules of a model.

    Attributes:
        kind: Context-parallel algorithm by which queries reach the keys of other ranks.
        place: Layout of the sequences over ranks, and the process group of these ranks.
        implementation: Transformers' name of the implementation, see `implementation_of`.
    """

    kind: Kind
    place: SequencePlacement
    implementation: str

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the model, or a model from a file, has no ranks.
        return type(None), ()


def install(model: Any, attention: PartialAttention) -> None:
    """Make a model call `attend`, and attach the settings of attention to its modules."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        object.__setattr__(module, _ATTRIBUTE, attention)


def remove(model: Any, original: str) -> None:
    """Restore the attention implementation that a model had before `install`."""
    model.set_attn_implementation(original)
    for module in model.modules():
        if hasattr(module, _ATTRIBUTE):
            object.__delattr__(module, _ATTRIBUTE)


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
    """Compute context-parallel attention. Collective.

    The signature is that of Transformers' attention functions.

    Args:
        module: Attention module of a layer.
        query: [batch, heads, tokens, head_dim], tokens of this rank.
        key: [batch, kv_heads, tokens, head_dim].
        value: [batch, kv_heads, tokens, width].
        attention_mask: Result of `as_mask`.
        scaling: Factor of the scores. The default is head_dim ** -0.5.
        dropout: Dropout probability of attention weights. Must be 0.
        sliding_window: Number of tokens that a token attends to, itself included.
        softcap: Cap of the scores.
        s_aux: Attention sinks [heads].
        other: Further arguments of the model, which are refused if they change attention.

    Returns:
        (output [batch, tokens, heads, width], None instead of attention weights).

    Raises:
        InputError: The batch was not split.
        ModelError: The module belongs to a copy of the model, or its attention is not supported.
    """
    settings: PartialAttention | None = getattr(module, _ATTRIBUTE, None)
    if settings is None:
        raise ModelError(
            f"this {type(module).__name__} belongs to a copy of a model with parallel.cp, and no"
            " ranks compute the other parts of a sequence for the copy; call"
            ' model.set_attn_implementation("sdpa") on the copy'
        )
    _refuse_unsupported(module, dropout, other)
    if attention_mask is None or not _is_document_mask(attention_mask):
        raise InputError(
            "parallel.cp: the model was called with a batch that is not split over cp ranks; call"
            " engine.train_batch, engine.eval_batch or engine.predict, which select this rank's"
            " part of every sequence"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if query.is_meta:
        # Only shapes matter, so nothing is communicated.
        output = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None

    rule = AttentionRule(
        float(scaling), sliding_window, softcap, kernel_named(settings.implementation)
    )
    place = settings.place
    if settings.implementation in IMPLEMENTATIONS:
        documents = _documents_of(attention_mask)

        def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return _flash_attention(query, key, value, documents, rule, settings.implementation)

        output = exchange_heads(query, key, value, place, flash)
    else:
        starts = starts_of_mask(attention_mask)
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
            " supported for split sequences; use parallel.cp = 1"
        )


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: PackedDocuments | None,
    rule: AttentionRule,
    implementation: str,
) -> torch.Tensor:
    """Compute causal attention of complete sequences. The result is differentiable.

    Transformers looks up the kernel by name, in an installed package or on the Hub.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, tokens, head_dim].
        value: [batch, kv_heads, tokens, width].
        documents: Documents of the rows, or None if each row is one document.
        rule: Rule of the layer.
        implementation: Transformers' name of the implementation.

    Returns:
        [batch, heads, tokens, width].
    """
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    functions, (process_arguments, _) = lazy_import_flash_attention(implementation)
    row_function, document_function, *_ = functions
    batch, _, length, head_dim = query.shape
    # FlashAttention requires values as wide as queries.
    padding = head_dim - value.shape[3]
    # [batch, tokens, heads, head_dim]
    inputs = [x.transpose(1, 2) for x in (query, key, F.pad(value, (0, padding)))]
    settings = {"softmax_scale": rule.scale, "sliding_window": rule.window, "softcap": rule.softcap}
    if documents is None:
        output = row_function(*inputs, **process_arguments(length, length, True, **settings))
    else:
        bounds = documents.bounds
        settings |= {"max_seqlen_q": documents.longest, "max_seqlen_k": documents.longest}
        # [batch * tokens, heads, head_dim]
        packed = [x.reshape(-1, *x.shape[2:]) for x in inputs]
        arguments = process_arguments(length, length, True, **settings)
        output = document_function(*packed, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **arguments)
    # Some versions also return the log-sum-exp.
    if isinstance(output, tuple):
        output = output[0]
    output = output.view(batch, length, *output.shape[-2:])
    return output[..., : head_dim - padding].transpose(1, 2)


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of a micro-batch in the format of FlashAttention, with all rows concatenated.

    Attributes:
        bounds: Start of each document, and end of the last one: [documents + 1] int32, on the
            device.
        longest: Number of tokens of the longest document.
    """

    bounds: torch.Tensor
    longest: int

    @classmethod
    def from_starts(cls, starts: torch.Tensor, device: torch.device) -> PackedDocuments:
        """Find the documents of a micro-batch. This waits for the device of `starts`.

        Args:
            starts: [batch, tokens], position at which the document of each token begins.
            device: Device of the result.
        """
        is_first = starts == torch.arange(starts.shape[1], device=starts.device)
        first_tokens = is_first.flatten().nonzero().flatten()
        bounds = F.pad(first_tokens, (0, 1), value=starts.numel()).to(torch.int32)
        return cls(to_device(bounds, device), int(torch.diff(bounds).max()))


def on_device(model: nn.Module, part: Any, device: torch.device) -> Any:
    """Move this rank's part of a micro-batch to the device.

    If the attention of `model` is FlashAttention, the documents of the rows are computed once for
    all layers and attached to the mask. This does not wait for the device if the part is on the
    host.

    Args:
        model: The model, after `install`.
        part: Result of `ContextParallel.local_batch`.
        device: Device of the model.
    """
    mask = part["attention_mask"]
    moved = to_device(part, device)
    attach_token_mask(moved["attention_mask"], to_device(token_mask_of(mask), device))
    settings: PartialAttention = getattr(model, _ATTRIBUTE)
    starts = starts_of_mask(mask)
    if starts is not None and settings.implementation in IMPLEMENTATIONS:
        setattr(moved["attention_mask"], _DOCUMENTS, PackedDocuments.from_starts(starts, device))
    return moved


def _documents_of(mask: torch.Tensor) -> PackedDocuments | None:
    """Return the documents of a mask, or None if each row is one document.

    The documents are attached to the mask. If the mask is a copy that has none, they are computed
    and attached to it.
    """
    attached: PackedDocuments | None = getattr(mask, _DOCUMENTS, None)
    starts = starts_of_mask(mask)
    if starts is None or attached is not None:
        return attached
    documents = PackedDocuments.from_starts(starts, mask.device)
    setattr(mask, _DOCUMENTS, documents)
    return documents


def document_starts(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the position at which the document of each token begins.

    A document begins where `position_ids` does not increase by one. As in Transformers, positions
    only mark documents if the batch has no `attention_mask`.

    Returns:
        [batch, seq] int64, or None if each row is one document.

    Raises:
        InputError: `attention_mask` or `position_ids` do not have the shape [batch, seq], or
            padding is not on the right, or labels contain targets at padding positions.
    """
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    positions = batch["position_ids"]
    rows, length = ids.shape
    # The tensors of a dry run have no values. Its rows are complete sequences.
    if isinstance(ids, FakeTensor) or ids.is_meta:
        return None
    if mask is not None:
        _refuse_other_than_right_padding(mask, batch, rows, length)
        return None
    shape: Any = type(positions).__name__
    if isinstance(positions, torch.Tensor):
        shape = list(positions.shape)
    if shape not in ([1, length], [rows, length]):
        raise InputError(
            f"parallel.cp: position_ids have the shape {shape}, and input_ids [{rows}, {length}];"
            " pass one position for every token"
        )

    begins = torch.diff(positions, dim=-1) != 1
    if not bool(begins.any()):
        return None
    # Position of each token that begins a document, 0 for others: [1 or batch, seq - 1].
    first_tokens = torch.where(begins, torch.arange(1, length, device=ids.device), 0)
    first_tokens = torch.cat([first_tokens.new_zeros(len(first_tokens), 1), first_tokens], -1)
    return first_tokens.cummax(-1).values.expand(rows, -1)


def _refuse_other_than_right_padding(
    mask: Any, batch: Mapping[str, Any], rows: int, length: int
) -> None:
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, length):
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InputError(
            f"parallel.cp: attention_mask has the shape {shape}, but sequences that are split over"
            f" ranks require [{rows}, {length}], with 1 for tokens and 0 for padding on the right;"
            " pass a mask of that shape, or, if a row contains several documents, pass no mask and"
            " start position_ids at 0 in each document"
        )
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise InputError(
            "parallel.cp: attention_mask has zeros before ones, but only padding on the right of a"
            ' row is supported; pad on the right (tokenizer.padding_side = "right")'
        )
    targets = batch.get(SHIFTED)
    if isinstance(targets, torch.Tensor) and targets.shape == mask.shape:
        count = int(((targets != IGNORED) & ~mask).sum())
        if count:
            raise InputError(
                f"parallel.cp: {count} padding positions have a target in labels, but attention of"
                f" padding is not computed; set the labels of padding to {IGNORED}"
            )


def as_mask(starts: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor:
    """Return the document starts as a four-dimensional mask.

    Transformers passes such a mask unchanged to the attention of every layer.

    Args:
        starts: [rows, tokens], or None if each row is one document.
        rows: Number of rows of the micro-batch.
        device: Device of the mask.
    """
    if starts is None:
        return torch.zeros(rows, _NO_DOCUMENTS, 1, 1, dtype=torch.int64, device=device)
    return starts[:, None, :, None]


def starts_of_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the document starts [batch, tokens] that `as_mask` received, or None."""
    return None if mask.shape[1] == _NO_DOCUMENTS else mask[:, 0, :, 0]


def _is_document_mask(mask: torch.Tensor) -> bool:
    """Return True if the mask is a result of `as_mask`."""
    return (
        mask.ndim == 4
        and mask.dtype == torch.int64
        and mask.shape[1] <= _NO_DOCUMENTS
        and mask.shape[3] == 1
    )
