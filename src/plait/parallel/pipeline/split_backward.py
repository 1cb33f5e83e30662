"""A backward pass in two halves: the gradients of a stage's inputs, which the stage before waits for, and later those of its weights.

The first half runs torch's own graph traversal, which remembers at each layer the gradient that came in. The second half starts from there.
It accumulates as any backward does, so hooks on a parameter's gradient run; that is where it differs from torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import GraphExecGroup

from plait._torch.passes import input_gradients


@dataclass(frozen=True)
class Deferred:
    """The second half of a backward pass."""

    groups: tuple[dict[str, Any], ...] = ()
    """As torch's first half leaves them: `params` and `intermediates` (graph nodes), `grads` (what came into each intermediate)."""
    outputs: tuple[torch.Tensor, ...] = ()
    """Set where the inputs need no gradient: nothing was run yet, the second half is the complete backward."""
    gradients: tuple[torch.Tensor, ...] | None = None


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> Deferred:
    """First half: sets `grad` of `inputs` (leaves). `gradients` belong to `outputs`; None for a scalar loss. Detaches `outputs`."""
    if not any(tensor.requires_grad for tensor in inputs):
        return Deferred(outputs=tuple(outputs), gradients=None if gradients is None else tuple(gradients))
    groups = input_gradients(list(outputs), None if gradients is None else list(gradients), list(inputs), iter(weights))
    return Deferred(groups=tuple(groups))


def backward_weights(deferred: Deferred) -> None:
    """Second half: accumulates into `grad` of the parameters."""
    if deferred.outputs:
        torch.autograd.backward(deferred.outputs, deferred.gradients)
        return
    # Every layer's weights are a pass of their own. Where a block recomputes, it does so once for all of them, and not for each.
    together = GraphExecGroup()
    for index, group in enumerate(deferred.groups):
        # Passes that lead through other layers would use a recomputed tensor a second time, so they recompute theirs.
        with together if len(group["intermediates"]) == 1 else nullcontext():
            _accumulate(group, keep=index < len(deferred.groups) - 1)


def _accumulate(group: dict[str, Any], *, keep: bool) -> None:
    """`keep` what the graph saved: groups of a module that is used twice run over each other's layers."""
    nodes, entered = group.pop("intermediates"), group.pop("grads")
    edges = [
        (GradientEdge(node, index), gradient)
        for node, gradients in zip(nodes, entered, strict=True)
        for index, gradient in enumerate(gradients)
        if gradient is not None
    ]
    if not edges:
        return
    handles = []
    if len(nodes) > 1:
        # One intermediate may lead to another; each must see the gradient of the first half once, not that and what the other sends it.
        handles = [node.register_prehook(lambda _, kept=gradients: kept) for node, gradients in zip(nodes, entered, strict=True)]
    try:
        torch.autograd.backward(
            [edge for edge, _ in edges],
            [gradient for _, gradient in edges],
            inputs=[GradientEdge(node, 0) for node in group["params"]],
            retain_graph=keep,
        )
    finally:
        for handle in handles:
            handle.remove()
