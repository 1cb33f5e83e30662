"""Optimizer states on fake tensors, for predictions of the peak."""

from __future__ import annotations

import torch


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states of an optimizer by a step on zero gradients.

    It changes the parameters, so it is only for fake tensors and dry runs.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
