"""Placement of plain tensors like a parameter."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def like_parameter(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Wrap a local tensor in the placements of a parameter.

    Args:
        local: This rank's part, with the local shape of `parameter`.
        parameter: A plain parameter or a DTensor.

    Returns:
        `local` itself for a plain parameter, otherwise a DTensor.
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
