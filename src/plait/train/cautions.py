"""Warnings before the first step about settings that are valid but probably not intended."""

from __future__ import annotations

from plait.config.resolving.resolve import Resolved

WARM_UP = ("warmup_num_steps", "num_warmup_steps")
"""DeepSpeed's name and Transformers'."""


def cautions(resolved: Resolved, *, processes: int, cores: int, on_gpus: bool) -> list[str]:
    """One line each. `processes` and `cores` are this machine's."""
    found = []
    steps = resolved.run.steps
    warm_up = _warm_up(resolved)
    if warm_up >= steps:
        assert resolved.scheduler is not None
        found.append(
            f"scheduler {resolved.scheduler.type} warms up for {warm_up:,} steps and the run has"
            f" {steps:,}: its full learning rate is never reached; lower the warm-up below"
            f" {steps:,}, or raise run.steps"
        )
    if not on_gpus and processes > 2 * cores:
        found.append(
            f"{processes} processes share {cores} cores and no GPU: each step takes about"
            f" {processes / cores:.0f} times as long as with one process a core; lower"
            " --nproc-per-node, or run.processes and the degrees in parallel"
        )
    return found


def _warm_up(resolved: Resolved) -> int:
    params = resolved.scheduler.params if resolved.scheduler is not None else {}
    given = [params[name] for name in WARM_UP if isinstance(params.get(name), int)]
    return max(given, default=0)
