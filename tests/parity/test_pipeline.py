"""Pipelines against one process in float64: every schedule, families, combinations with ZeRO, tensor and sequence parallelism."""

import gc

import pytest
import torch
from torch import nn

import plait
from plait.parallel.pipeline import runtime
from plait.parallel.schedules.schedule import Kind
from plait.verify.parity import engine_trace, full_tensor_on_cpu, reference_trace
from tests.covers import cover
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, SEED, assert_same
from tests.parity.pipelines import LAYERS, SCHEDULES, check, dp_of, named, settings


@pytest.mark.parametrize(
    ("schedule", "pp"),
    [
        pytest.param(
            schedule,
            pp,
            marks=[pytest.mark.proof] if pp == 4 and schedule not in ("1f1b", "zbv") else [],
        )
        for schedule in SCHEDULES
        for pp in (2, 4)
    ],
)
def test_every_schedule(pool, schedule, pp):
    """Ragged micro-batches whose lengths change within a step and between steps; embeddings tied between the first and the last stage."""
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
        ("opt", True),
        ("stablelm", False),
        ("plain", True),
    ],
)
def test_families(pool, kind, tied, schedule):
    """With and without a pipeline plan of Transformers; OPT registers its final norm before its blocks."""
    check(pool, 2, kind, tied, settings(0, 4, schedule, pp=2))


@pytest.mark.parametrize(
    ("schedule", "accumulation"),
    cover(
        [("gpipe", 1), ("1f1b", 3), ("zbv", 1), ("gpipe", 3), ("1f1b", 1), ("zbv", 3)], strength=1
    ),
)
def test_fewer_micro_batches_than_stages(pool, schedule, accumulation):
    """One micro-batch is a plain split by layers."""
    check(pool, 4, "qwen3", True, settings(0, accumulation, schedule, pp=4))


COMBINED = [
    *(
        (4, settings(stage, 4, schedule, pp=2, dp_shard=2))
        for stage in (1, 2)
        for schedule in SCHEDULES
    ),
    *((4, settings(3, 4, schedule, pp=2, dp_shard=2)) for schedule in SCHEDULES[:4]),
    *(
        (4, settings(0, 4, schedule, pp=2, dp_replicate=2))
        for schedule in ("1f1b", "interleaved-1f1b", "zbv")
    ),
    *(
        (4, settings(0, 4, schedule, pp=2, tp=2))
        for schedule in ("1f1b", "interleaved-zero-bubble", "dualpipev")
    ),
    *(
        (4, settings(0, 2, schedule, pp=2, tp=2, sequence_parallel=True))
        for schedule in ("gpipe", "interleaved-1f1b", "zbv")
    ),
    *((8, settings(stage, 4, pp=2, dp_shard=2, tp=2)) for stage in (1, 2, 3)),
    (8, settings(2, 4, "interleaved-1f1b", pp=2, dp_shard=2, tp=2, sequence_parallel=True)),
    (8, settings(2, 4, "zbv", pp=2, dp_shard=2, tp=2)),
    (8, settings(3, 4, pp=2, dp_replicate=2, dp_shard=2)),
    (8, settings(1, 4, "interleaved-zero-bubble", pp=2, dp_replicate=2, dp_shard=2)),
    (8, settings(3, 8, pp=4, dp_shard=2)),
    (6, settings(2, 3, pp=2, dp_shard=3)),
    *(
        (2, settings(0, 4, schedule, pp=2, recompute={"mode": mode}))
        for schedule in ("1f1b", "zbv")
        for mode in ("full", "selective")
    ),
    (
        4,
        settings(
            3, 4, "interleaved-1f1b", pp=2, dp_shard=2, recompute={"mode": "full", "every": 2}
        ),
    ),
    *(
        (2, settings(0, 4, schedule, pp=2, loss_chunk_tokens=8))
        for schedule in ("1f1b", "dualpipev")
    ),
]


def meeting(world, config):
    """What has to meet: every schedule with stage 0, 1 or 2, and 3; every stage with every set of axes; every schedule with recompute."""
    degrees, schedule, stage = (
        config["parallel"],
        config["parallel"]["pipeline"]["schedule"],
        config["zero_optimization"]["stage"],
    )
    others = tuple(axis for axis in degrees if axis not in ("pp", "pipeline"))
    return frozenset(
        {
            (schedule, {1: 2}.get(stage, stage)),
            (others, world < 8 and stage == 3),
            (schedule, others[-1:]),
        }
    )


@pytest.mark.parametrize(
    ("world", "config"),
    cover(
        COMBINED,
        strength=1,
        features=meeting,
        cost=lambda world, _: world,
        name=lambda _, config: named(config),
    ),
)
def test_combined(pool, world, config):
    """Pipelines with ZeRO 0 to 3, hybrid sharding, tensor and sequence parallelism."""
    check(pool, world, "qwen3", True, config)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            settings(1, 4, "interleaved-1f1b", pp=2, dp_shard=2),
            marks=pytest.mark.proof,
            id="ZeRO-1",
        ),
        pytest.param(settings(3, 4, "gpipe", pp=2, dp_shard=2), id="ZeRO-3"),
    ],
)
def test_an_output_that_torch_cannot_look_into(pool, config):
    """The logits are in an object of the model's own class, where fully_shard finds no tensor to start its backward from."""
    check(pool, 4, "plain", True, config)


def head(layer, hidden):
    """An embedding's weight as a projection."""
    return nn.functional.linear(hidden, layer.weight)  # type: ignore[arg-type]


def layered():
    """Layers of several classes, a function among them, the first and the last tied."""
    return plait.PipelineModel(
        [
            plait.TiedLayerSpec("embedding", nn.Embedding, cases.VOCABULARY, 12),
            plait.LayerSpec(nn.Linear, 12, 30),
            torch.tanh,
            plait.LayerSpec(nn.Linear, 30, 12),
            plait.LayerSpec(nn.LayerNorm, 12),
            plait.TiedLayerSpec("embedding", nn.Embedding, cases.VOCABULARY, 12, forward_fn=head),
        ]
    ).double()


LAYERED_LOSS = plait.per_sample(
    lambda logits, batch: nn.functional.cross_entropy(
        logits.flatten(0, 1), batch[1].flatten(), reduction="sum"
    )
)


def layered_steps(micro_batches):
    """(ids, targets) [2, length], of several lengths."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda length: torch.randint(0, cases.VOCABULARY, (2, length), generator=generator)  # noqa: E731
    return [
        [(draw(5 + index), draw(5 + index)) for index in range(micro_batches)] for _ in range(3)
    ]


def train_layered(rank, world, config):
    """Runs in a worker."""
    with torch.device("meta"):
        model = layered()
    engine = plait.initialize(model, config, loss_fn=LAYERED_LOSS)
    trace = engine_trace(
        engine, layered_steps(dp_of(config) * config["gradient_accumulation_steps"])
    )
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
    """Initialised on meta, tied between the first and the last layer, which the stages between them do not have."""
    found = pool.run(world, train_layered, config)[0]
    with torch.device("meta"):
        model = layered()
    plait.initialize(model, {"train_micro_batch_size_per_gpu": 2, "run": {"seed": SEED}}).close()
    steps = layered_steps(dp_of(config) * config["gradient_accumulation_steps"])
    expected = reference_trace(
        model, steps, loss_fn=LAYERED_LOSS, optimizer=cases.adamw, clipping=CLIPPING
    )
    assert_same(expected, found)


def evaluate(rank, world, config):
    """Runs in a worker: (loss sum and weight, logits or None, logits as every rank gets them)."""
    engine = cases.engine(cases.build("qwen3", tied=True, layers=LAYERS), config)
    piece = cases.steps_for("qwen3", 1)[0][0]
    output = engine.predict(piece)
    logits = None if output is None else output.logits
    return engine.eval_batch(piece), logits, engine.from_output_stage(logits)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_evaluation_runs_through_the_stages(pool, schedule):
    """The same sums and logits as one process; logits where the last stage is."""
    config = settings(
        3 if schedule == "1f1b" else 0,
        4,
        schedule,
        pp=2,
        **({"dp_shard": 2} if schedule == "1f1b" else {}),
    )
    world = 2 * dp_of(config)
    model = cases.build("qwen3", tied=True, layers=LAYERS)
    engine = cases.engine(model, {"train_micro_batch_size_per_gpu": 2, "run": {"seed": SEED}})
    piece = cases.steps_for("qwen3", 1)[0][0]
    total, weight = engine.eval_batch(piece)
    expected = engine.predict(piece).logits
    engine.close()
    for (found, weighed), logits, shared in pool.run(world, evaluate, config):
        assert found == pytest.approx(total * dp_of(config), rel=1e-6)
        assert weighed == weight * dp_of(config)
        torch.testing.assert_close(shared, expected, rtol=0, atol=1e-6)
        assert logits is None or torch.equal(logits, shared)


class Overflows(nn.Module):
    """A block whose gradient is infinite in float16 when the batch says so."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, hidden, factor):
        return hidden + self.line(hidden) * factor


class Chain(nn.Module):
    """Four blocks, of which `at` multiplies by the batch's factor."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.blocks = nn.ModuleList(Overflows() for _ in range(4))

    def forward(self, x, factor):
        for index, block in enumerate(self.blocks):
            x = block(x, float(factor[0]) if index == self.at else 1.0)
        return x


def overflow(rank, world, at, schedule):
    """Runs in a worker: (skipped, loss scale, did any parameter change) of three steps, the second with an overflow in block `at`."""
    torch.manual_seed(3)
    model = Chain(at)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "parallel": {"pp": 2, "pipeline": {"schedule": schedule}},
    }
    loss = plait.per_sample(lambda output, batch: output.float().square().sum())
    engine = plait.initialize(model, config, loss_fn=loss)
    told = []
    for factor in (1.0, 60000.0, 1.0):
        before = [full_tensor_on_cpu(p) for p in engine.model.parameters()]
        result = engine.train_batch((torch.ones(8, 8), torch.full((8,), factor), torch.zeros(8)))
        changed = any(
            not torch.equal(a, full_tensor_on_cpu(b))
            for a, b in zip(before, engine.model.parameters(), strict=True)
        )
        told.append((result.skipped, result.loss_scale, changed))
    return told


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("at", [0, 3])
def test_every_stage_skips_what_overflowed_on_one(pool, at, schedule):
    """The decision, the skipped update and the next scale are the same on all ranks."""
    first, second = pool.run(2, overflow, at, schedule)
    assert first == second == [(False, 256.0, True), (True, 256.0, False), (False, 128.0, True)]


def between_inputs_and_weights(rank, world):
    """Runs in a worker. How many gradients a rank holds of what its stages received, whenever it has sent them back."""
    engine = cases.engine(
        cases.build("qwen3", tied=False, layers=4),
        settings(0, 4, "interleaved-zero-bubble", pp=world),
    )
    found = []

    def look(action, after):
        if after and action.kind is Kind.INPUT and action.stage:
            kept = [
                held for held in gc.get_objects() if isinstance(held, runtime._StageActivations)
            ]
            assert any(held.deferred is not None and held.inputs for held in kept)
            found.append(sum(tensor.grad is not None for held in kept for tensor in held.inputs))

    engine.sharded.pipeline.runtime.observers.append(look)
    engine.train_batch(cases.steps_for("qwen3", 4, steps=1)[0])
    return found


def test_a_gradient_that_was_sent_back_is_not_kept(pool):
    """A schedule that puts off the gradients of weights holds what a stage received until then."""
    for found in pool.run(2, between_inputs_and_weights):
        assert len(found) >= 4 and not any(found)
