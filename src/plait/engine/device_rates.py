"""Rates of matrix products and of memory, while all processes of the run compute.

Collective. All operations are timed in turn, for several rounds, and the median of each counts, as
in `comm.measure`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.small_messages import max_over_ranks

_ROUNDS = 7


def measure_products(
    shapes: list[tuple[int, int, int]], *, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Return the FLOP/s of matrix products on the slowest rank. Collective.

    Args:
        shapes: (rows, inner, columns) of each product [rows, inner] x [inner, columns].
        dtype: Dtype of the matrices.
        device: Device of this rank.

    Returns:
        FLOP/s, keyed by a text such as "2048 x 2048 x 2048".
    """
    operations: dict[str, Callable[[], object]] = {}
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, dtype=dtype, device=device)
        right = torch.randn(inner, columns, dtype=dtype, device=device)
        operations[f"{rows} x {inner} x {columns}"] = partial(torch.mm, left, right)
    seconds = _time_operations(operations, device)
    return {
        name: 2.0 * rows * inner * columns / seconds[name]
        for name, (rows, inner, columns) in zip(seconds, shapes, strict=True)
    }


def measure_addition(nbytes: int, *, device: torch.device) -> float:
    """Return the bytes/s of an addition on the slowest rank. Collective.

    Args:
        nbytes: Size of each of the two float32 tensors that are read, and of the one written.
        device: Device of this rank.
    """
    left, right = (torch.ones(nbytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _time_operations({"add": partial(torch.add, left, right, out=out)}, device)
    return 3.0 * nbytes / seconds["add"]


def _time_operations(
    operations: dict[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each operation on the slowest rank. Collective."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(_ROUNDS):
        for name, operation in operations.items():
            # All processes compute at the same time, as in a training step.
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            operation()
            accelerator.synchronize(device)
            times[name].append(time.perf_counter() - start)

    # The first round selects kernels and allocates memory.
    medians = [median(rounds[1:]) for rounds in times.values()]
    # A step waits for the slowest rank.
    slowest = max_over_ranks(medians, dist.group.WORLD, device=device)
    return dict(zip(times, slowest, strict=True))
