"""What a checkpoint keeps of a model: parameters and persistent buffers by name, and what modules
keep besides (`get_extra_state`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from plait import exact

START = "model."
_TRAINED = "_plait_checkpoints_hold_what_is_trained"
_EXTRA = "_extra_state"


def keep_what_is_trained(model: nn.Module) -> None:
    """Checkpoints of the model have the parameters that are not frozen now, and nothing else:
    whoever resumes brings the rest (adapters on a model that has its own folder).
    """
    frozen = frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    )
    object.__setattr__(model, _TRAINED, frozen)


def is_left_out(model: nn.Module, name: str) -> bool:
    """Return whether checkpoints of the model leave a parameter out."""
    return name in getattr(model, _TRAINED, ())


def content(
    model: nn.Module, *, trained: Collection[nn.Parameter] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what a checkpoint keeps of a model, by name. No tensor is copied.

    Args:
        model: The model, sharded or not.
        trained: Parameters that are kept even if they were frozen when `keep_what_is_trained` was
            called: what an optimizer holds has changed since.

    Returns:
        Tensors, and other values in JSON.

    Raises:
        CheckpointError: A value cannot be kept.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    left_out: frozenset[str] | None = getattr(model, _TRAINED, None)
    # modules that are left out may have a state_dict of their own kind, such as quantised ones
    if left_out is not None:
        held = set(trained)
        own = model.named_parameters(remove_duplicate=False)
        kept = (
            (name, parameter)
            for name, parameter in own
            if name not in left_out or parameter in held
        )
        return {f"{START}{name}": parameter.detach() for name, parameter in kept}, values
    for name, value in get_model_state_dict(model).items():
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA:
            tensors[f"{START}{name}"] = value
        else:
            values[name] = exact.encode(value, name)
    return tensors, values


def shapes(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, tuple[int, ...]]:
    """Global shapes of the tensors of all pipeline stages, from `content` of this one. Collective
    over `group`, the ranks that hold different parts of the model.
    """
    here = {name.removeprefix(START): tuple(tensor.shape) for name, tensor in tensors.items()}
    if group is None:
        return here
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(parts, here, group=group)
    return {name: shape for part in parts for name, shape in part.items()}


def put_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give modules what they kept besides tensors."""
    modules = dict(model.named_modules())
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        if leaf == _EXTRA and owner in modules:
            modules[owner].set_extra_state(exact.decode(value, None, name))
