"""How fast this process multiplies and adds, while all processes of the run do the same.
Collective, and it looks at a clock.

Rounds of all operations in turn, and the median of each, as `comm.measure` does for collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from plait.cluster import accelerator

_ROUNDS = 7


def measure_products(
    shapes: list[tuple[int, int, int]], *, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """FLOP/s of [rows, inner] x [inner, columns] for every (rows, inner, columns): that of the
    slowest rank.
    """
    operations: dict[str, Callable[[], object]] = {}
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, dtype=dtype, device=device)
        right = torch.randn(inner, columns, dtype=dtype, device=device)
        operations[f"{rows} x {inner} x {columns}"] = partial(torch.mm, left, right)
    seconds = _seconds(operations, device)
    return {
        name: 2.0 * rows * inner * columns / seconds[name]
        for name, (rows, inner, columns) in zip(seconds, shapes, strict=True)
    }


def measure_addition(nbytes: int, *, device: torch.device) -> float:
    """Bytes/s of an addition of two float32 tensors of `nbytes`: both read, the sum written. Of the
    slowest rank.
    """
    left, right = (torch.ones(nbytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 3.0 * nbytes / _seconds({"add": partial(torch.add, left, right, out=out)}, device)["add"]


def _seconds(operations: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(_ROUNDS):
        for name, operation in operations.items():
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            operation()
            accelerator.synchronize(device)
            times[name].append(time.perf_counter() - began)
    medians = torch.tensor(
        [median(found[1:]) for found in times.values()], dtype=torch.float64, device=device
    )
    if dist.is_initialized():
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))
