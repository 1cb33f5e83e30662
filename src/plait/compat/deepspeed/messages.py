"""`deepspeed.utils.logger` and `log_dist`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

logger = logging.getLogger("plait.compat.deepspeed")
"""Of the script's own messages; Plait writes none to it. INFO and above go to the standard output,
as DeepSpeed's do.
"""
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on `ranks`, on all of them where the first is -1. Before there is a process group, every
    process logs.
    """
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank == -1 or (ranks and (ranks[0] == -1 or rank in ranks)):
        logger.log(level, f"[Rank {rank}] {message}")
