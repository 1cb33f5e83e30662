"""Time of an AdamW step on the host, with gradients and states in memory and in files.

    python -m benchmarks.offload [--quick]

It compares torch's fused kernel in memory, Plait's step over files, and DeepSpeedCPUAdam if it is
installed. Rounds are interleaved in one process with one thread, ratios are taken within a round,
and the parameters are compared afterwards.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.command import command
from benchmarks.common.report import store
from benchmarks.common.statistics import paired_ratio, spread
from plait.optim.disk_optimizer import DiskTier
from plait.parallel.offload.arena import Arena

MEMORY = Path("/dev/shm")
TENSORS = 16
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[], object]


def parameters(count: int) -> nn.ParameterList:
    """Return `count` numbers in equal tensors, with gradients."""
    generator = torch.Generator().manual_seed(0)
    module = nn.ParameterList()
    for _ in range(TENSORS):
        numbers, gradient = torch.randn(2, count // TENSORS, generator=generator)
        parameter = nn.Parameter(numbers.clone())
        parameter.grad = gradient.clone()
        module.append(parameter)
    return module


def torch_fused(module: nn.ParameterList, folder: Path) -> Step:
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
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    step: Step = DeepSpeedCPUAdam(list(module.parameters()), adamw_mode=True, **ADAMW).step
    return step


def time_optimizers(count: int, rounds: int) -> dict[str, Any]:
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
        difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
        print(
            f"{name:24s} {rate.median:7.1f} M parameters/s, time / torch's {ratio.median:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f}), largest difference {difference:.1e}"
        )
        results[name] = {
            "million_parameters_per_second": asdict(rate),
            "time_to_torch": asdict(ratio),
            "largest_difference": difference,
        }
    return results


def main() -> None:
    quick = command("offload", __doc__).parse_args().quick
    torch.set_num_threads(1)
    count, rounds = (1_000_000, 2) if quick else (16_000_000, 15)
    results = time_optimizers(count, rounds)
    if not quick:
        content = {"rounds": rounds, "parameters": count, "results": results}
        store("offload", content, "torch", "deepspeed")


if __name__ == "__main__":
    main()
