"""The differentiable collectives: forward by their definition, backward as the adjoint, even and uneven, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from plait.comm import collectives as c


def whole(seed, *shape):
    """The same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(rank, ranks, length, batch):
    """Every function on tensors [batch, length, 4], along dim 1. Runs in a worker."""
    group = dist.group.WORLD
    start, size = c.shard_range(length, group)
    mine = slice(start, start + size)
    alike = whole(0, batch, length, 4)
    partials = [whole(1 + r, batch, length, 4) for r in range(ranks)]
    summed = torch.stack(partials).sum(0)
    cases = [
        # name, function, input on this rank, expected output, gradient fed in on this rank, expected gradient
        ("enter", lambda x: c.enter(x, group), alike, alike, partials[rank], summed),
        ("leave", lambda x: c.leave(x * 1, group), partials[rank], summed, alike, alike),
        (
            "gather",
            lambda x: c.gather(x, group, dim=1, length=length),
            alike[:, mine],
            alike,
            alike * 2,
            (alike * 2)[:, mine],
        ),
        (
            "split",
            lambda x: c.split(x, group, dim=1),
            alike,
            alike[:, mine],
            alike[:, mine] * 3,
            alike * 3,
        ),
        (
            "gather_sum",
            lambda x: c.gather_sum(x, group, dim=1, length=length),
            alike[:, mine],
            alike,
            partials[rank],
            summed[:, mine],
        ),
        (
            "leave_scatter",
            lambda x: c.leave_scatter(x, group, dim=1),
            partials[rank],
            summed[:, mine],
            alike[:, mine],
            alike,
        ),
    ]
    for name, function, given_, expected, grad, expected_grad in cases:
        x = given_.clone().requires_grad_()
        y = function(x)
        torch.testing.assert_close(
            y, expected, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name} forward: {text}"
        )
        y.backward(grad)
        torch.testing.assert_close(
            x.grad,
            expected_grad,
            rtol=0,
            atol=1e-12,
            msg=lambda text, name=name: f"{name} backward: {text}",
        )
        assert torch.equal(given_, given_), name


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (2, 7), (3, 7), (4, 5), (3, 2)])
def test_forward_and_adjoint(pool, ranks, length, batch):
    """Also where some ranks hold less or nothing."""
    pool.run(ranks, check, length, batch)


class Operators(TorchDispatchMode):
    """The operators that run, but for views, allocations and collectives."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if (
            not func.is_view
            and func.namespace != "c10d"
            and name not in ("new_empty", "empty_like", "detach")
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operators(rank, ranks, length, batch, dim):
    """Those of an all-gather, and of a reduce-scatter, of a tensor of `length` along `dim`. Runs in a worker."""
    group, shape = dist.group.WORLD, [batch, 4, 4]
    shape[dim] = length
    tensor = whole(0, *shape)
    mine = c.slice_dim(tensor, group, dim=dim)
    found = []
    for run in (
        lambda: c.all_gather_dim(mine, group, dim=dim, length=length),
        lambda: c.reduce_scatter_dim(tensor, group, dim=dim),
    ):
        with Operators() as seen:
            result = run()
        assert result.is_contiguous() and not result._is_view()
        found.append(seen.names)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("batch", "dim", "length", "gathering", "scattering"),
    [
        (1, 1, 8, [], ["sum"]),
        (3, 0, 8, [], ["sum"]),
        (3, 1, 8, ["cat"], ["cat", "sum"]),
        (1, 1, 7, ["resize_"], ["new_zeros", "cat", "cat", "sum"]),
        (3, 1, 7, ["cat"], ["new_zeros", "cat", "cat", "sum"]),
    ],
)
def test_copies(pool, batch, dim, length, gathering, scattering):
    """Shards of a single sequence are sent and received in their place, of several ones they are copied once. The sum is that of gloo's
    reduce-scatter. Of 7 entries the last shard is padded before it is sent, by one copy more on the second rank."""
    found = pool.run(2, operators, length, batch, dim)
    assert found[0] == (gathering, scattering)


def cross_entropy(rank, ranks, vocabulary):
    """Value and gradient against torch's, with ignored targets. Runs in a worker."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from plait.losses.loss import vocab_parallel_cross_entropy

    logits, targets = whole(5, 2, 6, vocabulary) * 4, torch.arange(12).view(2, 6) % vocabulary
    targets[0, 1] = -100
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(
        reference.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (expected * 0.3).backward()
    start, size = c.shard_range(vocabulary, dist.group.WORLD)
    mesh = init_device_mesh("cpu", (ranks,))
    for layout in (
        Shard(2),
        Replicate(),
        Partial(),
        Shard(1),
    ):  # what a model does to its logits may lay them out otherwise
        local = logits[..., start : start + size].clone().requires_grad_()
        split = DTensor.from_local(
            local, mesh, [Shard(2)], run_check=False, shape=logits.shape, stride=logits.stride()
        )
        if layout.is_partial():
            zero = DTensor.from_local(torch.zeros_like(logits), mesh, [Partial()], run_check=False)
            given = zero + split.redistribute(placements=[Replicate()])
            assert given.placements[0].is_partial()
        else:
            given = split.redistribute(placements=[layout])
        found = vocab_parallel_cross_entropy(given, targets, ignored=-100)
        (found * 0.3).backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-13, atol=0)
        assert reference.grad is not None
        torch.testing.assert_close(
            local.grad, reference.grad[..., start : start + size], rtol=0, atol=1e-13
        )


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 8), (3, 7), (4, 5), (3, 4)])
def test_vocab_parallel_cross_entropy(pool, ranks, vocabulary):
    """Also where the last rank holds no row of the vocabulary, and where logits are laid out otherwise (a model that takes the log_softmax
    of them had a loss of 5.29 for 4.56 at tp 2)."""
    pool.run(ranks, cross_entropy, vocabulary)


def reduce_scatter(rank, ranks):
    """Sum and mean, by definition. Runs in a worker."""
    from plait.comm.collectives import AllToAllReduceScatter

    inputs = [whole(r, ranks * 5) for r in range(ranks)]
    total = torch.stack(inputs).sum(0)[rank * 5 : (rank + 1) * 5]
    scatter = AllToAllReduceScatter()
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / ranks)):
        output = scatter.allocate((5,), dtype=torch.float64, device=torch.device("cpu"))
        scatter(output, inputs[rank].clone(), dist.group.WORLD, op)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)
    with pytest.raises(NotImplementedError):
        scatter(output, inputs[rank].clone(), dist.group.WORLD, dist.ReduceOp.MAX)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter_by_all_to_all(pool, ranks):
    """What sharded stages use on gloo."""
    pool.run(ranks, reduce_scatter)
