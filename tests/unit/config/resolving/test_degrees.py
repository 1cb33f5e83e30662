"""The product of the degrees is the number of processes; the rest becomes data parallel."""

import re

import hypothesis
import pytest
from hypothesis import strategies as st

from plait.cluster.layout import Layout
from plait.config.resolving.resolved_parts import smallest_world, solve_layout
from plait.config.schema.config import ParallelSection
from plait.errors import ConfigError
from tests.unit.config.cases import check_refusals, parse_settings

DEGREES = st.sampled_from([1, 2, 3, 4])
STAGES = st.sampled_from([1, 2, 3])


def solve(world_size, stage, **parallel):
    return solve_layout(ParallelSection(**parallel), stage=stage, world_size=world_size)


@hypothesis.given(DEGREES, DEGREES, DEGREES, DEGREES, DEGREES, STAGES)
def test_a_layout_follows_from_either_data_degree(pp, replicate, shard, cp, tp, stage):
    layout = Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    degrees = {"pp": pp, "cp": cp, "tp": tp}
    data_degrees = {"dp_replicate": replicate, "dp_shard": shard}
    if shard == 1 and replicate > 1:
        with pytest.raises(ConfigError, match="shards over dp_shard"):
            solve(layout.world_size, stage, **degrees, **data_degrees)
        return

    assert solve(layout.world_size, stage, **degrees, **data_degrees) == layout
    for name in data_degrees:
        for open_degree in (None, -1, "auto"):
            sizes = {**data_degrees, name: open_degree}
            assert solve(layout.world_size, stage, **degrees, **sizes) == layout


def alternatives(problem):
    """Yield the changes that a remedy names. "change a degree" names none."""
    for text in re.findall(r"use (\d[\d, ]*\d|\d)", problem.remedy):
        for degree in text.split(", "):
            yield {problem.field.removeprefix("parallel."): int(degree)}
    for counts in re.findall(r"start ([\d or]+) process", problem.remedy):
        for count in counts.split(" or "):
            yield {"world": int(count)}
    (removed,) = re.findall(r"leave (.*?) out", problem.remedy) or [""]
    if removed in ("both", "dp_shard and dp_replicate"):
        yield {"dp_replicate": None, "dp_shard": None}
    elif removed:
        for name in removed.split(" or "):
            yield {name: None}


OPTIONAL = st.none() | DEGREES


@hypothesis.given(
    st.integers(1, 24), st.integers(0, 3), DEGREES, DEGREES, DEGREES, OPTIONAL, OPTIONAL
)
@hypothesis.example(1, 1, 1, 1, 1, 2, 1)
@hypothesis.example(4, 1, 1, 2, 2, 2, None)
def test_every_alternative_of_a_refusal_works(world, stage, pp, cp, tp, replicate, shard):
    try:
        layout = solve(world, stage, pp=pp, cp=cp, tp=tp, dp_replicate=replicate, dp_shard=shard)
    except ConfigError as error:
        (problem,) = error.problems
        settings = {"world": world, "dp_replicate": replicate, "dp_shard": shard}
        for changes in alternatives(problem):
            changed = {**settings, **changes}
            solve(changed.pop("world"), stage, pp=pp, cp=cp, tp=tp, **changed)
    else:
        assert layout.world_size == world
        assert (layout.pp, layout.cp, layout.tp) == (pp, cp, tp)
        assert replicate in (None, layout.dp_replicate)
        assert shard in (None, layout.dp_shard)
        if stage == 0:
            assert layout.dp_shard == 1
        else:
            assert layout.dp_shard > 1 or layout.dp == 1


def test_the_stage_decides_what_remaining_processes_do():
    assert solve(8, 0, tp=2) == Layout(dp_replicate=4, tp=2)
    assert solve(8, 2, tp=2) == Layout(dp_shard=4, tp=2)
    assert solve(8, 3, dp_replicate=2) == Layout(dp_replicate=2, dp_shard=4)
    assert solve(1, 3) == Layout()
    assert solve(3, 0, dp_replicate="auto", dp_shard=-1) == Layout(dp_replicate=3)


REFUSALS = """
    world_size=6 stage=0 tp=4 -> parallel: pp 1 x cp 1 x tp 4 = 4 and 6 % 4 = 2; \
        start 4 or 8 processes, or change a degree
    world_size=2 stage=0 tp=2 pp=2 -> parallel: pp 2 x cp 1 x tp 2 = 4, more than 2 processes; \
        start 4 processes, or change a degree
    world_size=8 stage=2 tp=3 dp_shard=2 -> 8 % 3 = 2; start 6 or 12 processes, or change a degree
    world_size=8 stage=2 tp=3 dp_replicate=2 dp_shard=2 \
        -> 8 % 3 = 2; start 12 processes, or change a degree
    world_size=13 stage=2 tp=3 dp_replicate=2 \
        -> 13 % 3 = 1; start 12 or 18 processes, or change a degree
    world_size=8 stage=0 tp=3 dp_replicate=2 -> 8 % 3 = 2; start 6 processes, or change a degree
    world_size=8 stage=2 tp=3 ep=2 -> 8 % 3 = 2; start 6 or 12 processes, or change a degree
    world_size=8 stage=0 tp=3 dp_shard=2 -> 8 % 3 = 2; change a degree
    world_size=1 stage=2 dp_shard=2 -> parallel.dp_shard = 2: \
        1 process leaves 1 for data parallelism and 1 % 2 = 1; use 1, or start 2 processes
    world_size=1 stage=2 dp_replicate=2 dp_shard=2 -> parallel: dp_replicate 2 x dp_shard 2 = 4, \
        but 1 process leaves 1 for data parallelism; start 4 processes, or leave both out
    world_size=8 stage=2 dp_shard=3 -> parallel.dp_shard = 3: \
        8 processes leave 8 for data parallelism and 8 % 3 = 2; use 2, 4, 8, or start 6 processes
    world_size=8 stage=2 dp_shard=2 dp_replicate=2 -> parallel: dp_replicate 2 x dp_shard 2 = 4, \
        ... start 4 processes, or leave dp_replicate or dp_shard out
    world_size=4 stage=0 dp_shard=2 -> parallel.dp_shard = 2: zero_optimization.stage is 0, which \
        shards nothing; set zero_optimization.stage to 1, 2 or 3, \
        or leave dp_shard and dp_replicate out (dp_replicate becomes 4)
    world_size=4 stage=1 dp_replicate=4 -> parallel.dp_shard = 1: zero_optimization.stage is 1, \
        which shards over dp_shard, but dp_replicate takes all 4 data-parallel processes; \
        leave dp_shard and dp_replicate out (dp_shard becomes 4), \
        or set zero_optimization.stage to 0
    world_size=4 stage=0 dp_replicate=2 -> parallel: dp_replicate 2 x dp_shard 1 = 2, \
        but 4 processes leave 4 for data parallelism; start 2 processes, or leave dp_replicate out
"""


def test_refusals_have_the_numbers_and_the_remedy():
    check_refusals(REFUSALS, lambda text: solve(**parse_settings(text)))


def test_the_smallest_world_has_the_degrees_of_the_file():
    assert smallest_world(ParallelSection()) == 1
    assert smallest_world(ParallelSection(tp=4, pp=2, dp_shard="auto")) == 8
    assert smallest_world(ParallelSection(dp_replicate=2, dp_shard=3)) == 6
