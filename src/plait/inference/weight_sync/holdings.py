"""What a rank holds of a model: for every tensor which window, without its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.checkpoint.windows import Window, window_of
from plait.errors import InputError
from plait.inference.quantised import CODES, SCALES
from plait.parallel.data.data_parallel import free_gathered
from plait.sharded.model import ShardedModel, owner_of


@dataclass(frozen=True)
class Held:
    """One tensor."""

    dtype: str
    """Without `torch.`."""
    shape: tuple[int, ...]
    """Global."""
    window: Window
    """What the rank holds of it."""
    same_as: str = ""
    """The name of an earlier tensor that it is tied to."""

    def to_json(self) -> list[Any]:
        """For a rank of another run."""
        return [self.dtype, self.shape, self.window, self.same_as]

    @classmethod
    def of_json(cls, value: Any) -> Held:
        """From `to_json`, once it was JSON. Raises ValueError or TypeError for what is none."""
        dtype, shape, window, same_as = value
        return cls(str(dtype), tuple(map(int, shape)), tuple((int(start), int(size)) for start, size in window), str(same_as))


Holding = Mapping[str, Held]
"""Of a rank, by name; empty for one that holds nothing."""


@dataclass(frozen=True)
class Side:
    """A model on this rank."""

    tensors: Mapping[str, torch.Tensor]
    holding: Holding


NOTHING = Side({}, {})


def model_of(owner: Any) -> nn.Module | None:
    """The module of an engine, of what `plait.parallelize` returned, or a module itself. Raises InputError for anything else."""
    if owner is None or isinstance(owner, nn.Module):
        return owner
    found = getattr(owner, "model", None)
    if isinstance(found, nn.Module):
        return found
    raise InputError(f"{type(owner).__name__} is no model; give an engine, what plait.parallelize returned, or a torch.nn.Module")


def tensors_of(model: nn.Module | None, what: str) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, none copied; none of None. Raises InputError for a model that has not all of them in
    memory."""
    if model is None:
        return {}
    owner = owner_of(model)
    if isinstance(owner, ShardedModel) and owner.config.parameter_offload.device == "nvme":
        raise InputError(f'{what}: offload_param.device = "nvme": its parameters are in files; send from a layout that has them in memory')
    free_gathered(model)
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
            raise InputError(f"{what}: {name} is what a module keeps by get_extra_state, which is not sent")
        if tensor.is_meta:
            raise InputError(f"{what}: {name} is on the meta device; give the model memory first")
        if name.endswith((CODES, SCALES)):
            raise InputError(f"{what}: {name} is quantised, and weights are sent as they are trained; load the model without quant")
        found[name] = tensor
    return found


def holding_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Held]:
    """What this rank tells the others of its tensors."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in tensors.items():
        same = first.setdefault(id(tensor), name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = Held(dtype, tuple(tensor.shape), window_of(tensor), "" if same == name else same)
    return found
