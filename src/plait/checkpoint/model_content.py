"""State of a model in a checkpoint: parameters, persistent buffers, and modules' extra state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from plait import exact
from plait.cluster.small_messages import all_gather_objects

START = "model."
_FROZEN_NAMES = "_plait_checkpoints_hold_what_is_trained"
"""Attribute of a model with the names of the parameters that its checkpoints leave out."""
_EXTRA = "_extra_state"


def save_trained_only(model: nn.Module) -> None:
    """Restrict checkpoints of a model to the parameters that are not frozen at this moment.

    Used for adapters: the base model has a folder of its own, from which a resumed run loads it.
    """
    frozen = frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    )
    object.__setattr__(model, _FROZEN_NAMES, frozen)


def is_left_out(model: nn.Module, name: str) -> bool:
    """Return True if checkpoints of the model leave the parameter out."""
    return name in getattr(model, _FROZEN_NAMES, ())


def content(
    model: nn.Module, *, trained: Collection[nn.Parameter] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of a model that a checkpoint contains, by name. No tensor is copied.

    Args:
        model: The model, sharded or not.
        trained: Parameters to include even if they were frozen when `save_trained_only` was
            called, because the optimizer has them now.

    Returns:
        Tensors under `model.<name>`, and JSON values of modules.

    Raises:
        CheckpointError: A value cannot be encoded.
    """
    left_out: frozenset[str] | None = getattr(model, _FROZEN_NAMES, None)
    if left_out is not None:
        # The state_dict is not read: modules that are left out may have one of another kind, such
        # as quantized ones.
        optimized = set(trained)
        return {
            f"{START}{name}": parameter.detach()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in left_out or parameter in optimized
        }, {}

    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in get_model_state_dict(model).items():
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA:
            tensors[f"{START}{name}"] = value
        else:
            values[name] = exact.encode(value, name)
    return tensors, values


def shapes(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the global shapes of the tensors of all pipeline stages. Collective.

    Args:
        tensors: Tensors of this stage from `content`.
        group: Ranks that have different parts of the model; None for a single stage.
    """
    local_shapes = {
        name.removeprefix(START): tuple(tensor.shape) for name, tensor in tensors.items()
    }
    if group is None:
        return local_shapes
    by_stage = all_gather_objects(local_shapes, group)
    return {name: shape for stage in by_stage for name, shape in stage.items()}


def put_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Restore the extra state of modules from the values of `content`."""
    modules = dict(model.named_modules())
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == _EXTRA and owner in modules:
            modules[owner].set_extra_state(exact.decode(value, None, name))
