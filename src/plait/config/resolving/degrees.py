"""Degrees of parallelism: from the degrees in a file to a Layout.

Processes that pp, cp and tp do not use become data-parallel. ZeRO stage 0 replicates
(`dp_replicate`), stages 1 to 3 shard (`dp_shard`); both degrees together are hybrid sharding.
"""

from __future__ import annotations

from math import gcd, prod

from plait.cluster.layout import Layout
from plait.config.schema.config import ParallelSection
from plait.errors import ConfigError, Problem

PLANNABLE_SETTINGS = (
    "parallel.tp",
    "parallel.pp",
    "parallel.sequence_parallel",
    "parallel.recompute.mode",
    "zero_optimization.stage",
)
"""Settings that may be "auto" in a file for `plait train` and `plait plan`, which replace it by the
result of a plan.
"""

_MAX_LISTED = 12
"""Maximum number of possible degrees that a message lists completely."""


def solve_layout(parallel: ParallelSection, *, stage: int, world_size: int) -> Layout:
    """Return the layout of `world_size` processes.

    Args:
        parallel: Degrees; those of data parallelism may be open.
        stage: ZeRO stage.
        world_size: Number of processes.

    Raises:
        ConfigError: The degrees do not fit the number of processes. The error names the numbers and
            possible values.
    """
    model = parallel.pp * parallel.cp * parallel.tp
    if world_size % model:
        product = f"pp {parallel.pp} x cp {parallel.cp} x tp {parallel.tp} = {model}"
        below = world_size // model * model
        above = below + model
        if below:
            rule = f"{product} and {world_size} % {model} = {world_size % model}"
            possible = f"{below} or {above}"
        else:
            rule = f"{product}, more than {format_processes(world_size)}"
            possible = f"{above}"
        remedy = f"start {possible} processes, or change a degree"
        raise ConfigError(Problem("parallel", None, rule, remedy))

    replicate, shard = _data_degrees(
        parallel, stage=stage, dp=world_size // model, world_size=world_size
    )
    return Layout(
        pp=parallel.pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
    )


def format_processes(count: int) -> str:
    """Return `1 process`, `2 processes` and so on."""
    if count == 1:
        return f"{count} process"
    return f"{count} processes"


def smallest_world(parallel: ParallelSection) -> int:
    """Return the smallest number of processes that satisfies all degrees that are given."""
    data = [
        degree for degree in (parallel.dp_replicate, parallel.dp_shard) if isinstance(degree, int)
    ]
    stage = parallel.cp * parallel.tp * prod(data)
    if len(data) == 2:
        return parallel.pp * stage
    # The open degree has to make the processes of a pipeline stage a multiple of ep.
    return parallel.pp * stage * (parallel.ep // gcd(stage, parallel.ep))


def _data_degrees(
    parallel: ParallelSection, *, stage: int, dp: int, world_size: int
) -> tuple[int, int]:
    """Return (dp_replicate, dp_shard), whose product is `dp`."""
    replicate = parallel.dp_replicate if isinstance(parallel.dp_replicate, int) else None
    shard = parallel.dp_shard if isinstance(parallel.dp_shard, int) else None
    if stage == 0:
        if shard is not None and shard > 1:
            rule = "zero_optimization.stage is 0, which shards nothing"
            remedy = (
                "set zero_optimization.stage to 1, 2 or 3, or parallel.dp_replicate to"
                f" {shard} instead"
            )
            raise ConfigError(Problem("parallel.dp_shard", shard, rule, remedy))
        # All data-parallel processes replicate.
        shard = 1

    # The open degree takes all processes; if both are open, ZeRO shards over all of them.
    if shard is None:
        replicate = replicate or 1
        shard = _remaining("dp_replicate", replicate, dp, world_size)
    elif replicate is None:
        replicate = _remaining("dp_shard", shard, dp, world_size)

    if replicate * shard != dp:
        product = f"dp_replicate {replicate} x dp_shard {shard} = {replicate * shard}"
        rule = f"{product}, and {format_processes(world_size)} leave {dp} for data parallelism"
        left_out = "dp_replicate" if stage == 0 else "one of the two"
        possible = format_processes(world_size // dp * replicate * shard)
        remedy = f"start {possible}, or leave {left_out} out"
        raise ConfigError(Problem("parallel", None, rule, remedy))
    if stage > 0 and shard == 1 and dp > 1:
        rule = (
            f"zero_optimization.stage is {stage}, which shards over dp_shard, and all {dp}"
            " data-parallel processes are dp_replicate"
        )
        remedy = (
            f"leave dp_shard and dp_replicate out (dp_shard becomes {dp}), or set"
            " zero_optimization.stage to 0"
        )
        raise ConfigError(Problem("parallel.dp_shard", 1, rule, remedy))
    return replicate, shard


def _remaining(name: str, degree: int, dp: int, world_size: int) -> int:
    """Return the other degree of data parallelism, where `degree` is that of `name`."""
    if dp % degree == 0:
        return dp // degree

    divisors = [str(number) for number in range(1, dp + 1) if dp % number == 0]
    if len(divisors) > _MAX_LISTED:
        divisors = [*divisors[:6], "...", *divisors[-3:]]
    rule = (
        f"{format_processes(world_size)} leave {dp} for data parallelism and {dp} % {degree} ="
        f" {dp % degree}"
    )
    possible = world_size // dp * degree * max(1, dp // degree)
    remedy = f"use {', '.join(divisors)}, or start {possible} processes"
    raise ConfigError(Problem(f"parallel.{name}", degree, rule, remedy))
