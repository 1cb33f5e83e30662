"""Collectives that gather into, or scatter out of, one contiguous tensor.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`. The arguments stayed the same.
"""

from __future__ import annotations

import torch.distributed as dist

if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor
