"""The most that a rank of a fake world holds in a step: foretold, and measured."""

import pytest
import torch

import plait
from plait.cluster.mesh import build_mesh
from plait.dryrun.predicted_peak import predict_peak_on
from plait.parallel.accounting.peak import PEAK_KINDS
from tests.fake.worlds import batch, resolved_of, world_of
from tests.measured.memory import measure_peak
from tests.parity import cases

SAMPLES, LENGTH = 2, 32

TOLERANCE = 0.02


def settings(*, stage, tp=1, accumulation=1, bf16=False, recompute="none", **more):
    """Two data-parallel ranks."""
    parallel = {
        "tp": tp,
        "dp_replicate": 1 if stage else 2,
        "dp_shard": 2 if stage else 1,
        "recompute": {"mode": recompute},
    }
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": cases.OPTIMIZER,
        "bf16": {"enabled": bf16},
        **more,
        "parallel": {**parallel, **more.get("parallel", {})},
    }


def predicted_and_measured(start, kind, config, *, tied=False):
    """On rank 0."""
    start(world_of(config))
    resolved = resolved_of(config)
    model = cases.build(kind, tied=tied, dtype=torch.float32)
    predicted = predict_peak_on(
        build_mesh(resolved.layout), model, resolved, samples=SAMPLES, length=LENGTH
    )
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    return predicted, measure_peak(
        engine, batch(config["gradient_accumulation_steps"], samples=SAMPLES, length=LENGTH)
    )


def check(predicted, measured):
    """Within the tolerance of both measures, and the sum of its kinds."""
    peak = predicted.peak
    assert peak.peak_bytes == pytest.approx(measured.torch_bytes, rel=TOLERANCE), peak
    assert measured.own_bytes == pytest.approx(measured.torch_bytes, rel=0.005)
    assert sum(peak.kinds.values()) == peak.peak_bytes == max(peak.phases.values())
    assert set(peak.kinds) == set(PEAK_KINDS)
