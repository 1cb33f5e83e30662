"""All-reduces of tensor parallelism, overlapped with the matrix products around them.

Forward: a row-parallel product is computed in chunks of its rows; the all-reduce of a chunk
overlaps with the product of the next. Backward: the gradient of a column-parallel layer's input is
all-reduced while the gradients of the weights that read it are computed (Megatron-LM's
LinearWithGradAccumulationAndAsyncCommunication). The bytes are the same, and so are the results up
to the order of additions in a product.

Of the nodes that are ready, autograd runs the one that was created last. So the copy to the
tensor-parallel region that siblings share creates, in this order: the node that waits for the
all-reduce, the node that computes the gradients of their weights, the node that starts the
all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait._torch.passes import allow_two_runs
from plait.comm.collectives import unshared
from plait.comm.pending import Pending


class Deferred:
    """What the gradient of a weight is computed from, later than that of its layer's input. Holds
    no tensor of the graph before the backward: nodes of the graph hold it, and a circle would keep
    activations until Python looks for circles.
    """

    def __init__(self) -> None:
        self._operands: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """The gradient of the layer's output [.., out], and its input [.., in]."""
        self._operands = grad, x

    def gradient(self) -> torch.Tensor:
        """Of the weight; once."""
        assert self._operands is not None
        operands = self._operands
        self._operands = None
        return _weight_gradient(*operands)


Weight = tuple[torch.Tensor, Deferred]
"""A weight whose gradient is computed later."""


def enter_overlapped(
    x: torch.Tensor, group: ProcessGroup, weights: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, dict[int, Weight]]:
    """`x`, alike on every rank, as column-split siblings read it, and their weights as they compute
    with them, by the same keys.
    """
    gradient_sum = _GradientSum(group)
    waiting = _Wait.apply(x, gradient_sum)
    deferred = {key: Deferred() for key in weights}
    found = {
        key: (_Later.apply(weight, deferred[key]), deferred[key]) for key, weight in weights.items()
    }
    entered: torch.Tensor = _Start.apply(waiting, gradient_sum)
    return entered, found


class _GradientSum:
    """The sum of one input's gradient."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sum: Pending | None = None

    def start(self, grad: torch.Tensor) -> torch.Tensor:
        """Begin to sum it."""
        total = unshared(grad)
        self._sum = Pending(total, self._group)
        return total

    def wait(self) -> None:
        """Until it is summed."""
        assert self._sum is not None
        self._sum.value()
        self._sum = None


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` [.., in] times a weight [out, in], plus `bias` [out]."""
    y: torch.Tensor = _Product.apply(x, *weight)
    return y if bias is None else y + bias


def summed_product(
    x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, *, pieces: int
) -> torch.Tensor:
    """The sum over the ranks of `x` [.., in] times `weight` [out, in]."""
    y: torch.Tensor = _SummedProduct.apply(x, weight, group, pieces)
    return y


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[out, in] from the gradient of a layer's output [.., out] and its input [.., in]."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class _Mark(torch.autograd.Function):
    """A node that does nothing forward. Its owner is told when the backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Any) -> torch.Tensor:
        ctx.owner = owner
        return x.view_as(x)


class _Later(_Mark):
    @staticmethod
    def backward(ctx: Any, placeholder: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.owner.gradient(), None


class _Wait(_Mark):
    @staticmethod
    def backward(ctx: Any, total: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.owner.wait()
        return total, None


class _Start(_Mark):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.owner.start(grad), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, deferred: Deferred
    ) -> torch.Tensor:
        allow_two_runs(ctx)
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.deferred.put(grad, x)
        placeholder = weight.new_zeros(()).expand(weight.shape)
        return grad @ weight, placeholder, None


class _SummedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, pieces: int
    ) -> torch.Tensor:
        allow_two_runs(ctx)
        ctx.save_for_backward(x, weight)
        features = weight.shape[0]
        total = x.new_empty(*x.shape[:-1], features)  # no view: models add to it in place
        works = []
        for rows, piece in zip(
            x.reshape(-1, x.shape[-1]).chunk(pieces),
            total.view(-1, features).chunk(pieces),
            strict=True,
        ):
            torch.mm(rows, weight.t(), out=piece)
            works.append(dist.all_reduce(piece, group=group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        return total

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_weight = _weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        return grad @ weight, of_weight, None, None
