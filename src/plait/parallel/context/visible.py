"""Which keys a token may see, from the full batch, as Transformers would decide it: those before
it, in its own document. As one number a token, so that no mask [seq, seq] exists.

A sliding window is not in it, because layers of one model may have different ones. Padding on the
right is not either: no token stands after it, and what it sees itself is in no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from plait._torch.operators import FakeTensor
from plait.errors import InputError
from plait.parallel.micro_batches import IGNORED, SHIFTED

_WHOLE_ROWS = 2
"""Size of the second dimension of a mask that has no documents."""


def document_starts(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Where the document of each token begins [batch, seq] int64; None where each row is one.

    Documents begin where `position_ids` does not go on by one, which counts only without an
    attention_mask, as in Transformers. Raises InputError for a mask that is not [batch, seq] with
    the padding, which has no targets, on the right.
    """
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    positions = batch["position_ids"]
    rows, length = ids.shape
    # of a dry run: nobody knows, and its rows are full sequences
    if isinstance(ids, FakeTensor) or ids.is_meta:
        return None
    if mask is not None:
        _refuse_other_than_right_padding(mask, batch, rows, length)
        return None
    fits = isinstance(positions, torch.Tensor) and tuple(positions.shape) in (
        (1, length),
        (rows, length),
    )
    if not fits:
        shape = (
            list(positions.shape)
            if isinstance(positions, torch.Tensor)
            else type(positions).__name__
        )
        raise InputError(
            f"parallel.cp: position_ids are {shape}, and input_ids [{rows}, {length}]; pass one"
            " position for every token"
        )
    begins = torch.diff(positions, dim=-1) != 1
    if not bool(begins.any()):
        return None
    places = torch.where(begins, torch.arange(1, length, device=ids.device), 0)
    return (
        torch.cat([places.new_zeros(len(places), 1), places], -1).cummax(-1).values.expand(rows, -1)
    )


def _refuse_other_than_right_padding(
    mask: Any, batch: Mapping[str, Any], rows: int, length: int
) -> None:
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, length):
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InputError(
            f"parallel.cp: attention_mask is {shape}, and sequences are cut, so a mask has to be"
            f" [{rows}, {length}]: 1 for tokens and 0 for padding on the right; for documents in"
            " one row leave it out, and begin position_ids at 0 in each"
        )
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise InputError(
            "parallel.cp: attention_mask has zeros before ones, and only padding on the right of a"
            " row is computed as in one process; pad on the right (tokenizer.padding_side ="
            ' "right")'
        )
    targets = batch.get(SHIFTED)
    if isinstance(targets, torch.Tensor) and targets.shape == mask.shape:
        count = int(((targets != IGNORED) & ~mask).sum())
        if count:
            raise InputError(
                f"parallel.cp: labels make {count} positions of padding predict a token, and what"
                f" padding sees is not computed; set the labels of padding to {IGNORED}"
            )


def as_mask(starts: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor:
    """The starts in the form that Transformers hands to every attention unchanged: a mask of four
    dimensions.
    """
    if starts is None:
        return torch.zeros(rows, _WHOLE_ROWS, 1, 1, dtype=torch.int64, device=device)
    return starts[:, None, :, None]


def of_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """The starts [batch, tokens] in such a mask."""
    return None if mask.shape[1] == _WHOLE_ROWS else mask[:, 0, :, 0]


def is_ours(mask: torch.Tensor | None) -> bool:
    """Whether a mask is of `as_mask`."""
    return (
        mask is not None
        and mask.ndim == 4
        and mask.dtype == torch.int64
        and mask.shape[1] <= _WHOLE_ROWS
        and mask.shape[3] == 1
    )
