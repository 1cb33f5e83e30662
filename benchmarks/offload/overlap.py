"""How well reading, computing and writing overlap: a disk throttled inside the file layer, computation that sleeps for a known time.

The time of a phase over the slower of its two, `max(I/O, computation)`: 1 is a perfect overlap, their sum over the larger is none. Both
sleep, so that other programs change little; what is left over 1 is the filling and draining of the pipe, the hand-overs between threads and
the mapping of pages.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.optim.disk_optimizer import ALIGNED, DiskTier
from plait.parallel.offload.arena import Arena

PIECES, SECONDS = 40, 0.02
"""Pieces or blocks, and what computing one takes."""
RATIOS = {"compute bound": 0.5, "even": 1.0, "disk bound": 2.0}
"""I/O over computation."""


class SlowArena(Arena):
    """One channel to the disk, which moves a certain number of bytes a second."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bytes_per_second = float("inf")
        self.moved = 0
        self._channel = threading.Lock()

    def transfer(self, size: int, *, reading: bool) -> None:
        """Sleep for as long as the disk would take."""
        with self._channel:
            self.moved += size
            time.sleep(size / self.bytes_per_second)


class Slow(torch.autograd.Function):
    """Takes a known time in forward and in backward."""

    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor) -> torch.Tensor:
        """Sleeps."""
        time.sleep(SECONDS)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Sleeps."""
        time.sleep(SECONDS)
        return grad


class Block(nn.Module):
    """A matrix and a sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same width."""
        return torch.relu(self.inner(Slow.apply(hidden)))


def optimizer_step(folder: Path, ratio: float, rounds: int) -> list[float]:
    """AdamW over gradients and states in files."""
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(ALIGNED)) for _ in range(PIECES))
    arena = SlowArena(folder)
    tier = DiskTier(arena, buffer_bytes=ALIGNED * 16)
    tier.adopt(parameters, states=2)
    optimizer = torch.optim.AdamW(parameters.parameters(), fused=True)
    tier.drive(optimizer)
    inner = tier._inner_step
    assert inner is not None

    def slowly() -> None:
        time.sleep(SECONDS)
        inner()

    tier._inner_step = slowly

    def step() -> None:
        for parameter in parameters:
            parameter.grad = tier._gradients[parameter]
        optimizer.step()

    step()  # makes the states
    return _ratios(arena, step, ratio, PIECES * SECONDS, rounds)


def forward_and_backward(folder: Path, ratio: float, rounds: int) -> list[float]:
    """A model whose parameters are in files, gathered block by block, with a pool for four blocks."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        model = nn.Sequential(*(Block() for _ in range(PIECES)))
        mesh = init_device_mesh("cpu", (1,))
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        arena = SlowArena(folder)
        tier = DiskTier(None, buffer_bytes=1 << 20, shards=arena, pool_bytes=4 * 4 * 256 * 256)
        tier.adopt(model, states=0)
        batch = torch.ones(
            1, 256, requires_grad=True
        )  # so that the first block's sleep is in backward too

        def step() -> None:
            model(batch).sum().backward()
            tier.end_of_computation()

        step()  # what follows what is known afterwards
        return _ratios(arena, step, ratio, 2 * PIECES * SECONDS, rounds)
    finally:
        dist.destroy_process_group()


def _ratios(
    arena: SlowArena, step: object, ratio: float, compute: float, rounds: int
) -> list[float]:
    assert callable(step)
    arena.moved = 0
    step()
    io = ratio * compute
    arena.bytes_per_second = arena.moved / io
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        found.append((time.perf_counter() - began) / max(io, compute))
    return found
