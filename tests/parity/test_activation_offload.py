"""Activations that went through files change no bit and leave the predicted memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import ActivationTechniques, rank_activations, token_batch
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.parallel.parts import Parts
from plait.verify.parity import engine_trace
from tests.covers import proof_after
from tests.measured.memory import measure_activations
from tests.parity import cases
from tests.parity.digests import build, digest
from tests.parity.pipelines import SCHEDULES, named
from tests.parity.pipelines import settings as pipeline_settings
from tests.parity.tensor_parallel import settings


def digests(rank, world, kind, config, modes, folder):
    """Return a digest of a run without offload, and of one in each mode. Runs on every rank."""
    axes = config["parallel"]
    result = []
    for mode in ({}, *modes):
        offload = {key: value for key, value in mode.items() if key != "recompute"}
        if offload:
            offload |= {"device": "disk", "path": folder}
        parallel = {
            **axes,
            "recompute": mode.get("recompute", {}),
            "activation_offload": offload,
        }
        model = build(
            kind,
            torch.float64,
            dropout=not axes.get("sequence_parallel"),
            layers=4 if axes.get("pp", 1) > 1 else None,
        )
        engine = plait.initialize(
            model, {**config, "parallel": parallel}, loss_fn=plait.causal_lm_loss
        )
        assert (engine.hooks.find(OffloadedActivations) is not None) == bool(offload)
        dp = world // (axes.get("tp", 1) * axes.get("pp", 1))
        steps = cases.ragged_steps(dp * config["gradient_accumulation_steps"])
        result.append(digest(engine_trace(engine, steps)))
    return result


def check_same_bits(pool, world, kind, config, modes, folder):
    for hashes in pool.run(world, digests, kind, config, modes, str(folder)):
        assert len(hashes) == 1 + len(modes)
        assert len(set(hashes)) == 1


def mode_of(fraction, recompute="none"):
    return {"fraction": fraction, "recompute": {"mode": recompute}}


@pytest.mark.parametrize(
    ("kind", "tp", "stage", "sequence"),
    [("gpt2", 1, 0, False), ("llama", 1, 3, False), ("llama", 2, 0, False), ("qwen3", 2, 0, True)],
)
def test_offload_changes_no_bit(pool, tmp_path, kind, tp, stage, sequence):
    recompute = "full" if sequence or stage else "selective"
    modes = [mode_of(0.5), mode_of(1.0, recompute)]
    check_same_bits(pool, 2, kind, settings(2, tp, stage, 1, 2, sequence), modes, tmp_path)


PIPELINES: list[tuple[int, dict[str, Any], list[dict[str, Any]]]] = [
    (2, pipeline_settings(0, 4, "zbv", pp=2), [mode_of(1.0), mode_of(0.5, "selective")]),
    (4, pipeline_settings(2, 4, "dualpipev", pp=2, dp_shard=2), [mode_of(0.5)]),
    (4, pipeline_settings(3, 4, "1f1b", pp=2, dp_shard=2), [mode_of(1.0)]),
]


@pytest.mark.parametrize(
    ("world", "config", "modes"),
    proof_after(2, PIPELINES, name=lambda world, config, modes: named(config)),
)
def test_offload_in_a_pipeline_changes_no_bit(pool, tmp_path, world, config, modes):
    """A backward in two parts reads what was stored twice."""
    check_same_bits(pool, world, "llama", config, modes, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_tensor_parallelism(pool, tmp_path, schedule):
    modes = [mode_of(fraction, mode) for fraction in (0.5, 1.0) for mode in ("none", "full")]
    config = pipeline_settings(0, 4, schedule, pp=2, tp=2)
    check_same_bits(pool, 4, "llama", config, modes, tmp_path)


def activation_bytes(rank, world, config):
    """Return the measured and the predicted bytes after a forward. Runs on every rank."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    technique = resolve(load(config), world_size=1).activation_offload
    prediction = rank_activations(
        Parts(model, ("model.layers.0", "model.layers.1")),
        mesh=build_mesh(Layout()),
        batch=token_batch(2, 8),
        techniques=ActivationTechniques(activation_offload=technique),
    )
    facts = prediction[0].stages[0]
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    ids = torch.arange(16).view(2, 8)
    measured = measure_activations(engine, {"input_ids": ids, "labels": ids})
    modes = engine.parts.recompute_modes
    assert facts.stored(modes) > 0
    return measured, {"activations": facts.saved(modes), "logits": facts.modes["none"].head}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_measured_bytes_are_predicted(pool, tmp_path, fraction, mode):
    offload = {"fraction": fraction, "device": "disk", "path": str(tmp_path)}
    config = settings(1, 1, 0, 1, 1, recompute={"mode": mode}, activation_offload=offload)
    measured, predicted = pool.run(1, activation_bytes, config)[0]
    assert {name: measured[name] for name in predicted} == predicted
