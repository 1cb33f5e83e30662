"""`load_state_dict` of full tensors into a sharded model.

Each rank loads its slice of every parameter. torch itself cannot copy a plain tensor into a
DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import local_window
from plait._torch.modules import own_parameters
from plait.parallel.placed import like_parameter


def accept_full_tensors(model: nn.Module) -> None:
    """Let `load_state_dict` of a model, or of a part of it, also take full tensors."""
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in own_parameters(module).values()):
            module.register_load_state_dict_pre_hook(_slice_full_tensors)


def _slice_full_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Replace full tensors of the right shape by this rank's slice.

    Tensors of a wrong shape stay, because torch's error names them.
    """
    own_parameters_by_name: dict[str, Any] = {**own_parameters(module)}
    for leaf, parameter in own_parameters_by_name.items():
        value: Any = state_dict.get(f"{prefix}{leaf}")
        if not isinstance(parameter, DTensor) or type(value) not in (torch.Tensor, nn.Parameter):
            continue
        # torch's error names a tensor of another shape.
        if value.shape == parameter.shape:
            local = value.detach()[local_window(parameter)].to(parameter.device)
            state_dict[f"{prefix}{leaf}"] = like_parameter(local, parameter)
