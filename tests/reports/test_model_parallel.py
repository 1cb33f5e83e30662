"""Reports about pipelines, tensor and context parallelism, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from plait.verify.parity import Trace, compare, worst
from tests.covers import cover
from tests.parity import pipelines, tensor_parallel
from tests.reports import stages

SCHEDULES = ["1f1b", "zbv", "interleaved-zero-bubble"]
SPLIT = SCHEDULES[1:]
TOLERANCE = 1e-10


def staged(schedule, stage=0, **more):
    """A pipeline of two stages per replica, and two stages per rank where the schedule has them."""
    return pipelines.settings(stage, 4, schedule, pp=2, **more)


@dataclass(frozen=True)
class StageCase:
    """A public report about pipelines: the model, where it runs, what is refused or not right."""

    report: str
    kind: str
    schedules: list[str] = field(default_factory=lambda: SCHEDULES)
    stage: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    evaluate: bool = False
    refused: str = ""
    world: int = 2


STAGE_CASES = [
    StageCase("pytorch-170277", "chunks"),
    StageCase("pytorch-170416", "custom function"),
    StageCase("pytorch-185331", "hooks on inputs"),
    StageCase("pytorch-152827", "ignored inputs"),
    StageCase("pytorch-162822", "plain", evaluate=True),
    StageCase("pytorch-136766", "plain", more={"recompute": {"mode": "full"}}),
    StageCase("DeepSpeed-1045-stages", "parametrized"),
    StageCase("pytorch-33238-stages", "recurrent"),
    StageCase("pytorch-181832-stages", "in place"),
    StageCase("pytorch-144045-stages", "gates"),
    StageCase("ColossalAI-5185-stages", "experts"),
    StageCase("pytorch-153833", "attention"),
    StageCase("DeepSpeed-969", "three tensors"),
    StageCase("pytorch-130055", "ids for all blocks"),
    StageCase("accelerate-4171-stages", "shared across stages"),
    StageCase("pytorch-79171-stages", "unused head"),
    StageCase("Megatron-LM-656", "tied", [*SCHEDULES, "interleaved-1f1b"]),
    StageCase("Megatron-LM-844", "tied", stage=1, more={"dp_shard": 2}, world=4),
    StageCase("torchtitan-771", "plain", ["1f1b"], 3, {"dp_shard": 2}, world=4),
    StageCase("DeepSpeed-3900", "plain", ["gpipe"]),
]


@dataclass(frozen=True)
class TensorCase:
    """A public report about tensor or context parallelism on a model of Transformers."""

    report: str
    parallel: dict[str, Any]
    stage: int = 0
    frozen: tuple[str, ...] = ()
    tied: bool = False
    world: int = 2
    refused: str = ""


TENSOR_CASES = [
    TensorCase("Megatron-LM-1446", {"tp": 2, "sequence_parallel": True}),
    TensorCase("pytorch-134050", {"tp": 2}, frozen=("layers.0",)),
    TensorCase("torchtune-2420", {"tp": 2, "dp_shard": 2}, 3, world=4),
    TensorCase("torchtitan-2318", {"tp": 1, "dp_replicate": 2, "dp_shard": 2}, 3, world=4),
    TensorCase(
        "verl-7493",
        {"dp_replicate": 2, "dp_shard": 1},
        3,
        refused="leave dp_shard and dp_replicate out (dp_shard becomes 2)",
    ),
    TensorCase("Megatron-LM-1464", {"cp": 2, "context": "ring"}),
    TensorCase("Megatron-LM-656-tp", {"tp": 2, "sequence_parallel": True}, tied=True),
    TensorCase("AReaL-335", {"tp": 2, "sequence_parallel": True}, frozen=("q_norm", "embed")),
    TensorCase("torchtitan-771-cp", {"cp": 2, "pp": 2, "context": "ring"}, world=4),
]


def stage_runs():
    """Every case on each of its schedules. Most are marked proof."""
    rows = [(case, schedule) for case in STAGE_CASES for schedule in case.schedules]
    return cover(
        rows,
        features=lambda case, schedule: (schedule in SPLIT, case.world),
        cost=lambda case, schedule: case.world,
        name=lambda case, schedule: f"{case.report}-{schedule}",
    )


def tensor_runs():
    """Most are marked proof."""
    return cover(
        TENSOR_CASES,
        features=lambda case: ("cp" in case.parallel,),
        strength=1,
        cost=lambda case: case.world,
        name=lambda case: case.report,
    )


@cache
def wanted_of(kind, count):
    return stages.plainly(kind, count)


def with_zeros(trace):
    """A stage without a gradient of its inputs sends zeros where one process has None."""
    filled = [
        {n: torch.zeros_like(trace.parameters[n]) if t is None else t for n, t in step.items()}
        for step in trace.gradients
    ]
    return replace(trace, gradients=tuple(filled))


@pytest.mark.parametrize(("case", "schedule"), stage_runs())
def test_report_of_pipelines(pool, case, schedule):
    """Losses, norms, gradients and weights are those of one process."""
    config = staged(schedule, case.stage, **case.more)
    arguments = (case.kind, config, case.evaluate)
    actual = pool.run(case.world, stages.train, *arguments, timeout=90)
    if case.refused:
        assert all(isinstance(a, str) and case.refused in a for a in actual), actual
        return
    assert isinstance(actual[0], Trace), actual[0]
    expected = wanted_of(case.kind, stages.micro_batches(config))
    difference = worst(compare(with_zeros(expected), with_zeros(actual[0])))
    assert difference.ok(TOLERANCE), f"{difference.name}: {difference.error}"


@pytest.mark.parametrize("case", tensor_runs())
def test_report_of_tensors(pool, case):
    """A Qwen 3 with norms per head, clipped."""
    config = tensor_parallel.settings(1, 1, case.stage, 1, 2)
    config["parallel"] = case.parallel
    arguments = (case.frozen, case.tied, config)
    actual = pool.run(case.world, stages.train_family, *arguments, timeout=90)
    if case.refused:
        assert all(isinstance(a, str) and case.refused in a for a in actual), actual
        return
    assert isinstance(actual[0], Trace), actual[0]
    expected = stages.family_plainly(case.frozen, case.tied, stages.micro_batches(config))
    difference = worst(compare(expected, actual[0]))
    assert difference.ok(TOLERANCE), f"{difference.name}: {difference.error}"


@pytest.mark.proof
@pytest.mark.parametrize("accumulation", [1, 2])
def test_report_torchtitan_4332(pool, accumulation):
    """The bias behind a row-wise layer gets its full gradient on every rank."""
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    config = tensor_parallel.settings(2, 2, 0, 1, accumulation, False, plan=plan)
    actual = pool.run(2, stages.train, "rowwise bias", config, False, timeout=90)
    assert isinstance(actual[0], Trace), actual[0]
    expected = wanted_of("rowwise bias", stages.micro_batches(config))
    difference = worst(compare(expected, actual[0]))
    assert difference.ok(TOLERANCE), f"{difference.name}: {difference.error}"
