"""AdamW steps over the same parameters and gradients, one baseline each: a function that makes it and returns its step.

All have float32 parameters, gradients and two states, and the same hyperparameters. Files are in `folder`: put it on a memory file system
to see what the walk itself costs, on a disk to see what the disk adds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from plait.optim.disk_optimizer import DiskTier
from plait.parallel.offload.arena import Arena

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
Step = Callable[[], None]


def parameters(count: int, tensors: int) -> nn.ParameterList:
    """`count` numbers in equal tensors."""
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList(
        nn.Parameter(torch.randn(count // tensors, generator=generator)) for _ in range(tensors)
    )


def _gradients(module: nn.ParameterList) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def torch_fused(module: nn.ParameterList) -> Step:
    """torch's fused AdamW, all in memory."""
    _gradients(module)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    return lambda: optimizer.step() and None


def plait_files(module: nn.ParameterList, folder: Path, *, buffer_bytes: int) -> Step:
    """The same optimizer, its gradients and states in files, iterated over."""
    tier = DiskTier(Arena(folder), buffer_bytes=buffer_bytes)
    tier.adopt(module, states=2)
    _gradients(module)
    for parameter in module:
        place = tier._gradients[parameter]
        assert parameter.grad is not None
        parameter.grad = place.copy_(parameter.grad)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    tier.drive(optimizer)
    return lambda: optimizer.step() and None


def deepspeed_cpu_adam(module: nn.ParameterList) -> Step:
    """DeepSpeed's compiled CPU Adam. Raises ImportError without DeepSpeed."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    _gradients(module)
    optimizer = DeepSpeedCPUAdam(
        list(module.parameters()), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True
    )
    return lambda: optimizer.step() and None
