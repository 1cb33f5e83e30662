"""From the degrees that a file gives to a Layout: processes that pp, cp and tp do not take become
data parallel.

ZeRO stage 0 replicates (`dp_replicate`), stages 1 to 3 shard (`dp_shard`); both together are hybrid
sharding.
"""

from __future__ import annotations

from math import gcd, prod

from plait.cluster.layout import Layout
from plait.config.schema.config import ParallelSection
from plait.errors import ConfigError, Problem

PLANNED = (
    "parallel.tp",
    "parallel.pp",
    "parallel.sequence_parallel",
    "parallel.recompute.mode",
    "zero_optimization.stage",
)
"""Fields of a file that may say "auto" where a plan answers it, which `plait train` and `plait
plan` make.
"""


def solve_layout(parallel: ParallelSection, *, stage: int, world_size: int) -> Layout:
    """The layout of `world_size` processes. Raises ConfigError with the numbers and what works."""
    model = parallel.pp * parallel.cp * parallel.tp
    if world_size % model:
        below = world_size // model * model
        above = (world_size // model + 1) * model
        product = f"pp {parallel.pp} x cp {parallel.cp} x tp {parallel.tp} = {model}"
        rule = (
            f"{product} and {world_size} % {model} = {world_size % model}"
            if below
            else f"{product}, more than {processes(world_size)}"
        )
        working = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            Problem("parallel", None, rule, f"start {working} processes, or change a degree")
        )
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


def processes(count: int) -> str:
    """`1 process`, `2 processes`."""
    return f"{count} process" if count == 1 else f"{count} processes"


def smallest_world(parallel: ParallelSection) -> int:
    """The least number of processes that has every degree that is given."""
    data = [
        degree for degree in (parallel.dp_replicate, parallel.dp_shard) if isinstance(degree, int)
    ]
    stage = parallel.cp * parallel.tp * prod(data)
    more = parallel.ep // gcd(stage, parallel.ep) if len(data) < 2 else 1
    return parallel.pp * stage * more


def _data_degrees(
    parallel: ParallelSection, *, stage: int, dp: int, world_size: int
) -> tuple[int, int]:
    """(dp_replicate, dp_shard), whose product is `dp`."""
    replicate = parallel.dp_replicate if isinstance(parallel.dp_replicate, int) else None
    shard = parallel.dp_shard if isinstance(parallel.dp_shard, int) else None
    if stage == 0 and shard is not None and shard > 1:
        remedy = (
            f"set zero_optimization.stage to 1, 2 or 3, or parallel.dp_replicate to {shard} instead"
        )
        raise ConfigError(
            Problem(
                "parallel.dp_shard",
                shard,
                "zero_optimization.stage is 0, which shards nothing",
                remedy,
            )
        )
    if stage == 0:
        shard = 1
    if replicate is None and shard is None:
        replicate = 1
    if shard is None:
        shard = _remaining("dp_replicate", replicate or 1, dp, world_size)
    elif replicate is None:
        replicate = _remaining("dp_shard", shard, dp, world_size)
    assert replicate is not None
    if replicate * shard != dp:
        product = f"dp_replicate {replicate} x dp_shard {shard} = {replicate * shard}"
        rule = f"{product}, and {processes(world_size)} leave {dp} for data parallelism"
        left_out = "dp_replicate" if stage == 0 else "one of the two"
        remedy = f"start {processes(world_size // dp * replicate * shard)}, or leave {left_out} out"
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
    if dp % degree:
        works = [n for n in range(1, dp + 1) if dp % n == 0]
        shown = ", ".join(map(str, works if len(works) <= 12 else [*works[:6], "...", *works[-3:]]))
        rule = (
            f"{processes(world_size)} leave {dp} for data parallelism and {dp} % {degree} ="
            f" {dp % degree}"
        )
        remedy = (
            f"use {shown}, or start {world_size // dp * degree * max(1, dp // degree)} processes"
        )
        raise ConfigError(Problem(f"parallel.{name}", degree, rule, remedy))
    return dp // degree
