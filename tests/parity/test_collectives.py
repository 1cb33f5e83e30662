"""The differentiable collectives compute their definition, and their backward is the adjoint.

Shards are even and uneven, and the dtype is float64.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from plait.comm import collectives
from plait.losses.loss import vocab_parallel_cross_entropy


def replicated(seed, *shape):
    """Return a tensor that is the same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(rank, ranks, length, batch):
    """Check every collective on tensors [batch, length, 4] along dim 1. Runs on every rank."""
    group = dist.group.WORLD
    start, size = collectives.shard_range(length, group)
    shard = slice(start, start + size)
    full = replicated(0, batch, length, 4)
    partials = [replicated(1 + other, batch, length, 4) for other in range(ranks)]
    partial = partials[rank]
    total = torch.stack(partials).sum(0)
    c = collectives
    # Function, and on this rank: input, expected output, gradient of the output, expected gradient.
    table = {
        "enter": (lambda x: c.enter(x, group), full, full, partial, total),
        "leave": (lambda x: c.leave(x * 1, group), partial, total, full, full),
        "gather": (
            lambda x: c.gather(x, group, dim=1, length=length),
            full[:, shard],
            full,
            full * 2,
            (full * 2)[:, shard],
        ),
        "split": (
            lambda x: c.split(x, group, dim=1),
            full,
            full[:, shard],
            full[:, shard] * 3,
            full * 3,
        ),
        "gather_sum": (
            lambda x: c.gather_sum(x, group, dim=1, length=length),
            full[:, shard],
            full,
            partial,
            total[:, shard],
        ),
        "leave_scatter": (
            lambda x: c.leave_scatter(x, group, dim=1),
            partial,
            total[:, shard],
            full[:, shard],
            full,
        ),
    }
    for name, (function, argument, expected, gradient, expected_gradient) in table.items():
        x = argument.clone().requires_grad_()
        received = gradient.clone()
        output = function(x)
        output.backward(received)
        torch.testing.assert_close(
            (output, x.grad), (expected, expected_gradient), rtol=0, atol=1e-12, msg=name
        )
        # A backward must not write into the gradient that it receives.
        assert torch.equal(received, gradient), name


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (3, 7), (4, 5), (3, 2)])
def test_forward_and_adjoint(pool, ranks, length, batch):
    """Some ranks have fewer entries than others, or none."""
    pool.run(ranks, check, length, batch)


class RecordedOperators(TorchDispatchMode):
    """Records the operators that run, except for views, allocations and collectives."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        allocates = name in ("new_empty", "empty_like", "detach")
        if not (func.is_view or func.namespace == "c10d" or allocates):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operators(rank, ranks, length, batch, dim):
    """Return the operators of an all-gather and of a reduce-scatter. Runs on every rank."""
    group = dist.group.WORLD
    shape = [batch, 4, 4]
    shape[dim] = length
    tensor = replicated(0, *shape)
    shard = collectives.slice_dim(tensor, group, dim=dim)
    with RecordedOperators() as gathering:
        gathered = collectives.all_gather_dim(shard, group, dim=dim, length=length)
    with RecordedOperators() as scattering:
        scattered = collectives.reduce_scatter_dim(tensor, group, dim=dim)
    for result in (gathered, scattered):
        assert result.is_contiguous() and not result._is_view()
    return gathering.names, scattering.names


@pytest.mark.parametrize(
    ("batch", "dim", "length", "gathering", "scattering"),
    [
        (1, 1, 8, [], ["sum"]),
        (3, 0, 8, [], ["sum"]),
        (3, 1, 8, ["cat"], ["cat", "sum"]),
        # The last of two shards of 7 is padded before it is sent.
        (1, 1, 7, ["resize_"], ["new_zeros", "cat", "cat", "sum"]),
        (3, 1, 7, ["cat"], ["new_zeros", "cat", "cat", "sum"]),
    ],
)
def test_shards_are_copied_at_most_once(pool, batch, dim, length, gathering, scattering):
    """Contiguous shards are not copied. The sum is that of the reduce-scatter on gloo."""
    names = pool.run(2, operators, length, batch, dim)
    assert names[0] == (gathering, scattering)


def cross_entropy(rank, ranks, vocabulary):
    """Compare value and gradient with torch's, with ignored targets. Runs on every rank."""
    logits = replicated(5, 2, 6, vocabulary) * 4
    targets = torch.arange(12).view(2, 6) % vocabulary
    targets[0, 1] = -100
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(
        reference.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (expected * 0.3).backward()

    start, size = collectives.shard_range(vocabulary, dist.group.WORLD)
    shard = slice(start, start + size)
    mesh = init_device_mesh("cpu", (ranks,))
    # Operations on the logits, such as a model's log_softmax, may change their placement.
    for placement in (Shard(2), Replicate(), Partial(), Shard(1)):
        local = logits[..., shard].clone().requires_grad_()
        split = DTensor.from_local(
            local, mesh, [Shard(2)], run_check=False, shape=logits.shape, stride=logits.stride()
        )
        if placement.is_partial():
            # torch does not redistribute to partial sums.
            zeros = torch.zeros_like(logits)
            partial_zeros = DTensor.from_local(zeros, mesh, [Partial()], run_check=False)
            placed = partial_zeros + split.redistribute(placements=[Replicate()])
            assert placed.placements[0].is_partial()
        else:
            placed = split.redistribute(placements=[placement])
        actual = vocab_parallel_cross_entropy(placed, targets, ignored=-100)
        (actual * 0.3).backward()
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(local.grad, reference.grad[..., shard], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 8), (3, 7), (3, 4)])
def test_vocab_parallel_cross_entropy(pool, ranks, vocabulary):
    """The last of 3 ranks has none of 4 rows of the vocabulary."""
    pool.run(ranks, cross_entropy, vocabulary)


def reduce_scatter(rank, ranks):
    """Check sum and mean of the reduce-scatter that ZeRO uses on gloo. Runs on every rank."""
    inputs = [replicated(other, ranks * 5) for other in range(ranks)]
    total = torch.stack(inputs).sum(0)[rank * 5 : (rank + 1) * 5]
    scatter = collectives.AllToAllReduceScatter()
    output = scatter.allocate((5,), dtype=torch.float64, device=torch.device("cpu"))
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / ranks)):
        scatter(output, inputs[rank].clone(), dist.group.WORLD, op)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)
    with pytest.raises(NotImplementedError):
        scatter(output, inputs[rank].clone(), dist.group.WORLD, dist.ReduceOp.MAX)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter_by_all_to_all(pool, ranks):
    pool.run(ranks, reduce_scatter)
