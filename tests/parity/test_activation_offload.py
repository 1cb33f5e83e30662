"""Saved tensors that went through files change no bit, and leave the memory that was foretold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import ActivationTechniques, rank_activations, token_batch
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.parallel.parts import Parts
from plait.verify.parity import engine_trace
from tests.measured.memory import measure_activations
from tests.parity import cases
from tests.parity.digests import build, digest
from tests.parity.pipelines import SCHEDULES, named
from tests.parity.pipelines import settings as pipeline_settings
from tests.parity.tensor_parallel import settings


def digests(rank, world, kind, config, more, folder):
    """Runs in a worker."""
    found = []
    for offload in ({}, *more):
        section = dict(offload)
        recompute = section.pop("recompute", {})
        if section:
            section |= {"device": "disk", "path": folder}
        file = {
            **config,
            "parallel": {
                **config["parallel"],
                "recompute": recompute,
                "activation_offload": section,
            },
        }
        axes = config["parallel"]
        model = build(
            kind,
            torch.float64,
            dropout=not axes.get("sequence_parallel"),
            layers=4 if axes.get("pp", 1) > 1 else None,
        )
        engine = plait.initialize(model, file, loss_fn=plait.causal_lm_loss)
        assert (engine.hooks.find(OffloadedActivations) is not None) == bool(section)
        dp = world // (axes.get("tp", 1) * axes.get("pp", 1))
        found.append(
            digest(
                engine_trace(engine, cases.ragged_steps(dp * config["gradient_accumulation_steps"]))
            )
        )
    return found


@pytest.mark.parametrize(
    ("kind", "tp", "stage", "sequence"),
    [("gpt2", 1, 0, False), ("llama", 1, 3, False), ("llama", 2, 0, False), ("qwen3", 2, 0, True)],
)
def test_same_bits(pool, tmp_path, kind, tp, stage, sequence):
    """Half of the blocks, all of them, and with recompute."""
    more: list[dict[str, Any]] = [
        {"fraction": 0.5},
        {"fraction": 1.0, "recompute": {"mode": "full" if sequence or stage else "selective"}},
    ]
    for found in pool.run(
        2, digests, kind, settings(2, tp, stage, 1, 2, sequence), more, str(tmp_path)
    ):
        assert found == [found[0]] * (1 + len(more))


PIPELINES: list[tuple[int, dict[str, Any], list[dict[str, Any]]]] = [
    (
        2,
        pipeline_settings(0, 4, "interleaved-1f1b", pp=2),
        [{"fraction": 0.5}, {"fraction": 1.0, "recompute": {"mode": "full"}}],
    ),
    (
        2,
        pipeline_settings(0, 4, "zbv", pp=2),
        [{"fraction": 1.0}, {"fraction": 0.5, "recompute": {"mode": "selective"}}],
    ),
    (4, pipeline_settings(3, 4, "1f1b", pp=2, dp_shard=2), [{"fraction": 1.0}]),
    (4, pipeline_settings(2, 4, "dualpipev", pp=2, dp_shard=2), [{"fraction": 0.5}]),
]
MODES: list[dict[str, Any]] = [
    {"fraction": share, "recompute": {"mode": mode}}
    for share in (0.5, 1.0)
    for mode in ("none", "full")
]


@pytest.mark.parametrize(
    ("world", "config", "more"),
    [
        pytest.param(
            *case,
            id=named(case[1]),
            marks=pytest.mark.proof if named(case[1]).startswith(("interleaved", "1f1b")) else (),
        )
        for case in PIPELINES
    ],
)
def test_in_a_pipeline(pool, tmp_path, world, config, more):
    """Several micro-batches on their way, several stages on a rank, backwards in halves, which ask for what was stored twice."""
    for found in pool.run(world, digests, "llama", config, more, str(tmp_path)):
        assert found == [found[0]] * (1 + len(more))


@pytest.mark.proof
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_every_pipeline(pool, tmp_path, schedule):
    """Every schedule, with tensor parallelism."""
    for found in pool.run(
        4, digests, "llama", pipeline_settings(0, 4, schedule, pp=2, tp=2), MODES, str(tmp_path)
    ):
        assert found == [found[0]] * (1 + len(MODES))


def held(rank, world, config):
    """(measured, foretold) bytes. Runs in a worker."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    names = ("model.layers.0", "model.layers.1")
    from plait.cluster.layout import Layout
    from plait.cluster.mesh import build_mesh

    technique = resolve(load(config), world_size=1).activation_offload
    (foretold,) = rank_activations(
        Parts(model, names),
        mesh=build_mesh(Layout()),
        batch=token_batch(2, 8),
        techniques=ActivationTechniques(activation_offload=technique),
    )
    (facts,) = foretold.stages
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    ids = torch.arange(16).view(2, 8)
    measured = measure_activations(engine, {"input_ids": ids, "labels": ids})
    modes = engine.parts.recompute_modes
    assert facts.stored(modes) > 0
    return measured, {"activations": facts.saved(modes), "logits": facts.modes["none"].head}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_account(pool, tmp_path, fraction, mode):
    """To the byte."""
    offload = {"fraction": fraction, "device": "disk", "path": str(tmp_path)}
    measured, foretold = pool.run(
        1, held, settings(1, 1, 0, 1, 1, recompute={"mode": mode}, activation_offload=offload)
    )[0]
    assert {name: measured[name] for name in foretold} == foretold
