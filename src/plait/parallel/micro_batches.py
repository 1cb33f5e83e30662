"""From what a user passes to `train_batch` to micro-batches on the device, and from a micro-batch
to the model's arguments.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from plait.cluster import accelerator
from plait.errors import InputError
from plait.model.positions import call_model
from plait.parallel.containers import entries as entries_of
from plait.parallel.containers import rebuilt, tensors_in

Forward = Callable[[nn.Module, Any], Any]
"""How a micro-batch goes through the model: (model, micro-batch) -> output."""

LABELS = "labels"
SHIFTED = "shift_labels"
"""The keys of a mapping that are not passed to the model, because the loss is computed from its
logits, in one place for every layout. `labels` [batch, seq] int64 are a sequence's own tokens;
`shift_labels`, Transformers' name, are what each position predicts.
"""
CACHES = ("past_key_values", "cache")
"""Arguments by which models of Transformers take a KV cache: the first before 5.24, the second
since then.
"""
IGNORED = -100
"""Label of a position that is not a target, as in Transformers and torch's cross entropy."""


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Mapping: every entry but `labels` and `shift_labels` by name. Tuple or list: every entry but
    the last (the target) in order. Anything else: as it is.
    """
    if isinstance(batch, Mapping):
        return call_model(
            model, **{key: value for key, value in batch.items() if key not in (LABELS, SHIFTED)}
        )
    if isinstance(batch, tuple | list):
        return model(*batch[:-1])
    return model(batch)


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """What every position [..., seq] predicts: the next one's label; the last position predicts
    nothing.
    """
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def explicit(batch: Any) -> Any:
    """A mapping with what otherwise follows from where a token stands in its sequence: the targets
    `shift_labels` of `labels`, and `position_ids` [batch, seq] of `input_ids`; what is given stays.
    Anything else is returned as it is.
    """
    if not isinstance(batch, Mapping):
        return batch
    ids = batch.get("input_ids")
    found = dict(batch)
    if LABELS in batch and SHIFTED not in batch:
        found[SHIFTED] = shifted(batch[LABELS])
    if isinstance(ids, torch.Tensor) and batch.get("position_ids") is None:
        found["position_ids"] = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return found


def with_cache(batch: Any, cache: Any, *, argument: str) -> Any:
    """Add a KV cache to a mapping, under the name of the model's argument for it.

    Raises:
        InputError: The batch is not a mapping.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            "predict(cache=...) gives the cache to the model by name, and needs a mapping as"
            f" batch, not {type(batch).__name__}"
        )
    return {**batch, argument: cache, "use_cache": True}


def micro_batches(batch: Any, *, count: int, size: int | None) -> list[Any]:
    """Cut a step's batch into `count` micro-batches of `size` samples, or into equal ones for None.

    A mapping, tuple, dataclass or tensor holds count x size samples in dim 0 of every tensor, and
    so does a list as torch's default collation makes it, `[x, y]`. What has no dimension goes to
    every micro-batch. Any other list, or an iterator, gives `count` ready micro-batches, whose
    lengths may differ. Raises InputError for any other amount, and for a list that could be either.
    """
    if isinstance(batch, list):
        if not _is_one_batch(batch, count=count, size=size):
            return _exactly(batch, count)
    elif isinstance(batch, Iterator):
        return _exactly(list(islice(batch, count)), count)
    elif entries_of(batch) is None and not isinstance(batch, torch.Tensor):
        if isinstance(batch, Iterable):
            raise InputError(
                f"train_batch got a {type(batch).__name__}, which would begin anew at every step;"
                " make `batches = iter(...)` of it once and pass that, or pass one batch or a list"
                " of micro-batches"
            )
        raise InputError(
            "train_batch takes a mapping, a tuple, a dataclass, a tensor or an iterator of"
            f" micro-batches, not {type(batch).__name__}"
        )
    found = samples(batch)
    if size is None:
        size = max(1, found // count)
    if found != count * size:
        raise InputError(
            f"train_batch got {found} samples; this rank's share of a step is {count * size}"
            f" (train_micro_batch_size_per_gpu {size} x gradient_accumulation_steps {count}); pass"
            f" {count * size}, or a list of {count} micro-batches of any size"
        )
    return (
        [_cut(batch, index * size, size, count * size) for index in range(count)]
        if count > 1
        else [batch]
    )


def samples(batch: Any) -> int:
    """Dim 0 of the batch's first tensor that has dimensions; where all are in lists and differ, the
    length of the first list, one entry a sample. Raises InputError where there is no tensor.
    """
    fields = (
        [batch] if isinstance(batch, torch.Tensor) else list((entries_of(batch) or {}).values())
    )
    found = next(
        (
            rows
            for field in fields
            if not isinstance(field, list) and (rows := _rows(field)) is not None
        ),
        None,
    )
    if found is not None:
        return found
    lengths = {int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim}
    if not lengths:
        raise InputError(
            f"a batch needs a tensor whose dim 0 counts samples, and this {type(batch).__name__}"
            " has none; lists of numbers become tensors in the collation (a tokenizer:"
            " return_tensors='pt')"
        )
    return (
        lengths.pop()
        if len(lengths) == 1
        else len(next(field for field in fields if isinstance(field, list)))
    )


def _exactly(pieces: list[Any], count: int) -> list[Any]:
    if len(pieces) != count:
        raise InputError(
            f"train_batch got {len(pieces)} micro-batches and a step has"
            f" gradient_accumulation_steps {count}; every step needs all of them"
        )
    return pieces


def _is_one_batch(entries: list[Any], *, count: int, size: int | None) -> bool:
    """Whether a list is one collated batch, `[x, y]`, and not micro-batches."""
    lengths = {
        int(tensor.shape[0]) for entry in entries for tensor in tensors_in(entry) if tensor.ndim
    }
    if len(lengths) != 1:
        return False
    if len(entries) == 1:
        return False
    if not all(_alike(entries[0], entry) for entry in entries[1:]):
        return True  # micro-batches of one model have one form
    if not isinstance(entries[0], torch.Tensor | list):
        return False
    if len(entries) != count:
        return True
    length = lengths.pop()
    if size is not None and length in (size, count * size):
        return length == count * size
    if isinstance(entries[0], list):
        return False
    raise InputError(
        f"train_batch got a list of {count} tensors of {length} rows and a step has"
        f" gradient_accumulation_steps {count}, so it could be one batch of {count} fields or"
        f" {count} micro-batches; pass a tuple for one batch, or iter([...]) for micro-batches"
    )


def _alike(one: Any, other: Any) -> bool:
    """Whether two entries of a list can be micro-batches of one model: lengths may differ, and
    optional keys.
    """
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and (one.dtype, one.ndim) == (other.dtype, other.ndim)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        shared = one.keys() & other.keys()
        return bool(shared) and all(_alike(one[key], other[key]) for key in shared)
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return type(one) is type(other) and len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other)


def _cut(value: Any, start: int, size: int, whole: int) -> Any:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return value
        if value.shape[0] != whole:
            raise InputError(
                f"a tensor of shape {tuple(value.shape)} does not have the step's {whole} samples"
                " in dim 0"
            )
        return value.narrow(0, start, size)
    inside = entries_of(value)
    if inside is None:
        return value
    if (
        isinstance(value, list)
        and len(value) == whole
        and not any(_rows(entry) == whole for entry in value)
    ):
        return value[start : start + size]  # one entry a sample, as collation leaves texts
    return rebuilt(value, {key: _cut(entry, start, size, whole) for key, entry in inside.items()})


def _rows(entry: Any) -> int | None:
    return next((int(tensor.shape[0]) for tensor in tensors_in(entry) if tensor.ndim), None)


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor of a micro-batch; a no-op for what is there. Objects that can move
    themselves do.
    """
    if isinstance(value, torch.Tensor):
        if (
            accelerator.is_one(device)
            and value.device.type == "cpu"
            and type(value) is torch.Tensor
            and value.layout == torch.strided
        ):
            if any(
                size > 1 and not stride
                for size, stride in zip(value.shape, value.stride(), strict=True)
            ):
                value = value.contiguous()  # an expanded tensor cannot be pinned
            # from other memory the copy would block this thread, whatever it is asked for
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    # Transformers' BatchEncoding, a UserDict, would change in place.
    if callable(getattr(value, "to", None)) and not isinstance(value, UserDict | nn.Module | type):
        return value.to(device)
    inside = entries_of(value)
    if inside is None:
        return value
    moved = {key: to_device(entry, device) for key, entry in inside.items()}
    return (
        value
        if all(moved[key] is entry for key, entry in inside.items())
        else rebuilt(value, moved)
    )
