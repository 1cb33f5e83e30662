"""Techniques x layouts on 2, 4 and 8 simulated GPUs: the numbers of one CPU process to 1e-10, no race, no deadlock of NCCL."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.verify.parity import Trace, compare, worst
from tests.covers import cover
from tests.parity import pipelines, tensor_parallel
from tests.parity.digests import digest
from tests.parity.pipelines import SCHEDULES
from tests.pool import Pool
from tests.simulated_device.pool import SimulatedPool
from tests.simulated_device.runs import STATES, TECHNIQUES, config_of, fits, in_stages, moved, on_axes, resumed, steps_taken

AXES = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4), (1, 8)]
"""(tp, dp)."""


def _on_axes() -> list[Any]:
    rows = product(AXES, (0, 1, 2, 3), TECHNIQUES, STATES)
    found = [(tp, dp, stage, technique, states) for (tp, dp), stage, technique, states in rows if fits(tp, dp, stage, technique, states)]
    return sorted(found, key=lambda row: row[0] * row[1])


@pytest.mark.parametrize(
    ("tp", "dp", "stage", "technique", "states"),
    cover(
        _on_axes(),
        strength=1,  # every layout at every stage, and every technique once with, once without states to shard
        features=lambda tp, dp, stage, technique, states: ((tp, dp, stage) if tp * dp < 8 else 8, (technique, stage > 0), (states, stage)),
        cost=lambda tp, dp, *_: tp * dp,
        name=lambda tp, dp, stage, technique, states: f"tp{tp}-dp{dp}-zero{stage}-{technique}-{states}".replace(" ", "_"),
    ),
)
def test_axes(simulated: SimulatedPool, tp: int, dp: int, stage: int, technique: str, states: str) -> None:
    """Tensor and data parallelism, ZeRO, recomputation, offload, the composed all-reduces."""
    config = on_axes(tp, dp, stage, technique, states)
    tensor_parallel.check(simulated, tp * dp, "llama", technique != "chunks of the loss", config)  # type: ignore[arg-type]


STAGES = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)]
"""(pp, tp, dp)."""
IN_STAGES = ("plain", "recompute", "activations on the host", "half of them")


def _in_stages(layouts: list[tuple[int, int, int]], strength: int) -> list[Any]:
    return cover(
        [
            (schedule, pp, tp, dp, stage, technique)
            for (pp, tp, dp), schedule, stage, technique in product(layouts, SCHEDULES, (0, 1, 2, 3), IN_STAGES)
            if stage == 0 or dp > 1
        ],
        strength=strength,
        features=lambda schedule, pp, tp, dp, stage, technique: ((schedule, pp, tp, dp), technique, (pp, tp, dp, stage)),
        cost=lambda schedule, pp, tp, dp, *_: pp * tp * dp,
        name=lambda *row: "-".join(map(str, row)).replace(" ", "_"),
    )


BY_STAGES = ("schedule", "pp", "tp", "dp", "stage", "technique")


@pytest.mark.parametrize(BY_STAGES, _in_stages([layout for layout in STAGES if layout[1:] == (1, 1)], 1))
def test_stages(simulated: SimulatedPool, schedule: str, pp: int, tp: int, dp: int, stage: int, technique: str) -> None:
    """Every schedule of a pipeline, with the order in which NCCL carries out messages."""
    pipelines.check(simulated, pp * tp * dp, "llama", True, in_stages(schedule, pp, tp, dp, stage, technique))  # type: ignore[arg-type]


@pytest.mark.proof
@pytest.mark.parametrize(BY_STAGES, _in_stages([layout for layout in STAGES if layout[1:] != (1, 1)], 1))
def test_stages_of_several_ranks(simulated: SimulatedPool, schedule: str, pp: int, tp: int, dp: int, stage: int, technique: str) -> None:
    """With tensor and data parallelism, and ZeRO."""
    pipelines.check(simulated, pp * tp * dp, "llama", True, in_stages(schedule, pp, tp, dp, stage, technique))  # type: ignore[arg-type]


@pytest.mark.proof
def test_eight_devices(simulated: SimulatedPool) -> None:
    """All axes at once."""
    pipelines.check(simulated, 8, "llama", True, in_stages("1f1b", 2, 2, 2, 3, "plain"))  # type: ignore[arg-type]


COMPRESSED = {
    "stage 0 int8": (0, {"compress_gradients": "int8"}),
    "stage 0 powersgd": (0, {"compress_gradients": "powersgd"}),
    "stage 2 int4 with feedback": (2, {"compress_gradients": "int4", "error_feedback": True}),
    "stage 3 weights": (3, {"compress_gradients": "int8", "compress_weights": "int8"}),
}


def _close(one: Trace, other: Trace, bar: float) -> None:
    difference = worst(compare(one, other))
    assert difference.ok(bar), f"{difference.name}: {difference.error}"


@pytest.mark.parametrize("way", COMPRESSED)
def test_compression_over_a_resume(simulated: SimulatedPool, pool: Pool, way: str, tmp_path: Path) -> None:
    """The same steps to the bit from a checkpoint, residuals on the device; and those of the CPU, whose sums are in another order."""
    stage, parallel = COMPRESSED[way]
    config = config_of(2, stage, parallel=parallel)
    straight, again, kinds = simulated.run(2, resumed, config, str(tmp_path / "device"), torch.float32)[0]
    assert digest(straight) == digest(again)
    assert kinds[0] == kinds[1]
    assert "cuda" in kinds[0].values() or stage == 3
    _close(pool.run(2, resumed, config, str(tmp_path / "cpu"), torch.float32)[0][0], straight, 0.1)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.proof), 3])
def test_checkpoints(simulated: SimulatedPool, states: str, stage: int, tmp_path: Path) -> None:
    """The same steps to the bit, with states on the device and on the host."""
    config = config_of(2, stage, parallel={}, zero=STATES[states])
    straight, again, _ = simulated.run(2, resumed, config, str(tmp_path), torch.float64)[0]
    assert digest(straight) == digest(again)


def test_a_checkpoint_on_another_layout(simulated: SimulatedPool, tmp_path: Path) -> None:
    """From ZeRO 3 to a pipeline."""
    saving = config_of(2, 3, parallel={})
    loading = {**in_stages("1f1b", 2, 1, 1, 0, "plain"), "gradient_accumulation_steps": 4}
    for one, other in simulated.run(2, moved, saving, loading, str(tmp_path)):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("technique", ["plain", "activations on the host"])
def test_copies_overlap(simulated: SimulatedPool, technique: str) -> None:
    """A step asks for no copy that blocks the host but where it has to know a number, batches come from pinned memory, and what was pinned
    for the engine is free when it is closed."""
    found = simulated.run(1, steps_taken, config_of(1, 0, parallel=TECHNIQUES[technique]), 3)[0]
    assert found["copies"]["pageable"] == 0
    assert found["copies"]["deferred"] >= 2 * 3
    assert found["pinned"][2] <= found["pinned"][0], found["pinned"]
