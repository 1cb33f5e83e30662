"""Techniques x layouts on 2, 4 and 8 simulated GPUs: the numbers of one CPU process to 1e-10, no race, no deadlock of NCCL."""

from itertools import product

import pytest
import torch

from plait.parallel.schedules.schedule import SCHEDULES as SPECS
from plait.verify.parity import compare, worst
from tests.covers import cover
from tests.parity import pipelines, tensor_parallel
from tests.parity.digests import digest
from tests.parity.pipelines import SCHEDULES
from tests.simulated_device.runs import (
    STATES,
    TECHNIQUES,
    config_of,
    fits,
    in_stages,
    moved,
    on_axes,
    resumed,
    steps_taken,
)

CPU = "one process on the CPU"
AXES = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4), (1, 8)]
"""(tp, dp)."""


def _on_axes():
    rows = product(AXES, (0, 1, 2, 3), TECHNIQUES, STATES)
    found = [
        (tp, dp, stage, technique, states)
        for (tp, dp), stage, technique, states in rows
        if fits(tp, dp, stage, technique, states)
    ]
    return sorted(found, key=lambda row: row[0] * row[1])


@pytest.mark.parametrize(
    ("tp", "dp", "stage", "technique", "states"),
    cover(
        _on_axes(),
        strength=1,  # every layout at every stage, and every technique once with, once without states to shard
        features=lambda tp, dp, stage, technique, states: (
            (tp, dp, stage) if tp * dp < 8 else 8,
            (technique, stage > 0),
            (states, stage),
        ),
        cost=lambda tp, dp, *_: tp * dp,
        name=lambda tp, dp, stage, technique, states: (
            f"tp{tp}-dp{dp}-zero{stage}-{technique}-{states}".replace(" ", "_")
        ),
    ),
)
def test_axes(simulated, row, tp, dp, stage, technique, states):
    """Tensor and data parallelism, ZeRO, recomputation, offload, the composed all-reduces."""
    config = on_axes(tp, dp, stage, technique, states)
    found = tensor_parallel.check(
        simulated, tp * dp, "llama", technique != "chunks of the loss", config
    )  # type: ignore[arg-type]
    row(f"tp {tp}, dp {dp}, ZeRO {stage}, {technique}; states {states}", CPU, found)


STAGES = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)]
"""(pp, tp, dp)."""
IN_STAGES = ("plain", "recompute", "activations on the host", "half of them")


def _in_stages(layouts, strength):
    return cover(
        [
            (schedule, pp, tp, dp, stage, technique)
            for (pp, tp, dp), schedule, stage, technique in product(
                layouts, SCHEDULES, (0, 1, 2, 3), IN_STAGES
            )
            if stage == 0 or dp > 1
            if stage < 3 or not SPECS[schedule].splits_backward
        ],
        strength=strength,
        features=lambda schedule, pp, tp, dp, stage, technique: (
            (schedule, pp, tp, dp),
            technique,
            (pp, tp, dp, stage),
        ),
        cost=lambda schedule, pp, tp, dp, *_: pp * tp * dp,
        name=lambda *row: "-".join(map(str, row)).replace(" ", "_"),
    )


def test_replicas_with_states_on_the_host(simulated, row):
    """Gradients are summed over replicas, then copied to the host, then freed."""
    config = on_axes(1, 4, 1, "plain", "on the host")
    assert config["parallel"]["dp_replicate"] == 2
    found = tensor_parallel.check(simulated, 4, "llama", True, config)
    row("dp 2 x 2, ZeRO 1; states on the host", CPU, found)


BY_STAGES = ("schedule", "pp", "tp", "dp", "stage", "technique")


@pytest.mark.parametrize(
    BY_STAGES, _in_stages([layout for layout in STAGES if layout[1:] == (1, 1)], 1)
)
def test_stages(simulated, row, schedule, pp, tp, dp, stage, technique):
    """Every schedule of a pipeline, with the order in which NCCL carries out messages."""
    _in_a_pipeline(simulated, row, schedule, pp, tp, dp, stage, technique)


def _in_a_pipeline(simulated, row, schedule, pp, tp, dp, stage, technique):
    config = in_stages(schedule, pp, tp, dp, stage, technique)
    found = pipelines.check(simulated, pp * tp * dp, "llama", True, config)  # type: ignore[arg-type]
    row(f"pp {pp} ({schedule}), tp {tp}, dp {dp}, ZeRO {stage}, {technique}", CPU, found)


@pytest.mark.wide
@pytest.mark.parametrize(
    BY_STAGES, _in_stages([layout for layout in STAGES if layout[1:] != (1, 1)], 1)
)
def test_stages_of_several_ranks(simulated, row, schedule, pp, tp, dp, stage, technique):
    """With tensor and data parallelism, and ZeRO."""
    _in_a_pipeline(simulated, row, schedule, pp, tp, dp, stage, technique)


@pytest.mark.wide
def test_eight_devices(simulated, row):
    """All axes at once."""
    _in_a_pipeline(simulated, row, "1f1b", 2, 2, 2, 3, "plain")


COMPRESSED = {
    "stage 0 int8": (0, {"compress_gradients": "int8"}),
    "stage 0 powersgd": (0, {"compress_gradients": "powersgd"}),
    "stage 2 int4 with feedback": (2, {"compress_gradients": "int4", "error_feedback": True}),
    "stage 3 weights": (3, {"compress_gradients": "int8", "compress_weights": "int8"}),
}


def _close(one, other, bar):
    difference = worst(compare(one, other))
    assert difference.ok(bar), f"{difference.name}: {difference.error}"
    return difference.error


@pytest.mark.parametrize("way", COMPRESSED)
def test_compression_over_a_resume(simulated, pool, row, way, tmp_path):
    """The same steps to the bit from a checkpoint, residuals on the device; and those of the CPU, whose sums are in another order."""
    stage, parallel = COMPRESSED[way]
    config = config_of(2, stage, parallel=parallel)
    straight, again, kinds = simulated.run(
        2, resumed, config, str(tmp_path / "device"), torch.float32
    )[0]
    assert digest(straight) == digest(again)
    assert kinds[0] == kinds[1]
    assert "cuda" in kinds[0].values() or stage == 3
    found = _close(
        pool.run(2, resumed, config, str(tmp_path / "cpu"), torch.float32)[0][0], straight, 0.1
    )
    row(f"dp 2, {way}, residuals over a resume", "the same on CPUs, in float32", found)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(
    ("stage", "beside"),
    [
        pytest.param(1, False, marks=pytest.mark.wide),
        (3, False),
        pytest.param(3, True, marks=pytest.mark.wide),
    ],
)
def test_checkpoints(simulated, row, states, stage, beside, tmp_path):
    """The same steps to the bit, with states on the device and on the host, also where it is written beside the training."""
    if "parameters" in states and stage < 3:
        pytest.skip("parameters are offloaded where they are sharded")
    config = config_of(2, stage, parallel={}, zero=STATES[states])
    straight, again, _ = simulated.run(2, resumed, config, str(tmp_path), torch.float64, beside)[0]
    assert digest(straight) == digest(again)
    way = "beside the training" if beside else "written at once"
    row(
        f"dp 2, ZeRO {stage}, checkpoint {way}; states {states}",
        "without a resume",
        _close(straight, again, 0.0),
    )


def test_a_checkpoint_on_another_layout(simulated, row, tmp_path):
    """From ZeRO 3 to a pipeline."""
    saving = config_of(2, 3, parallel={})
    loading = {**in_stages("1f1b", 2, 1, 1, 0, "plain"), "gradient_accumulation_steps": 4}
    found = simulated.run(2, moved, saving, loading, str(tmp_path))
    for one, other in found:
        assert one == pytest.approx(other, rel=1e-9)
    most = max(abs(a / b - 1) for one, other in found for a, b in zip(one, other, strict=True))
    row("dp 2, ZeRO 3, its checkpoint on pp 2 (1f1b)", "the losses of the first layout", most)


@pytest.mark.parametrize("technique", ["plain", "activations on the host"])
def test_copies_overlap(simulated, technique):
    """A step asks for no copy that blocks the host but where it has to know a number, batches come from pinned memory, and what was pinned
    for the engine is free when it is closed."""
    found = simulated.run(1, steps_taken, config_of(1, 0, parallel=TECHNIQUES[technique]), 3)[0]
    assert found["copies"]["pageable"] == 0
    assert found["copies"]["deferred"] >= 2 * 3
    assert found["pinned"][2] <= found["pinned"][0], found["pinned"]
