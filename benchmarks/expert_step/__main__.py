"""Starts the processes of `baselines`. Run: python -m benchmarks.expert_step [rounds] [tokens]"""

from __future__ import annotations

import sys

import torch.multiprocessing as mp

from benchmarks.expert_step.baselines import RANKS, worker

if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    mp.spawn(
        worker,
        args=(given[0] if given else 15, given[1] if len(given) > 1 else 2048, 29657),
        nprocs=RANKS,
    )  # type: ignore[no-untyped-call]
