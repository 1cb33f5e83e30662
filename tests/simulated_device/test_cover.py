"""Techniques and layouts on simulated GPUs equal one CPU process, without races and deadlocks."""

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
    rows = [(*axes, *others) for axes, *others in product(AXES, (0, 1, 2, 3), TECHNIQUES, STATES)]
    return sorted((row for row in rows if fits(*row)), key=lambda row: row[0] * row[1])


def _axes_features(tp, dp, stage, technique, states):
    """Return the settings that have to meet.

    Every layout of up to four devices has every stage, and every technique runs once with and once
    without sharded states.
    """
    layout = (tp, dp, stage) if tp * dp < 8 else 8
    return layout, (technique, stage > 0), (states, stage)


def _axes_name(tp, dp, stage, technique, states):
    return f"tp{tp}-dp{dp}-zero{stage}-{technique}-{states}".replace(" ", "_")


@pytest.mark.parametrize(
    ("tp", "dp", "stage", "technique", "states"),
    cover(
        _on_axes(),
        strength=1,
        features=_axes_features,
        cost=lambda tp, dp, *_: tp * dp,
        name=_axes_name,
    ),
)
def test_axes(simulated, row, tp, dp, stage, technique, states):
    config = on_axes(tp, dp, stage, technique, states)
    tied = technique != "chunks of the loss"
    world = tp * dp
    error = tensor_parallel.check(simulated, world, "llama", tied, config)
    row(f"tp {tp}, dp {dp}, ZeRO {stage}, {technique}; states {states}", CPU, error)


STAGES = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)]
"""(pp, tp, dp)."""
IN_STAGES = ("plain", "recompute", "activations on the host", "half of them")


def _in_stages(layouts):
    rows = []
    for (pp, tp, dp), schedule, *others in product(layouts, SCHEDULES, (0, 1, 2, 3), IN_STAGES):
        stage = others[0]
        if (stage == 0 or dp > 1) and (stage < 3 or not SPECS[schedule].splits_backward):
            rows.append((schedule, pp, tp, dp, *others))
    return cover(
        rows,
        strength=1,
        features=lambda schedule, pp, tp, dp, stage, technique: (
            (schedule, pp, tp, dp),
            technique,
            (pp, tp, dp, stage),
        ),
        cost=lambda schedule, pp, tp, dp, *_: pp * tp * dp,
        name=lambda *row: "-".join(map(str, row)).replace(" ", "_"),
    )


def test_replicas_with_states_on_the_host(simulated, row):
    """Gradients are summed over replicas, copied to the host, and freed."""
    config = on_axes(1, 4, 1, "plain", "on the host")
    assert config["parallel"]["dp_replicate"] == 2
    error = tensor_parallel.check(simulated, 4, "llama", True, config)
    row("dp 2 x 2, ZeRO 1; states on the host", CPU, error)


BY_STAGES = ("schedule", "pp", "tp", "dp", "stage", "technique")


@pytest.mark.parametrize(
    BY_STAGES, _in_stages([layout for layout in STAGES if layout[1:] == (1, 1)])
)
def test_stages(simulated, row, schedule, pp, tp, dp, stage, technique):
    _in_a_pipeline(simulated, row, schedule, pp, tp, dp, stage, technique)


def _in_a_pipeline(simulated, row, schedule, pp, tp, dp, stage, technique):
    config = in_stages(schedule, pp, tp, dp, stage, technique)
    world = pp * tp * dp
    error = pipelines.check(simulated, world, "llama", True, config)
    row(f"pp {pp} ({schedule}), tp {tp}, dp {dp}, ZeRO {stage}, {technique}", CPU, error)


@pytest.mark.wide
@pytest.mark.parametrize(
    BY_STAGES, _in_stages([layout for layout in STAGES if layout[1:] != (1, 1)])
)
def test_stages_of_several_ranks(simulated, row, schedule, pp, tp, dp, stage, technique):
    _in_a_pipeline(simulated, row, schedule, pp, tp, dp, stage, technique)


@pytest.mark.wide
def test_eight_devices(simulated, row):
    _in_a_pipeline(simulated, row, "1f1b", 2, 2, 2, 3, "plain")


COMPRESSED = {
    "stage 0 int8": (0, {"compress_gradients": "int8"}),
    "stage 0 powersgd": (0, {"compress_gradients": "powersgd"}),
    "stage 2 int4 with feedback": (2, {"compress_gradients": "int4", "error_feedback": True}),
    "stage 3 weights": (3, {"compress_gradients": "int8", "compress_weights": "int8"}),
}


def _close(actual, expected, tolerance):
    difference = worst(compare(actual, expected))
    assert difference.ok(tolerance), f"{difference.name}: {difference.error}"
    return difference.error


@pytest.mark.parametrize("name", COMPRESSED)
def test_compression_over_a_resume(simulated, pool, row, name, tmp_path):
    """A resumed run repeats the bits, with residuals on the device."""
    stage, parallel = COMPRESSED[name]
    config = config_of(2, stage, parallel=parallel)
    arguments = (config, str(tmp_path / "device"), torch.float32)
    straight, again, kinds = simulated.run(2, resumed, *arguments)[0]
    assert digest(straight) == digest(again)
    assert kinds[0] == kinds[1]
    assert "cuda" in kinds[0].values() or stage == 3
    # Sums have another order on the CPU, which compression amplifies.
    on_cpu, *_ = pool.run(2, resumed, config, str(tmp_path / "cpu"), torch.float32)[0]
    error = _close(on_cpu, straight, 0.1)
    row(f"dp 2, {name}, residuals over a resume", "the same on CPUs, in float32", error)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(
    ("stage", "asynchronous"),
    [
        pytest.param(1, False, marks=pytest.mark.wide),
        (3, False),
        pytest.param(3, True, marks=pytest.mark.wide),
    ],
)
def test_checkpoints(simulated, row, states, stage, asynchronous, tmp_path):
    """A resumed run repeats the bits."""
    if "parameters" in states and stage < 3:
        pytest.skip("parameters are offloaded where they are sharded")
    config = config_of(2, stage, parallel={}, zero=STATES[states])
    arguments = (config, str(tmp_path), torch.float64, asynchronous)
    straight, again, _ = simulated.run(2, resumed, *arguments)[0]
    assert digest(straight) == digest(again)
    kind = "beside the training" if asynchronous else "written at once"
    name = f"dp 2, ZeRO {stage}, checkpoint {kind}; states {states}"
    row(name, "without a resume", _close(straight, again, 0.0))


def test_checkpoint_of_zero_3_loads_in_a_pipeline(simulated, row, tmp_path):
    saving = config_of(2, 3, parallel={})
    loading = {**in_stages("1f1b", 2, 1, 1, 0, "plain"), "gradient_accumulation_steps": 4}
    losses = simulated.run(2, moved, saving, loading, str(tmp_path))
    largest = 0.0
    for saved, loaded in losses:
        assert saved == pytest.approx(loaded, rel=1e-9)
        errors = [abs(a / b - 1) for a, b in zip(saved, loaded, strict=True)]
        largest = max(largest, *errors)
    row("dp 2, ZeRO 3, its checkpoint on pp 2 (1f1b)", "the losses of the first layout", largest)


@pytest.mark.parametrize("technique", ["plain", "activations on the host"])
def test_copies_overlap(simulated, technique):
    """Copies do not block the host, batches are pinned, and a closed engine frees pinned memory."""
    report = simulated.run(1, steps_taken, config_of(1, 0, parallel=TECHNIQUES[technique]), 3)[0]
    assert report["copies"]["pageable"] == 0
    assert report["copies"]["deferred"] >= 2 * 3
    assert report["pinned"][2] <= report["pinned"][0], report["pinned"]
