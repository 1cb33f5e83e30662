"""What a model returns besides its logits under tensor parallelism: hidden states of its blocks,
which sequence parallelism shards, and attention weights, of which a rank has its own heads.

They are tensors like any other while the model runs. Where one is among what the model returns it
is gathered, so that a loss computes what one process would; nothing is gathered that is not used. A
tensor's mark says along which dimension it is a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from plait.comm.collectives import gather

_MARK = "_plait_part"


def mark(tensor: Any, *, dim: int, length: int) -> None:
    """`tensor`, if it is one, is this rank's part along `dim` of a tensor with `length` there."""
    if isinstance(tensor, torch.Tensor):
        setattr(tensor, _MARK, (dim, length))


def mark_heads(module: nn.Module, *, heads: int, group: ProcessGroup) -> None:
    """Mark the attention weights [batch, heads, queries, keys] that an attention returns behind its
    output.
    """
    own = heads // group.size()

    def after(_module: nn.Module, _args: object, output: object) -> None:
        for value in output[1:] if isinstance(output, tuple | list) else ():
            if isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1] == own:
                mark(value, dim=1, length=heads)

    module.register_forward_hook(after)


def gather_outputs(module: nn.Module, group: ProcessGroup) -> None:
    """Gather every marked tensor in what `module` returns. What reads it is computed on every rank,
    so a rank's part of its gradient is the gradient of the part.
    """

    def after(_module: nn.Module, _args: object, output: Any) -> Any:
        gathered = _gathered(output, group)
        return None if gathered is output else gathered

    module.register_forward_hook(after)


def _gathered(value: Any, group: ProcessGroup) -> Any:
    """The same object where nothing in it is a part."""
    if isinstance(value, torch.Tensor):
        part = getattr(value, _MARK, None)
        return value if part is None else gather(value, group, dim=part[0], length=part[1])
    if isinstance(value, tuple | list):
        found = [_gathered(entry, group) for entry in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, Mapping):
        changed = {
            key: new for key, old in value.items() if (new := _gathered(old, group)) is not old
        }
        for key, new in changed.items():
            value[key] = new  # type: ignore[index]  # a ModelOutput or a dict
        return value
    if not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
        for key, old in list(vars(value).items()):
            if (
                isinstance(old, torch.Tensor | tuple | list)
                and (new := _gathered(old, group)) is not old
            ):
                object.__setattr__(value, key, new)  # a frozen dataclass too
    return value
