"""The choice of compression by step time on simulated devices: the host waits for the device only until it has decided."""

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
from tests.simulated_device.runs import config_of

SECONDS = {"int8": 0.5, "int4": 0.49}
"""Of a step by its candidate; int4 saves less than a twentieth of int8's."""


def decided(rank, world, stage, uncompressed_seconds=1.0):
    """Steps until the decision, and two more. Runs in a worker."""
    config = config_of(world, stage, parallel={"compress_gradients": "auto"})
    engine = plait.initialize(
        cases.build("llama", tied=True, dtype=torch.float32), config, loss_fn=plait.causal_lm_loss
    )
    tuner = engine.hooks.find(CompressionAutotuner)
    assert tuner is not None and engine.device.type == accelerator.NAME
    batch = cases.ragged_steps(engine.dp_size * 2, steps=1)[0][
        2 * engine.dp_rank : 2 * engine.dp_rank + 2
    ]
    clock, waits, losses, decided_at = 0.0, 0, [], []

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
    sent = sorted(
        {str(call.dtype) for call in traffic.calls if call.kind in ("reduce_scatter", "all_to_all")}
    )
    engine.close()
    return {
        "code": int(tuner.decision),
        "losses": losses,
        "decided_at": decided_at,
        "waits": waits,
        "sent": sent,
    }


@pytest.mark.parametrize("stage", [0, 2])
def test_all_ranks_choose_by_step_time(simulated, stage):
    first, second = simulated.run(2, decided, stage)
    assert first == second
    assert first["code"] == 8
    (step,) = first["decided_at"]
    assert first["waits"] == step + 1 < 24, "one per step, and none after the decision"


def test_uncompressed_gradients_are_restored(simulated):
    """Candidates that save nothing are taken out of the sharded units again."""
    first, second = simulated.run(2, decided, 2, 0.1)
    assert first == second
    assert first["code"] == 0
    assert first["sent"] == ["torch.float32"]
