"""Optimizer states of fewer bytes: the same numbers on every layout, checkpoints that go anywhere, and what they cost in loss."""

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
from tests.parity.tensor_parallel import settings

STEPS, WIDTH = 200, 128


@cache
def reference(states, micro_batches, layers=None, steps=2):
    """One plain process on the whole batch."""
    model = materialised("wide", tied=True) if layers is None else pipeline_model(layers)
    return plain_trace(
        model,
        cases.steps_for("wide", micro_batches, steps=steps),
        optimizer=lambda _: build_optimizer(
            OptimizerSpec(**optimizer(states)), model.named_parameters()
        ),
    )


def pipeline_model(layers):
    model = cases.build("wide", tied=True, layers=layers)
    plait.initialize(
        model, {"train_micro_batch_size_per_gpu": 2, "run": {"seed": pipeline.SEED}}
    ).close()  # only for its initial weights
    return model


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
    """In float64, with accumulation and clipping: no shard cuts a block, so codes are those of one process."""
    world, tp, stage, replicas, accumulation = layout
    config = {**settings(world, tp, stage, replicas, accumulation), "optimizer": optimizer(states)}
    found = pool.run(world, tensor_parallel.train, "wide", True, config)[0]
    assert_same(reference(states, world // tp * accumulation), found)


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        (2, "zbv"),
        pytest.param(0, "1f1b", marks=pytest.mark.proof),
        pytest.param(3, "interleaved-1f1b", marks=pytest.mark.proof),
    ],
)
def test_in_a_pipeline(pool, stage, schedule):
    """Embeddings tied between the first and the last stage."""
    degrees = {"pp": 2, "dp_shard": 2} if stage else {"pp": 2, "dp_replicate": 2}
    config = pipeline.settings(stage, 4, schedule, **degrees, optimizer=optimizer("int8"))
    found = pool.run(4, pipeline.train, "wide", True, config)[0]
    assert_same(reference("int8", 8, pipeline.layers_of(config), pipeline.STEPS), found)


def bits(rank, world, config, stages):
    """Of a run at every stage. Runs in a worker."""
    found = []
    for stage in stages:
        model = cases.build("wide", tied=True, dtype=torch.float32)
        engine = cases.engine(model, {**config, "zero_optimization": {"stage": stage}})
        found.append(digest(engine_trace(engine, cases.ragged_steps(world, steps=8))))
        assert (0 < engine.skipped_steps < 8) == ("fp16" in config)
        states = {v.dtype for state in engine.optimizer.state.values() for v in state.values()}
        assert torch.uint8 in states
    return found


MIXED = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
}


@pytest.mark.parametrize("precision", MIXED)
def test_stages_agree_to_the_bit(pool, precision):
    """Mixed precision; skipped steps of float16 change no state."""
    config = {
        **settings(2, 1, 1, 1, 1),
        precision: MIXED[precision],
        "optimizer": optimizer("int8"),
    }
    for found in pool.run(2, bits, config, [1, 3]):
        assert found[0] == found[1]


def resumed(rank, world, config, folder, first, last):
    """Steps `first` to `last` of 12 micro-batches, from the checkpoint that a run from the beginning saves: parameters and states, whole.
    Runs in a worker."""
    model = cases.build("wide", tied=True)
    found: dict[str, torch.Tensor] = {}
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)

        def note(when):
            for name, parameter in engine.model.named_parameters():
                values = {"": parameter, **engine.optimizer.state.get(parameter, {})}
                found.update(
                    {
                        f"{when} {name} {key}": full_tensor_on_cpu(value)
                        for key, value in values.items()
                    }
                )

        if first:
            assert engine.load_checkpoint(folder) is not None
            note("loaded")
        count = config["gradient_accumulation_steps"]
        for step in cases.ragged_steps(12, steps=4)[first:last]:
            engine.train_batch(list(step[engine.dp_rank * count : (engine.dp_rank + 1) * count]))
        note("end" if first else "loaded")
        if not first:
            engine.save_checkpoint(folder)
    return found


MOVES = {
    "2 to 1": ((2, 1, 2), (1, 1, 0)),
    "2 to 4": ((2, 1, 2), (4, 1, 3)),
    "tp 2 to 1": ((4, 2, 1), (2, 1, 3)),
    "1 to tp 2": ((1, 1, 0), (4, 2, 3)),
}


@pytest.mark.parametrize(
    ("states", "move"),
    [
        ("int8", "tp 2 to 1"),
        *(
            pytest.param("int8", move, marks=pytest.mark.proof)
            for move in ("2 to 1", "2 to 4", "1 to tp 2")
        ),
        pytest.param("float8", "2 to 4", marks=pytest.mark.proof),
        pytest.param("bf16", "tp 2 to 1", marks=pytest.mark.proof),
    ],
)
def test_checkpoints_on_any_layout(pool, tmp_path, states, move):
    """(processes, tp, ZeRO stage): states are those that were saved, to the bit, and the run goes on as one that was not interrupted."""
    before, after = MOVES[move]

    def config(world, tp, stage):
        return {**settings(world, tp, stage, 1, 12 * tp // world), "optimizer": optimizer(states)}

    saved = pool.run(before[0], resumed, config(*before), str(tmp_path), 0, 2)[0]
    found = pool.run(after[0], resumed, config(*after), str(tmp_path), 2, 4)[0]
    loaded = {name: value for name, value in found.items() if name.startswith("loaded")}
    assert set(loaded) == set(saved)
    assert any(
        value.dtype == (torch.bfloat16 if states == "bf16" else torch.uint8)
        for value in loaded.values()
    )
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
    straight = pool.run(before[0], resumed, config(*before), str(tmp_path), 2, 4)[0]
    for name, value in straight.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=0, atol=1e-10)


def refused(rank, world, config, folder, forms):
    """What loading says. Runs in a worker."""
    said = []
    for form in forms:
        engine = cases.engine(
            cases.build("wide", tied=True), {**config, "optimizer": optimizer(form)}
        )
        try:
            engine.load_checkpoint(folder)
            said.append("loaded")
        except plait.PlaitError as error:
            said.append(str(error))
    return said


def test_a_checkpoint_of_another_form_is_refused(pool, tmp_path):
    """Codes are never read as numbers, nor those of one form as those of another."""
    config = settings(1, 1, 0, 1, 12)
    pool.run(1, resumed, {**config, "optimizer": optimizer("int8")}, str(tmp_path), 0, 1)
    own, float8, int8 = pool.run(1, refused, config, str(tmp_path), [None, "float8", "int8"])[0]
    assert "exp_avg_int8, exp_avg_int8_scale" in own and "set optimizer.states" in own
    assert "this run as exp_avg_float8" in float8
    assert int8 == "loaded"


@pytest.mark.parametrize(("before", "after"), [(None, "bf16"), ("bf16", None)])
def test_own_and_bf16_load_each_others(pool, tmp_path, before, after):
    """Rounded; squares are not."""
    config = settings(1, 1, 0, 1, 12)
    saved = pool.run(1, resumed, {**config, "optimizer": optimizer(before)}, str(tmp_path), 0, 2)[0]
    found = pool.run(1, resumed, {**config, "optimizer": optimizer(after)}, str(tmp_path), 2, 3)[0]
    for name in saved:
        narrow = after == "bf16" and name.endswith(" exp_avg")
        wanted = saved[name].bfloat16() if narrow else saved[name].to(found[name].dtype)
        assert found[name].dtype == (torch.bfloat16 if narrow else wanted.dtype) and torch.equal(
            found[name], wanted
        ), name


@cache
def plain_loss(pool):
    return mean(pool.run(2, losses, {}, 2, STEPS, ADAMW, WIDTH)[0][-40:])


@pytest.mark.proof
@pytest.mark.parametrize("states", ["int8", "float8", "bf16"])
def test_a_language_model_loses_less_than_one_percent(pool, states):
    """The last 40 of 200 steps, equal data; every matrix in blocks."""
    found = pool.run(2, losses, {}, 2, STEPS, {**ADAMW, "states": states}, WIDTH)[0]
    assert found[0] - mean(found[-40:]) > 2, "nothing was learnt"
    assert mean(found[-40:]) == pytest.approx(plain_loss(pool), rel=0.01)
