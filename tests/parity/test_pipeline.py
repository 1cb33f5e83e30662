"""Pipelines against one process in float64.

Every schedule, model families, and combinations with ZeRO, tensor and sequence parallelism.
"""

import gc

import pytest
import torch
from torch import nn

import plait
from plait.parallel.pipeline import runtime
from plait.parallel.schedules.schedule import Kind
from plait.verify.parity import engine_trace, reference_trace
from tests.covers import cover
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, SEED, assert_same
from tests.parity.full_tensors import full_weights, names_of_differences
from tests.parity.pipelines import LAYERS, SCHEDULES, check, dp_of, named, settings


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.proof)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(pool, schedule, pp):
    """Lengths change between micro-batches and steps. The first and last stage share embeddings."""
    check(pool, pp, "llama", True, settings(0, 8, schedule, pp=pp))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("llama", False),
        ("qwen3", True),
        ("gemma", True),
        ("gemma2", False),
        ("mistral", False),
        ("phi3", False),
        ("gpt2", True),
        ("gpt_neox", False),
        ("gptj", False),
        ("opt", True),  # registers its final norm before its blocks
        ("stablelm", False),
        ("plain", True),
    ],
)
def test_families(pool, kind, tied, schedule):
    check(pool, 2, kind, tied, settings(0, 4, schedule, pp=2))


@pytest.mark.parametrize(
    ("schedule", "accumulation"),
    cover(
        [("gpipe", 1), ("1f1b", 3), ("zbv", 1), ("gpipe", 3), ("1f1b", 1), ("zbv", 3)], strength=1
    ),
)
def test_fewer_micro_batches_than_stages(pool, schedule, accumulation):
    """A single micro-batch is a plain split by layers."""
    check(pool, 4, "qwen3", True, settings(0, accumulation, schedule, pp=4))


def combined_layouts():
    """Yield the number of ranks and the configuration of every combination."""
    for stage in (1, 2):
        for schedule in SCHEDULES:
            yield 4, settings(stage, 4, schedule, pp=2, dp_shard=2)
    for schedule in SCHEDULES[:4]:
        yield 4, settings(3, 4, schedule, pp=2, dp_shard=2)

    for schedule in ("1f1b", "interleaved-1f1b", "zbv"):
        yield 4, settings(0, 4, schedule, pp=2, dp_replicate=2)
    for schedule in ("1f1b", "interleaved-zero-bubble", "dualpipev"):
        yield 4, settings(0, 4, schedule, pp=2, tp=2)
    for schedule in ("gpipe", "interleaved-1f1b", "zbv"):
        yield 4, settings(0, 2, schedule, pp=2, tp=2, sequence_parallel=True)

    for stage in (1, 2, 3):
        yield 8, settings(stage, 4, pp=2, dp_shard=2, tp=2)
    yield 8, settings(2, 4, "interleaved-1f1b", pp=2, dp_shard=2, tp=2, sequence_parallel=True)
    yield 8, settings(2, 4, "zbv", pp=2, dp_shard=2, tp=2)
    yield 8, settings(3, 4, pp=2, dp_replicate=2, dp_shard=2)
    yield 8, settings(1, 4, "interleaved-zero-bubble", pp=2, dp_replicate=2, dp_shard=2)
    yield 8, settings(3, 8, pp=4, dp_shard=2)
    yield 6, settings(2, 3, pp=2, dp_shard=3)

    for schedule in ("1f1b", "zbv"):
        for mode in ("full", "selective"):
            yield 2, settings(0, 4, schedule, pp=2, recompute={"mode": mode})
    every_second = {"mode": "full", "every": 2}
    yield 4, settings(3, 4, "interleaved-1f1b", pp=2, dp_shard=2, recompute=every_second)
    for schedule in ("1f1b", "dualpipev"):
        yield 2, settings(0, 4, schedule, pp=2, loss_chunk_tokens=8)


def features(world, config):
    """Return the settings that have to meet in some case of `make test`.

    Every schedule meets ZeRO stage 0, 1 or 2, stage 3, and recompute. Every set of axes meets
    stage 3 and another stage.
    """
    schedule = config["parallel"]["pipeline"]["schedule"]
    stage = config["zero_optimization"]["stage"]
    axes = tuple(axis for axis in config["parallel"] if axis not in ("pp", "pipeline"))
    # Stages 1 and 2 run the same code of pipelines.
    stage_kind = 2 if stage == 1 else stage
    return frozenset(
        {(schedule, stage_kind), (axes, world < 8 and stage == 3), (schedule, axes[-1:])}
    )


@pytest.mark.parametrize(
    ("world", "config"),
    cover(
        list(combined_layouts()),
        strength=1,
        features=features,
        cost=lambda world, _: world,
        name=lambda _, config: named(config),
    ),
)
def test_combined(pool, world, config):
    """Pipelines with ZeRO 0 to 3, hybrid sharding, tensor and sequence parallelism."""
    check(pool, world, "qwen3", True, config)


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        pytest.param(1, "interleaved-1f1b", marks=pytest.mark.proof, id="ZeRO-1"),
        pytest.param(3, "gpipe", id="ZeRO-3"),
    ],
)
def test_outputs_of_the_models_own_class(pool, stage, schedule):
    """`fully_shard` finds no tensor in such an output to start its backward from."""
    check(pool, 4, "plain", True, settings(stage, 4, schedule, pp=2, dp_shard=2))


def project(layer, hidden):
    """Project with the weight of an embedding."""
    return nn.functional.linear(hidden, layer.weight)  # type: ignore[arg-type]


def layered():
    """Return a model of layers of several classes and a function. The first and last are tied."""
    return plait.PipelineModel(
        [
            plait.TiedLayerSpec("embedding", nn.Embedding, cases.VOCABULARY, 12),
            plait.LayerSpec(nn.Linear, 12, 30),
            torch.tanh,
            plait.LayerSpec(nn.Linear, 30, 12),
            plait.LayerSpec(nn.LayerNorm, 12),
            plait.TiedLayerSpec(
                "embedding", nn.Embedding, cases.VOCABULARY, 12, forward_fn=project
            ),
        ]
    ).double()


LAYERED_LOSS = plait.per_sample(
    lambda logits, batch: nn.functional.cross_entropy(
        logits.flatten(0, 1), batch[1].flatten(), reduction="sum"
    )
)


def layered_steps(micro_batches):
    """Return three steps of (ids, targets) [2, length] of several lengths."""
    generator = torch.Generator().manual_seed(4)

    def draw(length):
        return torch.randint(0, cases.VOCABULARY, (2, length), generator=generator)

    lengths = range(5, 5 + micro_batches)
    return [[(draw(length), draw(length)) for length in lengths] for _ in range(3)]


def train_layered(rank, world, config):
    """Runs on every rank."""
    with torch.device("meta"):
        model = layered()
    engine = plait.initialize(model, config, loss_fn=LAYERED_LOSS)
    steps = layered_steps(dp_of(config) * config["gradient_accumulation_steps"])
    trace = engine_trace(engine, steps)
    return trace if rank == 0 else None


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (2, settings(0, 4, "1f1b", pp=2)),
        (2, settings(0, 4, "zbv", pp=2)),
        (6, settings(2, 3, "gpipe", pp=3, dp_shard=2)),
    ],
    ids=["1f1b", "zbv", "zero2"],
)
def test_layer_specs(pool, world, config):
    """The model is initialised on meta. Stages in the middle do not have the tied layers."""
    actual = pool.run(world, train_layered, config)[0]
    with torch.device("meta"):
        model = layered()
    plait.initialize(model, {"train_micro_batch_size_per_gpu": 2, "run": {"seed": SEED}}).close()
    steps = layered_steps(dp_of(config) * config["gradient_accumulation_steps"])
    expected = reference_trace(
        model, steps, loss_fn=LAYERED_LOSS, optimizer=cases.adamw, clipping=CLIPPING
    )
    assert_same(expected, actual)


def evaluate(rank, world, config):
    """Return the loss sum and weight, this rank's logits, and those of the output stage.

    Runs on every rank.
    """
    engine = cases.engine(cases.build("qwen3", tied=True, layers=LAYERS), config)
    batch = cases.steps_for("qwen3", 1)[0][0]
    output = engine.predict(batch)
    logits = None if output is None else output.logits
    return engine.eval_batch(batch), logits, engine.from_output_stage(logits)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_evaluation_runs_through_the_stages(pool, schedule):
    """Loss sums and logits are those of one process."""
    if schedule == "1f1b":
        config = settings(3, 4, schedule, pp=2, dp_shard=2)
    else:
        config = settings(0, 4, schedule, pp=2)
    dp = dp_of(config)
    actual = pool.run(2 * dp, evaluate, config)

    model = cases.build("qwen3", tied=True, layers=LAYERS)
    engine = cases.engine(model, {"train_micro_batch_size_per_gpu": 2, "run": {"seed": SEED}})
    batch = cases.steps_for("qwen3", 1)[0][0]
    expected_loss, expected_weight = engine.eval_batch(batch)
    expected_logits = engine.predict(batch).logits
    engine.close()

    for (loss, weight), logits, output_logits in actual:
        assert loss == pytest.approx(expected_loss * dp, rel=1e-6)
        assert weight == expected_weight * dp
        torch.testing.assert_close(output_logits, expected_logits, rtol=0, atol=1e-6)
        assert logits is None or torch.equal(logits, output_logits)


class ScaledBlock(nn.Module):
    """A block whose gradient is infinite in float16 for a large factor."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, hidden, factor):
        return hidden + self.line(hidden) * factor


class OverflowingModel(nn.Module):
    """Four blocks. The block at index `at` multiplies by the batch's factor."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(4))

    def forward(self, x, factor):
        for index, block in enumerate(self.blocks):
            x = block(x, float(factor[0]) if index == self.at else 1.0)
        return x


def overflow_in_the_second_step(rank, world, at, schedule):
    """Return (skipped, loss scale, whether a parameter changed) per step. Runs on every rank."""
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "parallel": {"pp": 2, "pipeline": {"schedule": schedule}},
    }
    loss = plait.per_sample(lambda output, batch: output.float().square().sum())
    engine = plait.initialize(OverflowingModel(at), config, loss_fn=loss)
    history = []
    for factor in (1.0, 60000.0, 1.0):
        before = full_weights(engine.model)
        result = engine.train_batch((torch.ones(8, 8), torch.full((8,), factor), torch.zeros(8)))
        changed = bool(names_of_differences(before, full_weights(engine.model)))
        history.append((result.skipped, result.loss_scale, changed))
    return history


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("at", [0, 3])
def test_overflow_on_one_stage_skips_the_step_on_all(pool, at, schedule):
    first, second = pool.run(2, overflow_in_the_second_step, at, schedule)
    assert first == second == [(False, 256.0, True), (True, 256.0, False), (False, 128.0, True)]


def input_gradients_between_backward_halves(rank, world):
    """Return how many gradients of received activations a rank holds after each input backward.

    Runs on every rank.
    """
    config = settings(0, 4, "interleaved-zero-bubble", pp=world)
    engine = cases.engine(cases.build("qwen3", tied=False, layers=4), config)
    counts = []

    def count_gradients(action, after):
        if not (after and action.kind is Kind.INPUT and action.stage):
            return
        # No public name tells what a stage holds between the two halves of a backward.
        deferred = 0
        gradients = 0
        for activations in gc.get_objects():
            if isinstance(activations, runtime._StageActivations):
                if activations.deferred is not None:
                    deferred += len(activations.inputs)
                gradients += sum(tensor.grad is not None for tensor in activations.inputs)
        assert deferred
        counts.append(gradients)

    engine.sharded.pipeline.runtime.observers.append(count_gradients)
    engine.train_batch(cases.steps_for("qwen3", 4, steps=1)[0])
    return counts


def test_input_gradients_are_dropped_once_sent(pool):
    """Activations stay until the deferred weight gradients, but their own gradients do not."""
    for counts in pool.run(2, input_gradients_between_backward_halves):
        assert len(counts) >= 4 and not any(counts)
