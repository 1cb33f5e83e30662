"""The predicted peak memory of a step is within 2 % of what torch's memory tracker measures."""

from itertools import product

import pytest
import torch

from plait._torch.groups import delivered_at_once
from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.predicted_peak import predict_peak, predict_peak_on, why_not_predicted
from plait.engine.single_rank import run_single_rank
from plait.errors import InputError
from tests.covers import cover
from tests.fake import pipelines
from tests.fake.peaks import LENGTH, SAMPLES, TOLERANCE, check, predicted_and_measured, settings
from tests.fake.worlds import batch
from tests.measured.memory import measure_peak
from tests.parity import cases
from tests.parity.pipelines import LAYERS, named
from tests.parity.pipelines import settings as pipeline_settings

STAGES = product(
    ("llama", "gpt2", "qwen3"),
    (0, 1, 2, 3),
    (1, 2),
    (1, 2),
    (False, True),
    ("none", "selective", "full"),
)


@pytest.mark.parametrize(
    ("kind", "stage", "tp", "accumulation", "bf16", "mode"), cover(STAGES, strength=1)
)
def test_peak(fake_world, kind, stage, tp, accumulation, bf16, mode):
    config = settings(stage=stage, tp=tp, accumulation=accumulation, bf16=bf16, recompute=mode)
    check(*predicted_and_measured(fake_world, kind, config))


OTHERS = {
    "one process": settings(stage=0, accumulation=2, parallel={"dp_replicate": 1}),
    "one process, bf16": settings(stage=2, accumulation=2, bf16=True, parallel={"dp_shard": 1}),
    "hybrid": settings(stage=2, accumulation=2, bf16=True, parallel={"dp_replicate": 2}),
    "hybrid, stage 3": settings(stage=3, accumulation=2, bf16=True, parallel={"dp_replicate": 2}),
    "bf16 on the wire": settings(stage=0, communication_data_type="bf16"),
    "loss in pieces": settings(stage=3, parallel={"loss_chunk_tokens": 8}),
    "MLP in tiles": settings(stage=3, parallel={"mlp_tile_tokens": 4}),
    "MLP in tiles, recomputed": settings(
        stage=2,
        tp=2,
        recompute="full",
        parallel={"mlp_tile_tokens": 4, "sequence_parallel": True},
    ),
    "SGD": settings(stage=2, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
    "Adam without a fused kernel": settings(
        stage=0, optimizer={"type": "Adam", "params": {"lr": 0.1, "fused": False, "foreach": True}}
    ),
    "sequence parallel": settings(stage=3, tp=2, bf16=True, parallel={"sequence_parallel": True}),
    "three ranks": settings(stage=3, parallel={"dp_shard": 3}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings(fake_world, name):
    check(*predicted_and_measured(fake_world, "llama", OTHERS[name], tied=name == "three ranks"))


def test_temporaries_of_the_optimizer_are_counted(fake_world):
    """They decide the peak if activations are small."""
    config = OTHERS["Adam without a fused kernel"]
    predicted, _ = predicted_and_measured(fake_world, "llama", config)
    config = {**config, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    fused, _ = predicted_and_measured(fake_world, "llama", config)
    assert predicted.peak.phases["optimizer step"] > fused.peak.phases["optimizer step"]


PIPELINES = [
    (4, 0, pipeline_settings(1, 4, "1f1b", pp=2, dp_shard=2)),
    (4, 2, pipeline_settings(3, 4, "1f1b", pp=2, dp_shard=2)),
    (4, 0, pipeline_settings(3, 4, "interleaved-1f1b", pp=2, dp_shard=2)),
    (4, 2, pipeline_settings(2, 4, "interleaved-1f1b", pp=2, dp_shard=2)),
    (4, 0, pipeline_settings(2, 4, "interleaved-zero-bubble", pp=2, dp_shard=2)),
    (4, 0, pipeline_settings(1, 4, "zbv", pp=2, dp_shard=2)),
    (4, 2, pipeline_settings(2, 4, "dualpipev", pp=2, dp_shard=2)),
    (4, 1, pipeline_settings(0, 4, "1f1b", pp=2, dp_replicate=2)),
    (4, 2, pipeline_settings(2, 4, "zbv", pp=2, dp_shard=2, recompute={"mode": "full"})),
    (4, 0, pipeline_settings(0, 4, "1f1b", pp=2, dp_replicate=2,
                             recompute={"budget_gib": 6.5e-4, "sequence_length": LENGTH})),
    (16, 13, pipeline_settings(1, 4, "zbv", pp=2, dp_shard=4, tp=2)),
    (12, 0, pipeline_settings(3, 4, "1f1b", pp=2, dp_shard=3, tp=2, sequence_parallel=True)),
]  # fmt: skip


def features(world, rank, config):
    schedule = config["parallel"]["pipeline"]["schedule"]
    return frozenset({schedule, config["zero_optimization"]["stage"], *config["parallel"]})


@pytest.mark.parametrize(
    ("world", "rank", "config"),
    cover(
        PIPELINES,
        strength=1,
        features=features,
        cost=lambda world, rank, config: world,
        name=lambda world, rank, config: f"rank{rank}-{named(config)}",
    ),
)
def test_pipelines(fake_world, world, rank, config):
    fake_world(world, rank)
    resolved = resolve(load(config), world_size=world)
    model = cases.build("llama", tied=True, dtype=torch.float32, layers=LAYERS)
    mesh = build_mesh(resolved.layout)
    predicted = predict_peak_on(mesh, model, resolved, samples=SAMPLES, length=LENGTH)

    engine, *_ = pipelines.build(config, world, layers=LAYERS, length=LENGTH)
    data = batch(config["gradient_accumulation_steps"], samples=SAMPLES, length=LENGTH)
    with delivered_at_once():
        check(predicted, measure_peak(engine, data))


@pytest.mark.parametrize(("stage", "pp"), cover([(0, 2), (3, 1), (0, 1), (3, 2)], strength=1))
def test_prediction_equals_a_dry_run(stage, pp):
    """A dry run takes fake tensors through the real collectives, stages and optimizer."""
    shard = 2 if stage else 1
    config = pipeline_settings(stage, 2, "1f1b", pp=pp, dp_shard=shard)
    resolved = resolve(load(config), world_size=pp * shard)
    sizes = {"rank": 0, "samples": 2, "length": LENGTH}

    def model():
        return cases.build("llama", tied=False, dtype=torch.float32, layers=LAYERS // 2)

    predicted = predict_peak(model(), resolved, **sizes)
    dry_run = run_single_rank(model(), resolved, **sizes)
    assert predicted.peak.peak_bytes == pytest.approx(dry_run.peak, rel=TOLERANCE)


@pytest.mark.parametrize(
    "section",
    [
        {"compile": {"enabled": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    ],
)
def test_settings_without_a_prediction_are_refused(section):
    resolved = resolve(load({"train_micro_batch_size_per_gpu": 1, **section}), world_size=2)
    assert why_not_predicted(resolved)
    with pytest.raises(InputError, match="cannot be predicted"):
        predict_peak(cases.build("llama", tied=False), resolved, rank=0, samples=1, length=8)
