"""Experts on different simulated GPUs, with optimizer states and parameters in the host's memory, and with activations there."""

from __future__ import annotations

from typing import Any

import pytest

from plait.verify.parity import compare, worst
from tests.parity.experts import Case, reference, train
from tests.simulated_device.conftest import Row
from tests.simulated_device.pool import SimulatedPool

EP2 = (("ep", 2),)
FULL: tuple[str, Any] = ("recompute", {"mode": "full"})
HOST: tuple[str, Any] = ("activation_offload", {"fraction": 1.0})
CASES = [
    Case("mixtral", 2, EP2, balance=True, dp=2, offload="states", offload_to="cpu"),
    Case("qwen3_moe", 3, EP2, balance=True, dp=2, routed="unused", offload="both", offload_to="cpu", more=(FULL,)),
    Case("mixtral", 1, (("cp", 2), *EP2), dp=2, data="packed", offload="states", offload_to="cpu", more=(("context", "ring"),)),
    Case("mixtral", 3, (("cp", 2), *EP2), dp=1, data="packed", more=(("context", "ulysses"), ("mlp_tile_tokens", 5), FULL, HOST)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts(simulated: SimulatedPool, row: Row, case: Case) -> None:
    """Losses, gradients, norms and weights are those of one process on the CPU, on all ranks."""
    expected, _ = reference(case)
    found = [worst(compare(expected, trace)) for trace, _ in simulated.run(case.world, train, case)]
    assert all(difference.ok(1e-10) for difference in found), found
    row(case.name, "one process on the CPU", max(difference.error for difference in found))
