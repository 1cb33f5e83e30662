"""The tensors that exist before a step, for measurements of its peak: the measured side of `parallel.accounting.peak`."""

from __future__ import annotations

from typing import Any

import torch

from plait._torch.operators import tree_leaves
from plait.parallel.data.reducer import Reducer


def step_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: Reducer | None, batch: Any) -> list[torch.Tensor]:
    """What exists before a step: parameters and their gradients, buffers, optimizer states, buckets, the batch."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    buckets = [tensor for bucket in reducer.buckets for tensor in (bucket.flat, bucket.wire)] if reducer is not None else []
    found = [*parameters, *(p.grad for p in parameters), *model.buffers(), *states, *buckets, *tree_leaves(batch)]
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Take a step on gradients without values, so that the states exist; for fake tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
