"""Batches of a step: micro-batches, their transfer to the device, and the call of the model.

A batch is a tensor or a nested container: mappings, tuples, named tuples, lists and dataclasses.
Containers keep their class when their entries change, because a loss may access `batch.labels`.

If sequences are split over cp, code that counts tokens cannot read `attention_mask`: the mask of a
sequence shard has another form, and splitting may add padding. A token mask, which distinguishes
tokens from padding, is therefore attached to the shard's mask.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from plait.cluster import accelerator
from plait.errors import InputError
from plait.model.positions import call_model

Forward = Callable[[nn.Module, Any], Any]
"""Function (model, micro-batch) -> output."""

LABELS = "labels"
SHIFTED = "shift_labels"
"""Keys of a mapping that are not passed to the model.

The loss is computed from logits outside the model, so that it is the same on every layout.
`labels` [batch, seq] int64 are the tokens of a sequence. `shift_labels`, a name of Transformers,
are the tokens that each position predicts.
"""

CACHES = ("past_key_values", "cache")
"""Arguments of Transformers models for a KV cache: the first before 5.24, the second since then."""
IGNORED = -100
"""Label of a position that is not a target, as in Transformers and torch's cross entropy."""


def micro_batches(batch: Any, *, count: int, size: int | None) -> list[Any]:
    """Split the batch of a step into micro-batches.

    A mapping, tuple, dataclass or tensor has count x size samples in dim 0 of every tensor. The
    same holds for a list `[x, y]` of torch's default collation. Values without dimensions go to
    every micro-batch. Any other list, or an iterator, provides complete micro-batches, whose
    lengths may differ.

    Args:
        batch: The batch, or a list or iterator of micro-batches.
        count: Micro-batches per step.
        size: Samples of a micro-batch, or None for equal parts.

    Raises:
        InputError: The number of samples or micro-batches is wrong, or a list could be either a
            batch or micro-batches.
    """
    if isinstance(batch, list):
        if not _is_one_batch(batch, count=count, size=size):
            return _require_count(batch, count)
    elif isinstance(batch, Iterator):
        return _require_count(list(islice(batch, count)), count)
    elif entries(batch) is None and not isinstance(batch, torch.Tensor):
        if isinstance(batch, Iterable):
            raise InputError(
                f"train_batch got a {type(batch).__name__}, which would restart at every step;"
                " create `batches = iter(...)` once and pass it, or pass one batch or a list"
                " of micro-batches"
            )
        raise InputError(
            "train_batch takes a mapping, a tuple, a dataclass, a tensor or an iterator of"
            f" micro-batches, not {type(batch).__name__}"
        )
    sample_count = samples(batch)
    if size is None:
        size = max(1, sample_count // count)
    if sample_count != count * size:
        raise InputError(
            f"train_batch got {sample_count} samples; this rank's share of a step is {count * size}"
            f" (train_micro_batch_size_per_gpu {size} x gradient_accumulation_steps {count}); pass"
            f" {count * size}, or a list of {count} micro-batches of any size"
        )
    if count <= 1:
        return [batch]
    return [_slice(batch, index * size, size, count * size) for index in range(count)]


def samples(batch: Any) -> int:
    """Return the number of samples of a batch.

    The number is the size of dim 0 of the first tensor that has dimensions and is in no list.
    Otherwise all tensors are in lists. If they have the same size of dim 0, this size is the
    number. If not, the first list has one entry per sample, and its length is the number.

    Raises:
        InputError: The batch has no tensor with dimensions.
    """
    fields = list((entries(batch) or {}).values())
    if isinstance(batch, torch.Tensor):
        fields = [batch]
    for field in fields:
        if isinstance(field, list):
            continue
        rows = _rows(field)
        if rows is not None:
            return rows

    lengths = {int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim}
    if not lengths:
        raise InputError(
            f"a batch needs a tensor whose dim 0 counts samples, but this {type(batch).__name__}"
            " has none; convert lists of numbers to tensors in the collate function (with a"
            " tokenizer: return_tensors='pt')"
        )
    if len(lengths) == 1:
        return lengths.pop()
    return len(next(field for field in fields if isinstance(field, list)))


def _require_count(batches: list[Any], count: int) -> list[Any]:
    if len(batches) != count:
        raise InputError(
            f"train_batch got {len(batches)} micro-batches, but a step has"
            f" gradient_accumulation_steps {count}; pass {count} micro-batches in every step"
        )
    return batches


def _is_one_batch(entries: list[Any], *, count: int, size: int | None) -> bool:
    """Return True if a list is one collated batch, `[x, y]`, rather than several micro-batches."""
    lengths = {
        int(tensor.shape[0]) for entry in entries for tensor in tensors_in(entry) if tensor.ndim
    }
    # The fields of a batch have equally many samples.
    if len(lengths) != 1 or len(entries) == 1:
        return False
    # Micro-batches of one model have one form.
    if not all(_have_one_form(entries[0], entry) for entry in entries[1:]):
        return True
    # A mapping or a tuple is a complete micro-batch.
    if not isinstance(entries[0], torch.Tensor | list):
        return False
    if len(entries) != count:
        return True
    # As many entries as micro-batches: the number of rows decides, if it can.
    length = lengths.pop()
    if size is not None and length in (size, count * size):
        return length == count * size
    if isinstance(entries[0], list):
        return False
    raise InputError(
        f"train_batch got a list of {count} tensors of {length} rows, but a step has"
        f" gradient_accumulation_steps {count}, so the list could be one batch of {count} fields or"
        f" {count} micro-batches; pass a tuple for one batch, or iter([...]) for micro-batches"
    )


def _have_one_form(first: Any, second: Any) -> bool:
    """Return True if two entries of a list can be micro-batches of one model.

    Their lengths may differ, and so may optional keys.
    """
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return (
            isinstance(first, torch.Tensor)
            and isinstance(second, torch.Tensor)
            and (first.dtype, first.ndim) == (second.dtype, second.ndim)
        )
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        shared = first.keys() & second.keys()
        return bool(shared) and all(_have_one_form(first[key], second[key]) for key in shared)
    if isinstance(first, Sequence) and isinstance(second, Sequence) and not isinstance(first, str):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(map(_have_one_form, first, second))
        )
    return type(first) is type(second)


def _slice(value: Any, start: int, size: int, sample_count: int) -> Any:
    """Return `size` samples of a nested batch, starting at sample `start`."""
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return value
        if value.shape[0] != sample_count:
            raise InputError(
                f"a tensor of shape {tuple(value.shape)} does not have the step's"
                f" {sample_count} samples in dim 0; give every tensor one row per sample"
            )
        return value.narrow(0, start, size)
    inside = entries(value)
    if inside is None:
        return value
    if (
        isinstance(value, list)
        and len(value) == sample_count
        and not any(_rows(entry) == sample_count for entry in value)
    ):
        # One entry per sample, as collation leaves texts.
        return value[start : start + size]
    parts = {key: _slice(entry, start, size, sample_count) for key, entry in inside.items()}
    return rebuild(value, parts)


def _rows(entry: Any) -> int | None:
    """Return the size of dim 0 of the first tensor with dimensions. None if there is none."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(entry) if tensor.ndim), None)


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor of a micro-batch to a device.

    Tensors on the device stay as they are. Objects with a method `to` move themselves.
    """
    if isinstance(value, torch.Tensor):
        if (
            accelerator.is_accelerator(device)
            and value.device.type == "cpu"
            and type(value) is torch.Tensor
            and value.layout == torch.strided
        ):
            dims = zip(value.shape, value.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in dims):
                # An expanded tensor cannot be pinned.
                value = value.contiguous()
            # A copy from pageable memory blocks this thread in spite of `non_blocking`.
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    # Transformers' BatchEncoding, a UserDict, would change in place.
    if callable(getattr(value, "to", None)) and not isinstance(value, UserDict | nn.Module | type):
        return value.to(device)
    inside = entries(value)
    if inside is None:
        return value
    moved = {key: to_device(entry, device) for key, entry in inside.items()}
    if all(moved[key] is entry for key, entry in inside.items()):
        return value
    return rebuild(value, moved)


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Call the model with a micro-batch.

    Args:
        model: The model.
        batch: The entries of a mapping are passed by name, except `labels` and `shift_labels`.
            Those of a tuple or list are passed by position, except the last one, which is the
            target. Any other batch is the only argument.
    """
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key not in (LABELS, SHIFTED)}
        return call_model(model, **inputs)
    if isinstance(batch, tuple | list):
        return model(*batch[:-1])
    return model(batch)


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the targets of labels [..., seq]: each position predicts the label of the next one.

    The last position predicts nothing.
    """
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def with_explicit_entries(batch: Any) -> Any:
    """Add the entries that models otherwise derive from the position of a token in its sequence.

    These are `shift_labels`, derived from `labels`, and `position_ids` [batch, seq], derived from
    `input_ids`. Existing entries stay, and batches that are not mappings are returned unchanged.
    """
    if not isinstance(batch, Mapping):
        return batch
    result = dict(batch)
    if LABELS in batch and SHIFTED not in batch:
        result[SHIFTED] = shift_labels(batch[LABELS])
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and batch.get("position_ids") is None:
        result["position_ids"] = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return result


def with_cache(batch: Any, cache: Any, *, argument: str) -> Any:
    """Add a KV cache to a mapping, under the name of the model's argument for it.

    Raises:
        InputError: The batch is not a mapping.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            "predict(cache=...) passes the cache to the model by name, so the batch must be a"
            f" mapping, not {type(batch).__name__}; pass a dictionary of the model's arguments"
        )
    return {**batch, argument: cache, "use_cache": True}


def entries(value: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a container by key, position or field, or None for any other value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuild(value: Any, inside: Mapping[Any, Any]) -> Any:
    """Return a container of the same class with other entries.

    Args:
        value: The container.
        inside: The new entries, with the keys of `entries(value)`.
    """
    if isinstance(value, Mapping):
        if type(value) is dict or not isinstance(value, MutableMapping):
            return dict(inside)
        changed: Any = copy.copy(value)
        for key, entry in inside.items():
            changed[key] = entry
        return changed
    if isinstance(value, tuple):
        # A named tuple.
        if hasattr(value, "_fields"):
            return type(value)(*inside.values())
        return tuple(inside.values())
    if isinstance(value, list):
        return list(inside.values())
    changed = copy.copy(value)
    for name, entry in inside.items():
        # A dataclass may be frozen.
        object.__setattr__(changed, name, entry)
    return changed


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested container with `function(tensor)` in place of every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    inside = entries(value)
    if inside is None:
        return value
    return rebuild(value, {key: map_tensors(function, entry) for key, entry in inside.items()})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested container, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for entry in (entries(value) or {}).values():
        yield from tensors_in(entry)


_TOKEN_MASK = "_plait_tokens"


def attach_token_mask(mask: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Attach the token mask of a sequence shard to the mask that replaces `attention_mask`.

    Args:
        mask: The replacement.
        tokens: Token mask [batch, seq], 0 for padding, or None if there is no padding.

    Returns:
        `mask` itself.
    """
    # In a tuple, so that None (no padding) differs from a mask without the attribute.
    setattr(mask, _TOKEN_MASK, (tokens,))
    return mask


def token_mask_of(mask: Any) -> Any:
    """Return the token mask that is attached to a mask, or the mask itself if none is attached."""
    (tokens,) = getattr(mask, _TOKEN_MASK, (mask,))
    return tokens


class TokenMaskObserver:
    """Forward hook of a model that stores the token mask of the latest forward."""

    def __init__(self, model: nn.Module) -> None:
        self.mask: torch.Tensor | None = None
        """Token mask of the latest forward, or None if it had no mask. See `attach_token_mask`."""
        self._signature = inspect.signature(model.forward)
        self._handle = model.register_forward_pre_hook(self._record_mask, with_kwargs=True)

    def _record_mask(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        arguments = self._signature.bind_partial(*args, **kwargs).arguments
        self.mask = token_mask_of(arguments.get("attention_mask"))

    def release(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()
