"""Reduce-scatter for gloo as an all-to-all and a local sum: the same bytes on the wire, less than half the time of gloo's own (measured
at 4 to 16 MB on 2 and 4 ranks of one machine). Plugged into `fully_shard` through its custom reduce-scatter; NCCL keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from plait._torch import ReduceScatter


class AllToAllReduceScatter(ReduceScatter):
    """Sums in the order of the ranks, so every run gives the same bits."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`input_tensor` [ranks x n] to `output_tensor` [n]; `op` is SUM or AVG. Done when it returns."""
        ranks = group.size()
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(ranks, -1), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)
        elif op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"reduce-scatter by {op}")
