"""Offload to host memory on a real GPU: run with `pytest -m gpu`.

These tests use what CPU tests cannot: pinned buffers, side streams, and the optimizer's kernels
on the host.
"""

import pytest
import torch

from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same
from tests.parity.digests import digest
from tests.parity.tensor_parallel import settings

pytestmark = pytest.mark.gpu


def trace_and_peak(rank, world, config):
    """Return the trace, and peak bytes of the device. Runs on every rank."""
    torch.cuda.reset_peak_memory_stats()
    engine = cases.engine(cases.build("llama", tied=True, dtype=torch.float32), config)
    trace = engine_trace(engine, cases.ragged_steps(2))
    return trace, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_activations_on_the_host_change_no_bit(pool, mode):
    """Half of the blocks are offloaded, then all."""
    recompute = {"mode": mode}
    expected, _ = pool.run(1, trace_and_peak, settings(1, 1, 3, 1, 2, recompute=recompute))[0]
    for fraction in (0.5, 1.0):
        offload = {"fraction": fraction}
        config = settings(1, 1, 3, 1, 2, recompute=recompute, activation_offload=offload)
        trace, _ = pool.run(1, trace_and_peak, config)[0]
        assert digest(trace) == digest(expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_on_the_host(pool, stage):
    """The device's peak falls with the share of states on the host.

    AdamW rounds differently on the host and on the device.
    """
    config = {**settings(1, 1, stage, 1, 2), "bf16": {"enabled": True}}
    expected, peak = pool.run(1, trace_and_peak, config)[0]
    peaks = [peak]
    for ratio in (0.4, 1):
        offload = {"device": "cpu", "ratio": ratio}
        zero = {**config["zero_optimization"], "offload_optimizer": offload}
        trace, peak = pool.run(1, trace_and_peak, {**config, "zero_optimization": zero})[0]
        assert_same(expected, trace, bar=1e-4)
        peaks.append(peak)
    assert peaks[0] > peaks[1] > peaks[2]
