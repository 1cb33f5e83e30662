"""Context that undoes the changes that generation makes to a model in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from plait._torch.storage import version_of
from plait.cluster import accelerator

_PLAIN_TYPES = (bool, int, float, str, type(None))


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers, plain attributes of modules and torch's generators at the end.

    A forward over a longer input changes some of them: rotary frequencies that depend on the length
    of the input, and the length that they were computed for.

    Args:
        model: The model.
        device: Its device, whose generator is restored as well.
    """
    buffers = []
    attributes = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append((module, name, buffer, buffer.detach().clone(), version_of(buffer)))
        attributes.append((module, _plain_attributes(module)))

    device_type = accelerator.NAME if device.type == "cpu" else device.type
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device_type):
        try:
            yield
        finally:
            for module, name, buffer, before, version in buffers:
                # Without a write there is nothing to copy, and no version counter to increase.
                if version_of(buffer) != version:
                    buffer.detach().copy_(before)
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
            for module, values in attributes:
                _restore_attributes(module, values)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN_TYPES) or type(value) is torch.Tensor
    }


def _restore_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    missing = object()
    for name, value in values.items():
        # The caller restores the training mode.
        if name != "training" and module.__dict__.get(name, missing) is not value:
            module.__dict__[name] = value
