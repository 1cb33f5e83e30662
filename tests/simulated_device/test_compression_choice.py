"""Choice of compression by step time: the host waits for the device only until the decision."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import plait
from plait.cluster import accelerator
from plait.parallel.data import compression
from plait.parallel.data.compression import CompressionAutotuner
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.simulated_device.runs import config_of, micro_batches_of

SECONDS = {"int8": 0.5, "int4": 0.49}
"""Time of a step by candidate. int4 saves less than a twentieth of the time with int8."""


def decided(rank, world, stage, uncompressed_seconds=1.0):
    """Train for more steps than the decision needs. Runs on every rank."""
    config = config_of(world, stage, parallel={"compress_gradients": "auto"})
    model = cases.build("llama", tied=True, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    tuner = engine.hooks.find(CompressionAutotuner)
    assert tuner is not None and engine.device.type == accelerator.NAME
    batch = micro_batches_of(engine, cases.ragged_steps(engine.dp_size * 2, steps=1)[0])
    clock = 0.0
    waits = 0
    losses = []
    decided_at = []

    def now():
        nonlocal clock
        clock += uncompressed_seconds if tuner._active is None else SECONDS[tuner._active.name]
        return clock

    def synchronize(device):
        nonlocal waits
        waits += 1
        accelerator.synchronize(device)

    with (
        patch.object(compression, "time", SimpleNamespace(perf_counter=now)),
        patch.object(compression, "accelerator", wraps=accelerator) as watched,
    ):
        watched.synchronize.side_effect = synchronize
        for step in range(24):
            result = engine.train_batch(batch)
            losses.append(float(result.loss))
            if result.decided:
                decided_at.append(step)
    with count_traffic() as traffic:
        engine.train_batch(batch)
    engine.close()
    return {
        "code": int(tuner.decision),
        "losses": losses,
        "decided_at": decided_at,
        "waits": waits,
        "sent": sorted(map(str, traffic.dtypes("reduce_scatter"))),
    }


@pytest.mark.parametrize("stage", [0, 2])
def test_all_ranks_choose_by_step_time(simulated, stage):
    first, second = simulated.run(2, decided, stage)
    assert first == second
    assert first["code"] == 8
    (step,) = first["decided_at"]
    assert first["waits"] == step + 1 < 24, "one per step, and none after the decision"


def test_uncompressed_gradients_are_restored(simulated):
    """Candidates that save no time are removed from the sharded units."""
    first, second = simulated.run(2, decided, 2, 0.1)
    assert first == second
    assert first["code"] == 0
    assert first["sent"] == ["torch.float32"]
