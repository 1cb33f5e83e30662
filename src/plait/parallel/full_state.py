"""`load_state_dict` of full tensors into a sharded model: every parameter loads this rank's slice.
torch has no rule for a plain tensor and a DTensor, and says so in its own words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import local_window
from plait._torch.modules import own_parameters


def accept_full_tensors(model: nn.Module) -> None:
    """Let `load_state_dict`, of the model or of a part of it, take full tensors as well as sharded
    ones.
    """
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in own_parameters(module).values()):
            module.register_load_state_dict_pre_hook(_cut)


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Full tensors of the right shape become this rank's; a wrong shape is left for torch to
    name.
    """
    own: dict[str, Any] = {**own_parameters(module)}
    for leaf, parameter in own.items():
        given: Any = state_dict.get(f"{prefix}{leaf}")
        if not isinstance(parameter, DTensor) or type(given) not in (torch.Tensor, nn.Parameter):
            continue
        if given.shape == parameter.shape:
            local = given.detach()[local_window(parameter)].to(parameter.device)
            state_dict[f"{prefix}{leaf}"] = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
