"""The step over files: bits of torch's own step for every kind of optimizer, and reading, computing and writing at the same time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.config.optimization import OptimizerSpec
from plait.engine.disk_optimizer import ALIGNED, DiskTier, large_states
from plait.engine.optimizer import build_optimizer
from plait.errors import ModelError
from plait.parallel.arena import Arena


def model() -> nn.Module:
    """One parameter of several slices, some that share a piece, a scalar-like one."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(300, 111), nn.Linear(7, 5), nn.Linear(1, 1)])


def train(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 3, before: Callable[[], None] = lambda: None
) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            if step == 1 and index == 2:
                continue  # a step that leaves one unused
            (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()
        before()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


SPECS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {"amsgrad": True, "adam_w_mode": False},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.1},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {},
    "Adafactor": {},
    "Muon": {},
}


@pytest.mark.parametrize("buffer", [ALIGNED * 16, 10**9], ids=["many pieces", "one piece"])
@pytest.mark.parametrize("kind", list(SPECS))
def test_same_bits_as_torch(tmp_path: Path, kind: str, buffer: int) -> None:
    spec = OptimizerSpec(type=kind, params=SPECS[kind])
    plain, filed = model(), model()
    theirs = build_optimizer(spec, plain.named_parameters())
    train(theirs, list(plain.parameters()))
    arena = Arena(tmp_path)
    tier = DiskTier(arena, buffer_bytes=buffer)
    tier.adopt(filed, states=large_states(lambda named: build_optimizer(spec, named)))
    reserved = arena.reserved_bytes
    ours = build_optimizer(spec, filed.named_parameters())
    tier.drive(ours)
    train(ours, list(filed.parameters()))
    for a, b in zip(plain.parameters(), filed.parameters(), strict=True):
        assert torch.equal(a, b)
        first, second = theirs.state[a], ours.state[b]
        assert set(first) == set(second)
        for name, value in first.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, second[name]), name
                assert arena.holds(second[name]) or value.shape != a.shape or not value.ndim
            else:
                assert value == second[name]
    assert arena.reserved_bytes == reserved, "what was reserved at the start was enough"


def test_schedules_work_and_closures_are_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    DiskTier(Arena(tmp_path), buffer_bytes=10**6).drive(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ModelError, match="no closure"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ModelError, match="all parameters at once"):
        DiskTier(Arena(tmp_path), buffer_bytes=10**6).drive(torch.optim.LBFGS(model().parameters()))


class Packed(torch.Tensor):
    """Numbers in a form of their own, like torchao's states of 8 bits."""


class KeepsPacked(torch.optim.Optimizer):
    """Its states are Packed."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter.detach()).as_subclass(Packed)


def test_states_of_another_form_are_refused(tmp_path: Path) -> None:
    parameters = model()
    tier = DiskTier(Arena(tmp_path), buffer_bytes=10**6)
    tier.adopt(parameters, states=1)
    tier.drive(KeepsPacked(parameters.parameters()))
    with pytest.raises(ModelError, match="`exp_avg` of the optimizer is a Packed"):
        train(tier._optimizer, list(parameters.parameters()), steps=1)  # type: ignore[arg-type]


class SlowArena(Arena):
    """One channel to the disk, which moves a certain number of bytes a second."""

    bytes_per_second = float("inf")
    busy = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._channel = threading.Lock()

    def transfer(self, size: int, *, reading: bool) -> None:
        with self._channel:
            seconds = size / self.bytes_per_second
            self.busy += seconds
            time.sleep(seconds)


@pytest.mark.proof  # it measures time, which a busy machine has not
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0], ids=["compute bound", "even", "disk bound"])
def test_reading_computing_and_writing_overlap(tmp_path: Path, ratio: float) -> None:
    """A step takes the time of the slower of the two, and not their sum. Both are slept, so that a busy machine changes little."""
    pieces, compute_seconds = 40, 0.02
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(ALIGNED)) for _ in range(pieces))
    memory = Path("/dev/shm")  # the slowness of the disk is made here, and the real one has its own
    arena = SlowArena(memory if os.access(memory, os.W_OK) else tmp_path)
    tier = DiskTier(arena, buffer_bytes=ALIGNED * 16)
    tier.adopt(parameters, states=2)
    optimizer = torch.optim.AdamW(parameters.parameters(), fused=True)
    tier.drive(optimizer)
    inner = tier._inner_step
    assert inner is not None

    def slowly(*args: Any) -> None:
        time.sleep(compute_seconds)
        inner(*args)

    def grads() -> None:
        for parameter in parameters:
            parameter.grad = tier._gradients[parameter].zero_()

    tier._inner_step = slowly
    grads()
    optimizer.step()  # makes the states
    arena.bytes_per_second = 1e15
    optimizer.step()
    arena.bytes_per_second = arena.busy * 1e15 / (ratio * pieces * compute_seconds)
    best = float("inf")
    for _ in range(3):
        arena.busy = 0.0
        start = time.perf_counter()
        optimizer.step()
        seconds = time.perf_counter() - start
        best = min(best, seconds / max(arena.busy, pieces * compute_seconds))
    assert best <= 1.15
