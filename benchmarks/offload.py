"""States and parameters in files: time of a host optimizer step, and overlap with a slow disk.

    python -m benchmarks.offload [--quick]

The step of AdamW on the host compares torch's fused kernel in memory, Plait's step over files, and
DeepSpeedCPUAdam if it is installed. Rounds are interleaved in one process with one thread, ratios
are taken within a round, and the parameters are compared afterwards.

The overlap throttles a disk inside the file layer and lets computation sleep for a known time. It
is the time of a phase divided by max(I/O, computation): 1 is a perfect overlap. Both sleep, so that
other programs change little. What is left above 1 is the filling and draining of the pipeline, the
hand-over between threads and the mapping of pages.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.command import command
from benchmarks.common.report import store
from benchmarks.common.statistics import paired_ratio, spread
from plait.optim.disk_optimizer import ALIGNED, DiskTier
from plait.parallel.offload.arena import Arena

MEMORY = Path("/dev/shm")
TENSORS = 16
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[], object]


def parameters(count: int) -> nn.ParameterList:
    """Return `count` numbers in equal tensors, with gradients."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, count // TENSORS, generator=generator) for _ in range(TENSORS)]
    module = nn.ParameterList(nn.Parameter(numbers.clone()) for numbers, _ in tensors)
    for parameter, (_, gradient) in zip(module, tensors, strict=True):
        parameter.grad = gradient.clone()
    return module


def torch_fused(module: nn.ParameterList, folder: Path) -> Step:
    """Return the step of torch's fused AdamW in memory."""
    return torch.optim.AdamW(module.parameters(), fused=True, **ADAMW).step


def plait_files(module: nn.ParameterList, folder: Path) -> Step:
    """Return the step of the same optimizer with gradients and states in files."""
    count = sum(parameter.numel() for parameter in module)
    tier = DiskTier(Arena(folder), buffer_bytes=count // 2)
    tier.adopt(module, states=2)
    for parameter in module:
        assert parameter.grad is not None
        parameter.grad = tier._gradients[parameter].copy_(parameter.grad)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
    tier.drive(optimizer)
    return optimizer.step


def deepspeed_cpu_adam(module: nn.ParameterList, folder: Path) -> Step:
    """Return the step of DeepSpeed's compiled optimizer."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    step: Step = DeepSpeedCPUAdam(list(module.parameters()), adamw_mode=True, **ADAMW).step
    return step


def time_optimizers(count: int, rounds: int) -> dict[str, Any]:
    """Time the steps of all baselines, and compare their parameters."""
    modules = {}
    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make, place in (
            ("torch", torch_fused, MEMORY),
            ("plait, files in memory", plait_files, MEMORY),
            ("plait, files on disk", plait_files, Path(folder)),
            ("deepspeed", deepspeed_cpu_adam, MEMORY),
        ):
            module = parameters(count)
            try:
                steps[name] = make(module, place)
            except Exception as error:  # DeepSpeed is missing, or does not compile here
                if name != "deepspeed":
                    raise
                print(f"{name} is left out: {type(error).__name__}: {error}")
                continue
            modules[name] = module

        seconds: dict[str, list[float]] = {name: [] for name in steps}
        names = list(steps)
        for turn in range(-2, rounds):  # two rounds are not counted
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                began = time.perf_counter()
                steps[name]()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - began)
    results = {}
    for name, values in seconds.items():
        ratio = paired_ratio(values, seconds["torch"])
        assert ratio is not None
        rate = spread([count / each / 1e6 for each in values])
        pairs = zip(modules["torch"], modules[name], strict=True)
        error = max(float((a - b).detach().abs().max()) for a, b in pairs)
        print(
            f"{name:24s} {rate.median:7.1f} M parameters/s, time / torch's {ratio.median:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f}), largest difference {error:.1e}"
        )
        results[name] = {
            "million_parameters_per_second": rate.as_dict(),
            "time_to_torch": ratio.as_dict(),
            "largest_difference": error,
        }
    return results


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


def _ratios(arena: SlowArena, step: Step, ratio: float, compute: float, rounds: int) -> list[float]:
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


def main() -> None:
    quick = command("offload", __doc__).parse_args().quick
    torch.set_num_threads(1)
    count, rounds = (1_000_000, 2) if quick else (16_000_000, 15)
    results = time_optimizers(count, rounds)
    overlap: dict[str, dict[str, Any]] = {}
    for phase in (optimizer_step, forward_and_backward):
        for name, ratio in RATIOS.items():
            values = phase(MEMORY, ratio, 1 if quick else 5)
            overlap.setdefault(phase.__name__, {})[name] = spread(values).as_dict()
            times = f"{min(values):.3f} to {max(values):.3f}"
            print(f"{phase.__name__:20s} {name:14s} time / max(I/O, computation) {times}")
    if not quick:
        sizes = {"rounds": rounds, "parameters": count}
        store("offload", {**sizes, "results": results, "overlap": overlap}, "torch", "deepspeed")


if __name__ == "__main__":
    main()
