"""Warnings before the first step about settings that are valid but probably not intended."""

from __future__ import annotations

from plait.config.resolving.resolve import Resolved

WARMUP_PARAMETERS = ("warmup_num_steps", "num_warmup_steps")
"""Names of the warm-up steps in schedulers of DeepSpeed and of Transformers."""


def cautions(resolved: Resolved, *, processes: int, cores: int, on_gpus: bool) -> list[str]:
    """Return one line per questionable setting.

    Args:
        resolved: Configuration of the run.
        processes: Number of processes on this machine.
        cores: Number of CPU cores of this machine.
        on_gpus: Whether the processes compute on GPUs.
    """
    lines = []
    steps = resolved.run.steps
    warmup_steps = _warmup_steps(resolved)
    if warmup_steps >= steps:
        assert resolved.scheduler is not None
        lines.append(
            f"scheduler {resolved.scheduler.type} warms up for {warmup_steps:,} steps and the run"
            f" has {steps:,}: its full learning rate is never reached; lower the warm-up below"
            f" {steps:,}, or raise run.steps"
        )

    if not on_gpus and processes > 2 * cores:
        lines.append(
            f"{processes} processes share {cores} cores and no GPU: each step takes about"
            f" {processes / cores:.0f} times as long as with one process per core; lower"
            " --nproc-per-node, or run.processes and the degrees in parallel"
        )
    return lines


def _warmup_steps(resolved: Resolved) -> int:
    if resolved.scheduler is None:
        return 0
    values = [resolved.scheduler.params.get(name) for name in WARMUP_PARAMETERS]
    return max((value for value in values if isinstance(value, int)), default=0)
