"""All-reduces of tensor parallelism that overlap with adjacent matrix multiplications.

Forward: a row-parallel product is computed in chunks of its rows, and the all-reduce of a chunk
overlaps with the product of the next one. Backward: the gradient of a column-parallel layer's input
is all-reduced while the gradients of the weights of all layers that read this input are computed
(Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication). The same number of bytes is sent.
The results are equal up to the order of additions in a product.

Note [Order of nodes in an overlapped backward]
    Of the nodes that are ready, autograd runs the one that was created last. `enter_overlapped`
    therefore creates nodes in this order: the node that waits for the all-reduce, the nodes that
    compute the gradients of weights, and the node that starts the all-reduce. The backward of a
    layer (`_Product`) returns a placeholder as gradient of the weight, and the weight's node
    replaces it with the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait._torch.passes import allow_two_runs, differentiable_once
from plait.comm.collectives import AsyncAllReduce, unshared

_NO_OVERLAP = "use parallel.tensor_overlap = 0"
"""Remedy for a model whose gradient is differentiated."""


class DeferredGradient:
    """Operands of a weight's gradient, which is computed after the gradient of the layer's input.

    Nodes of the autograd graph reference this object. It must not reference tensors of the graph
    before the backward, because the reference cycle would keep activations alive until Python's
    garbage collection.
    """

    def __init__(self) -> None:
        self._operands: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Store the gradient of the layer's output [..., out] and its input [..., in]."""
        self._operands = grad, x

    def gradient(self, _placeholder: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight [out, in], and drop the operands."""
        assert self._operands is not None
        operands = self._operands
        self._operands = None
        return _weight_gradient(*operands)


Weight = tuple[torch.Tensor, DeferredGradient]
"""A weight [out, in], and the operands of its gradient."""


def enter_overlapped(
    x: torch.Tensor, group: ProcessGroup, weights: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, dict[int, Weight]]:
    """Enter the tensor-parallel region so that the backward overlaps with its all-reduce.

    The gradients of the weights are computed while the gradient of the input is all-reduced.

    Args:
        x: An input [..., in] that is equal on every rank.
        group: The ranks of tp.
        weights: Trainable weights [out, in] of the layers that read `x`. Any keys are allowed.

    Returns:
        (input, weights by the same keys). The layers must compute with these tensors.
    """
    # See Note [Order of nodes in an overlapped backward].
    gradient_sum = _GradientSum(group)
    waiting = _Identity.apply(x, gradient_sum.wait)
    deferred: dict[int, Weight] = {}
    for key, weight in weights.items():
        operands = DeferredGradient()
        deferred[key] = (_Identity.apply(weight, operands.gradient), operands)
    entered: torch.Tensor = _Identity.apply(waiting, gradient_sum.start)
    return entered, deferred


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x` [..., in] times the transpose of a weight [out, in], plus `bias` [out]."""
    y: torch.Tensor = _Product.apply(x, *weight)
    if bias is None:
        return y
    return y + bias


def summed_product(
    x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, *, chunks: int
) -> torch.Tensor:
    """Return the sum over the ranks of `x` [..., in] times the transpose of `weight` [out, in].

    Args:
        x: This rank's features of the input.
        weight: This rank's columns of the weight.
        group: The ranks of tp.
        chunks: Number of chunks into which the rows are divided. The all-reduce of a chunk overlaps
            with the product of the next one.
    """
    y: torch.Tensor = _SummedProduct.apply(x, weight, group, chunks)
    return y


class _GradientSum:
    """Asynchronous all-reduce of an input's gradient."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sum: AsyncAllReduce | None = None

    def start(self, grad: torch.Tensor) -> torch.Tensor:
        """Start the all-reduce of a gradient, and return the tensor that receives the sum."""
        total = unshared(grad)
        self._sum = AsyncAllReduce(total, self._group)
        return total

    def wait(self, total: torch.Tensor) -> torch.Tensor:
        """Wait until the tensor that `start` has returned has the sum, and return the tensor."""
        assert self._sum is not None
        self._sum.value()
        self._sum = None
        return total


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return [out, in] from the gradient of a layer's output [..., out] and its input [..., in]."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class _Identity(torch.autograd.Function):
    """Identity whose backward applies a function to the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.map_gradient = backward
        return x.view_as(x)

    @staticmethod
    @differentiable_once(_NO_OVERLAP)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.map_gradient(grad), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, deferred: DeferredGradient
    ) -> torch.Tensor:
        allow_two_runs(ctx)
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        return x @ weight.t()

    @staticmethod
    @differentiable_once(_NO_OVERLAP)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.deferred.put(grad, x)
        # The weight's `_Identity` replaces it with the gradient.
        placeholder = weight.new_zeros(()).expand(weight.shape)
        return grad @ weight, placeholder, None


class _SummedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, chunks: int
    ) -> torch.Tensor:
        allow_two_runs(ctx)
        ctx.save_for_backward(x, weight)
        features = weight.shape[0]
        # The output must not be a view, because models add to it in place.
        total = x.new_empty(*x.shape[:-1], features)
        # [tokens, in] x [in, out] -> [tokens, out], in chunks of tokens
        inputs = x.reshape(-1, x.shape[-1]).chunk(chunks)
        outputs = total.view(-1, features).chunk(chunks)
        works = []
        for rows, chunk in zip(inputs, outputs, strict=True):
            torch.mm(rows, weight.t(), out=chunk)
            works.append(dist.all_reduce(chunk, group=group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        return total

    @staticmethod
    @differentiable_once(_NO_OVERLAP)
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = _weight_gradient(grad, x)
        return grad @ weight, weight_grad, None, None
