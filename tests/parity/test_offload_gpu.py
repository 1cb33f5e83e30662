"""Offload to host memory on a real GPU: run with `pytest -m gpu`. What the CPU tests cannot show: pinned buffers, side streams, and the
optimizer's kernels on the host."""

import pytest
import torch

from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same
from tests.parity.digests import digest
from tests.parity.tensor_parallel import settings

pytestmark = pytest.mark.gpu


def trace(rank, world, config):
    """(trace, the most bytes of the device). Runs in a worker."""
    torch.cuda.reset_peak_memory_stats()
    engine = cases.engine(cases.build("llama", tied=True, dtype=torch.float32), config)
    found = engine_trace(engine, cases.ragged_steps(2))
    return found, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_activations_on_the_host_change_no_bit(pool, mode):
    """Half of the blocks, and all."""
    plain, _ = pool.run(1, trace, settings(1, 1, 3, 1, 2, recompute={"mode": mode}))[0]
    for fraction in (0.5, 1.0):
        config = settings(
            1, 1, 3, 1, 2, recompute={"mode": mode}, activation_offload={"fraction": fraction}
        )
        assert digest(pool.run(1, trace, config)[0][0]) == digest(plain)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_on_the_host(pool, stage):
    """The host's AdamW rounds otherwise than the device's; less of the device is taken."""
    config = {**settings(1, 1, stage, 1, 2), "bf16": {"enabled": True}}
    plain, whole = pool.run(1, trace, config)[0]
    config["zero_optimization"] = {
        **config["zero_optimization"],
        "offload_optimizer": {"device": "cpu"},
    }
    found, less = pool.run(1, trace, config)[0]
    assert_same(plain, found, bar=1e-4)
    assert less < whole


@pytest.mark.parametrize("stage", [1, 3])
def test_a_share_of_the_states_on_the_host(pool, stage):
    """`ratio`: between none and all, in bytes of the device; parameters and states of both kinds in one step."""
    config = {**settings(1, 1, stage, 1, 2), "bf16": {"enabled": True}}
    plain, most = pool.run(1, trace, config)[0]
    taken = []
    for ratio in (0.4, 1):
        config["zero_optimization"] = {
            **config["zero_optimization"],
            "offload_optimizer": {"device": "cpu", "ratio": ratio},
        }
        found, size = pool.run(1, trace, config)[0]
        assert_same(plain, found, bar=1e-4)
        taken.append(size)
    assert taken[1] < taken[0] < most
