"""Times of several ways to compute one training step, in the same processes, round by round."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parents[1] / "results"
AGREE = 1e-3
"""Relative difference of losses in float32 below which two ways compute the same step."""


def side_by_side(
    steps: Mapping[str, Callable[[], float]], name: str, *, rounds: int, tokens: int
) -> None:
    """Run every way `rounds` times, the first one as the baseline; rank 0 prints and writes `results/NAME.json`. Collective. Raises
    ValueError where losses differ."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    for index in range(rounds + 1):
        losses = {}
        for way, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            losses[way] = step()
            if index:  # the first one warms up
                times[way].append(time.perf_counter() - began)
        expected = next(iter(losses.values()))
        if any(abs(loss - expected) > AGREE * abs(expected) for loss in losses.values()):
            raise ValueError(f"the losses of round {index} differ: {losses}")
    if dist.get_rank():
        return
    baseline, results = next(iter(times.values())), {}
    for way, values in times.items():
        ratios = [ours / theirs for ours, theirs in zip(values, baseline, strict=True)]
        results[way] = {
            "milliseconds": round(1e3 * statistics.median(values), 1),
            "ratio": round(statistics.median(ratios), 3),
        }
        print(f"{way:18s} {results[way]}")
    document = {
        "rounds": rounds,
        "tokens": tokens,
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "results": results,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
