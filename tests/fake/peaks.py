"""Predicted and measured peak memory of a step on a rank of a fake world."""

import pytest
import torch

import plait
from plait.cluster.mesh import build_mesh
from plait.dryrun.predicted_peak import predict_peak_on
from plait.parallel.accounting.peak import PEAK_KINDS
from tests.fake.worlds import batch, resolved_of, world_of
from tests.measured.memory import measure_peak
from tests.parity import cases

SAMPLES = 2
LENGTH = 32
TOLERANCE = 0.02
"""The predictor promises 2 %."""


def settings(*, stage, tp=1, accumulation=1, bf16=False, recompute="none", **sections):
    """Return a configuration of two data-parallel ranks. `sections` are added to it."""
    degrees = {"dp_replicate": 1, "dp_shard": 2} if stage else {"dp_replicate": 2, "dp_shard": 1}
    parallel = {"tp": tp, **degrees, "recompute": {"mode": recompute}}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "bf16": {"enabled": bf16},
        **sections,
        "parallel": {**parallel, **sections.get("parallel", {})},
    }


def predicted_and_measured(start, kind, config, *, tied=False):
    """Return the predicted and the measured peak of rank 0."""
    start(world_of(config))
    resolved = resolved_of(config)
    model = cases.build(kind, tied=tied, dtype=torch.float32)
    mesh = build_mesh(resolved.layout)
    predicted = predict_peak_on(mesh, model, resolved, samples=SAMPLES, length=LENGTH)

    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    data = batch(config["gradient_accumulation_steps"], samples=SAMPLES, length=LENGTH)
    return predicted, measure_peak(engine, data)


def check(predicted, measured):
    """Compare the prediction with both measurements, and with the sum of its kinds."""
    peak = predicted.peak
    assert peak.peak_bytes == pytest.approx(measured.torch_bytes, rel=TOLERANCE), peak
    assert measured.dry_run_bytes == pytest.approx(measured.torch_bytes, rel=0.005)
    assert sum(peak.kinds.values()) == peak.peak_bytes == max(peak.phases.values())
    assert set(peak.kinds) == set(PEAK_KINDS)
