"""Outputs of a model under tensor parallelism, besides its logits.

These are hidden states of its blocks, which sequence parallelism shards, and attention weights, of
which each rank has its heads. They are plain tensors while the model runs. A mark says along which
dimension a tensor is a part. Only parts among the returned outputs are gathered, so that a loss
computes the same as in a single process.
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
    """Mark a tensor as this rank's part of a larger tensor. Other values are ignored.

    Args:
        tensor: The part.
        dim: The dimension that is split.
        length: The length of the larger tensor along `dim`.
    """
    if isinstance(tensor, torch.Tensor):
        setattr(tensor, _MARK, (dim, length))


def mark_heads(module: nn.Module, *, heads: int, group: ProcessGroup) -> None:
    """Mark the attention weights [batch, heads, queries, keys] that an attention returns.

    They follow the first entry of its output.
    """
    local_heads = heads // group.size()

    def mark_weights(_module: nn.Module, _args: object, output: object) -> None:
        if not isinstance(output, tuple | list):
            return
        for value in output[1:]:
            if isinstance(value, torch.Tensor) and value.shape[1:2] == (local_heads,):
                mark(value, dim=1, length=heads)

    module.register_forward_hook(mark_weights)


def gather_outputs(module: nn.Module, group: ProcessGroup) -> None:
    """Gather every marked tensor in the output of a module.

    All ranks compute the same from the gathered tensor, so the gradient of a part is this rank's
    part of its gradient.
    """

    def gather_marked(_module: nn.Module, _args: object, output: Any) -> Any:
        gathered = _gather_parts(output, group)
        if gathered is output:
            # None leaves the output of the module as it is.
            return None
        return gathered

    module.register_forward_hook(gather_marked)


def _gather_parts(value: Any, group: ProcessGroup) -> Any:
    """Return a nested output with all parts gathered, or the same object if it has none."""
    if isinstance(value, torch.Tensor):
        part = getattr(value, _MARK, None)
        if part is None:
            return value
        dim, length = part
        return gather(value, group, dim=dim, length=length)
    if isinstance(value, tuple | list):
        gathered = [_gather_parts(entry, group) for entry in value]
        if all(new is old for new, old in zip(gathered, value, strict=True)):
            return value
        # A named tuple.
        if hasattr(value, "_fields"):
            return type(value)(*gathered)
        return type(value)(gathered)
    if isinstance(value, Mapping):
        for key, entry in list(value.items()):
            new = _gather_parts(entry, group)
            if new is not entry:
                value[key] = new  # type: ignore[index]  # a ModelOutput or a dict
        return value
    if not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
        _gather_attributes(value, group)
    return value


def _gather_attributes(value: Any, group: ProcessGroup) -> None:
    for name, attribute in list(vars(value).items()):
        if not isinstance(attribute, torch.Tensor | tuple | list):
            continue
        new = _gather_parts(attribute, group)
        if new is not attribute:
            # The object may be a frozen dataclass.
            object.__setattr__(value, name, new)
