"""From what a user passes to `train_batch` to micro-batches on the device, and from a micro-batch to the model's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from plait.engine.loss import first_tensor
from plait.errors import InputError

Forward = Callable[[nn.Module, Any], Any]
"""How a micro-batch goes through the model: (model, micro-batch) -> output."""

TARGETS = "labels"
"""The key of a mapping that is not passed to the model: the loss is computed from its logits, in one place for every layout."""


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Mapping: every entry but `labels` by name. Tuple: every entry but the last (the target) in order. Tensor: as it is."""
    if isinstance(batch, Mapping):
        return model(**{key: value for key, value in batch.items() if key != TARGETS})
    if isinstance(batch, tuple):
        return model(*batch[:-1])
    return model(batch)


def micro_batches(batch: Any, *, count: int, size: int | None) -> list[Any]:
    """Cut a step's batch into `count` micro-batches of `size` samples, or into equal ones for None.

    A mapping, tuple or tensor holds count x size samples in dim 0 of every tensor; entries that are no tensors go to every micro-batch. A
    list or an iterator gives `count` ready micro-batches, whose lengths may differ. Raises InputError for any other amount.
    """
    if isinstance(batch, Mapping | tuple | torch.Tensor):
        found = first_tensor(batch).shape[0]
        if size is None:
            size = max(1, found // count)
        if found != count * size:
            raise InputError(
                f"train_batch got {found} samples; this rank's share of a step is {count * size} (train_micro_batch_size_per_gpu {size} x "
                f"gradient_accumulation_steps {count}); pass {count * size}, or a list of {count} micro-batches of any size"
            )
        return [_cut(batch, index * size, size, count * size) for index in range(count)] if count > 1 else [batch]
    if not isinstance(batch, Iterable):
        raise InputError(f"train_batch takes a mapping, a tuple, a tensor or an iterable of micro-batches, not {type(batch).__name__}")
    taken = list(islice(batch, count)) if not isinstance(batch, list) else batch
    if len(taken) != count:
        raise InputError(
            f"train_batch got {len(taken)} micro-batches and a step has gradient_accumulation_steps {count}; every step needs all of them"
        )
    return taken


def _cut(value: Any, start: int, size: int, whole: int) -> Any:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return value
        if value.shape[0] != whole:
            raise InputError(f"a tensor of shape {tuple(value.shape)} does not have the step's {whole} samples in dim 0")
        return value.narrow(0, start, size)
    if isinstance(value, Mapping):
        return {key: _cut(entry, start, size, whole) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(entry, start, size, whole) for entry in value)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor of a micro-batch; a no-op for what is there."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(to_device(entry, device) for entry in value)
    return value
