"""Optimizer states of 8 or 16 bits on every layout: numbers, checkpoints and the loss."""

from __future__ import annotations

from functools import cache
from itertools import product
from statistics import mean

import pytest
import torch

import plait
from plait.config.schema.optimization import OptimizerSpec
from plait.optim.optimizer import build_optimizer
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.covers import cover
from tests.parity import cases, tensor_parallel
from tests.parity import pipelines as pipeline
from tests.parity.data_parallel import assert_same, materialised, plain_trace
from tests.parity.digests import digest
from tests.parity.language import ADAMW, losses
from tests.parity.optimizers import optimizer
from tests.parity.refusals import message_of
from tests.parity.tensor_parallel import settings


@cache
def reference(states, micro_batches, layers=None, steps=2):
    """Train in one process on all micro-batches. With `layers`, as the pipeline's model."""
    if layers is None:
        model = materialised("wide", tied=True)
    else:
        model = cases.build("wide", tied=True, layers=layers)
        # The engine is only created for its initial weights.
        config = {"train_micro_batch_size_per_gpu": 2, "run": {"seed": pipeline.SEED}}
        plait.initialize(model, config).close()
    spec = OptimizerSpec(**optimizer(states))
    return plain_trace(
        model,
        cases.steps_for("wide", micro_batches, steps=steps),
        optimizer=lambda _: build_optimizer(spec, model.named_parameters()),
    )


LAYOUTS = [
    (1, 1, 3, 1, 2),
    (2, 1, 0, 1, 1),
    (3, 1, 1, 1, 2),
    (4, 1, 2, 2, 1),
    (4, 1, 3, 1, 3),
    (2, 2, 0, 1, 2),
    (4, 2, 1, 1, 1),
    (4, 2, 3, 1, 2),
]
"""(ranks, tp, ZeRO stage, replicas, accumulation)."""


@pytest.mark.parametrize(
    ("states", "layout"),
    cover(
        product(("int8", "float8", "bf16"), LAYOUTS),
        strength=1,
        features=lambda states, layout: frozenset({(states, layout[1]), layout[:3]}),
        cost=lambda states, layout: layout[0] + (states != "int8"),
    ),
)
def test_equals_one_process(pool, states, layout):
    """Shards do not cut blocks of codes with one scale, so codes are those of one process."""
    world, tp, _, _, accumulation = layout
    config = {**settings(*layout), "optimizer": optimizer(states)}
    actual = pool.run(world, tensor_parallel.train, "wide", True, config)[0]
    assert_same(reference(states, world // tp * accumulation), actual)


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        (2, "zbv"),
        pytest.param(0, "1f1b", marks=pytest.mark.proof),
        pytest.param(3, "interleaved-1f1b", marks=pytest.mark.proof),
    ],
)
def test_in_a_pipeline(pool, stage, schedule):
    """The first and last stage share embeddings."""
    axis = "dp_shard" if stage else "dp_replicate"
    config = pipeline.settings(stage, 4, schedule, pp=2, optimizer=optimizer("int8"), **{axis: 2})
    actual = pool.run(4, pipeline.train, "wide", True, config)[0]
    assert_same(reference("int8", 8, pipeline.layers_of(config), pipeline.STEPS), actual)


def digests_of_stages(rank, world, config, stages):
    """Runs on every rank."""
    digests = []
    for stage in stages:
        model = cases.build("wide", tied=True, dtype=torch.float32)
        engine = cases.engine(model, {**config, "zero_optimization": {"stage": stage}})
        digests.append(digest(engine_trace(engine, cases.ragged_steps(world, steps=8))))
        assert (0 < engine.skipped_steps < 8) == ("fp16" in config)
        dtypes = {v.dtype for state in engine.optimizer.state.values() for v in state.values()}
        assert torch.uint8 in dtypes
    return digests


MIXED = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
}


@pytest.mark.parametrize("precision", MIXED)
def test_stages_agree_to_the_bit(pool, precision):
    """Skipped steps of float16 change no state."""
    config = settings(2, 1, 1, 1, 1)
    config |= {precision: MIXED[precision], "optimizer": optimizer("int8")}
    for stage_1, stage_3 in pool.run(2, digests_of_stages, config, [1, 3]):
        assert stage_1 == stage_3


def full_state(engine):
    """Return all parameters and optimizer states, unsharded. Collective."""
    tensors = {}
    for name, parameter in engine.model.named_parameters():
        values = {"": parameter, **engine.optimizer.state.get(parameter, {})}
        for key, value in values.items():
            tensors[f"{name} {key}"] = full_tensor_on_cpu(value)
    return tensors


def train_and_save(rank, world, config, folder, steps):
    """Train the first steps, save, and return the state. Runs on every rank."""
    model = cases.build("wide", tied=True)
    with keeping_float64(model):
        engine = cases.engine(model, config)
        train(engine, 0, steps)
        engine.save_checkpoint(folder)
    return full_state(engine)


def load_and_train(rank, world, config, folder, first, last):
    """Load, and return the state before and after steps `first` to `last`. Runs on every rank."""
    model = cases.build("wide", tied=True)
    with keeping_float64(model):
        engine = cases.engine(model, config)
        assert engine.load_checkpoint(folder) is not None
        loaded = full_state(engine)
        train(engine, first, last)
    return loaded, full_state(engine)


def train(engine, first, last):
    """Train on some of the steps of 12 micro-batches."""
    count = engine.gradient_accumulation_steps()
    start = engine.dp_rank * count
    for step in cases.ragged_steps(12, steps=4)[first:last]:
        engine.train_batch(step[start : start + count])


MOVES = {
    "2 to 1": ((2, 1, 2), (1, 1, 0)),
    "2 to 4": ((2, 1, 2), (4, 1, 3)),
    "tp 2 to 1": ((4, 2, 1), (2, 1, 3)),
    "1 to tp 2": ((1, 1, 0), (4, 2, 3)),
}
"""Two layouts, each with (ranks, tp, ZeRO stage)."""


@pytest.mark.proof
@pytest.mark.parametrize(
    ("states", "move"),
    [
        *(("int8", move) for move in MOVES),
        ("float8", "2 to 4"),
        ("bf16", "tp 2 to 1"),
    ],
)
def test_checkpoints_on_any_layout(pool, tmp_path, states, move):
    """Loaded states have the saved bits, and the run continues as on the first layout."""

    def config_of(world, tp, stage):
        accumulation = 12 * tp // world
        return {**settings(world, tp, stage, 1, accumulation), "optimizer": optimizer(states)}

    before, after = MOVES[move]
    folder = str(tmp_path)
    saved = pool.run(before[0], train_and_save, config_of(*before), folder, 2)[0]
    loaded, actual = pool.run(after[0], load_and_train, config_of(*after), folder, 2, 4)[0]
    dtype = torch.bfloat16 if states == "bf16" else torch.uint8
    assert dtype in {tensor.dtype for tensor in loaded.values()}
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name

    _, expected = pool.run(before[0], load_and_train, config_of(*before), folder, 2, 4)[0]
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name].double(), tensor.double(), rtol=0, atol=1e-10)


def load_other_forms(rank, world, config, folder):
    """Return the messages for other forms of states, and load the saved one.

    Runs on every rank.
    """
    messages = []
    for states in (None, "float8"):
        engine = cases.engine(
            cases.build("wide", tied=True), {**config, "optimizer": optimizer(states)}
        )
        messages.append(message_of(engine.load_checkpoint, folder))
    engine = cases.engine(
        cases.build("wide", tied=True), {**config, "optimizer": optimizer("int8")}
    )
    engine.load_checkpoint(folder)
    return messages


def test_a_checkpoint_of_another_form_is_refused(pool, tmp_path):
    """Codes are not read as numbers, and codes of one form not as those of another."""
    config = settings(1, 1, 0, 1, 12)
    folder = str(tmp_path)
    pool.run(1, train_and_save, {**config, "optimizer": optimizer("int8")}, folder, 1)
    float64, float8 = pool.run(1, load_other_forms, config, folder)[0]
    assert "exp_avg_int8, exp_avg_int8_scale" in float64 and "set optimizer.states" in float64
    assert "this run as exp_avg_float8" in float8


@pytest.mark.parametrize(("before", "after"), [(None, "bf16"), ("bf16", None)])
def test_bf16_states_and_full_states_load_each_other(pool, tmp_path, before, after):
    """First moments are rounded to bfloat16, second moments are not."""
    config = settings(1, 1, 0, 1, 12)
    folder = str(tmp_path)
    saved_config = {**config, "optimizer": optimizer(before)}
    loaded_config = {**config, "optimizer": optimizer(after)}
    saved = pool.run(1, train_and_save, saved_config, folder, 2)[0]
    loaded = pool.run(1, load_and_train, loaded_config, folder, 2, 3)[0][0]
    for name, tensor in saved.items():
        rounded = after == "bf16" and name.endswith(" exp_avg")
        dtype = torch.bfloat16 if rounded else loaded[name].dtype
        assert loaded[name].dtype == dtype, name
        assert torch.equal(loaded[name], tensor.to(dtype)), name


STEPS, WIDTH = 200, 128


@cache
def loss_of_full_states(pool):
    return mean(pool.run(2, losses, {}, 2, STEPS, ADAMW, WIDTH)[0][-40:])


@pytest.mark.proof
@pytest.mark.parametrize("states", ["int8", "float8", "bf16"])
def test_a_language_model_loses_less_than_one_percent(pool, states):
    """Compares the mean of the last 40 of 200 steps. Every matrix is stored in blocks."""
    actual = pool.run(2, losses, {}, 2, STEPS, {**ADAMW, "states": states}, WIDTH)[0]
    assert actual[0] - mean(actual[-40:]) > 2, "nothing was learned"
    assert mean(actual[-40:]) == pytest.approx(loss_of_full_states(pool), rel=0.01)
