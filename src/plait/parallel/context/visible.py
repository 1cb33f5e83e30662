"""Keys that each token may see: those before it in its own document, as Transformers decides it.

They are described by one number per token, the position at which its document begins, so that no
mask [seq, seq] exists. The description is made from the full batch.

A sliding window is not part of it, because layers of one model may have different ones. Padding on
the right is not either: no token follows it, and its own results enter no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from plait._torch.operators import FakeTensor
from plait.errors import InputError
from plait.parallel.micro_batches import IGNORED, SHIFTED

# Size of the second dimension of a mask without documents. It is 1 with documents.
_NO_DOCUMENTS = 2


def document_starts(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the position at which the document of each token begins.

    A document begins where `position_ids` does not increase by one. As in Transformers, this only
    counts without an attention_mask.

    Returns:
        [batch, seq] int64, or None if each row is one document.

    Raises:
        InputError: The mask is not [batch, seq] with the padding, which has no targets, on the
            right, or the positions have another shape.
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
            f"parallel.cp: position_ids are {shape}, and input_ids [{rows}, {length}]; pass one"
            " position for every token"
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
            f"parallel.cp: attention_mask is {shape}, and must be [{rows}, {length}] because"
            " sequences are split over ranks: 1 for tokens and 0 for padding on the right; for"
            " several documents per row leave it out, and start position_ids at 0 in each document"
        )
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise InputError(
            "parallel.cp: attention_mask has zeros before ones, and only padding on the right of a"
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
    """Return the document starts as a mask of four dimensions.

    Transformers passes such a mask to every attention unchanged.

    Args:
        starts: [rows, tokens], or None if each row is one document.
        rows: Number of rows of the micro-batch.
        device: Device of the mask.
    """
    if starts is None:
        return torch.zeros(rows, _NO_DOCUMENTS, 1, 1, dtype=torch.int64, device=device)
    return starts[:, None, :, None]


def of_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the document starts [batch, tokens] of a mask of `as_mask`, or None."""
    return None if mask.shape[1] == _NO_DOCUMENTS else mask[:, 0, :, 0]


def is_ours(mask: torch.Tensor | None) -> bool:
    """Return True if `as_mask` made the mask."""
    return (
        mask is not None
        and mask.ndim == 4
        and mask.dtype == torch.int64
        and mask.shape[1] <= _NO_DOCUMENTS
        and mask.shape[3] == 1
    )
