"""A model in training that generates, and goes on as if it had not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from plait._torch.storage import version_of
from plait.cluster import accelerator

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """At the end, buffers, plain attributes of modules and torch's generators are as they were. A
    forward over a longer input changes some of them: frequencies of rotary embeddings that follow
    the length, and the length that they were made for.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone(), version_of(buffer))
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    plain = [(module, _attributes(module)) for module in model.modules()]
    with torch.random.fork_rng(
        devices=[device] if device.type != "cpu" else [], device_type=_generator_of(device)
    ):
        try:
            yield
        finally:
            for module, name, buffer, before, version in buffers:
                if version_of(buffer) != version:
                    buffer.detach().copy_(before)
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
            for module, attributes in plain:
                for name, value in attributes.items():
                    if name != "training" and module.__dict__.get(name, attributes) is not value:
                        module.__dict__[name] = value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) or type(value) is torch.Tensor
    }


def _generator_of(device: torch.device) -> str:
    return accelerator.NAME if device.type == "cpu" else device.type
