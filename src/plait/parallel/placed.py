"""Plain tensors placed as a parameter is."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def like_parameter(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A plain tensor as what stands beside `parameter`: itself, or this rank's part of a DTensor
    with the parameter's placements.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
