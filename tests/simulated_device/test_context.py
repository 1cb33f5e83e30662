"""Parts of sequences on simulated GPUs: each kind of context parallelism, with attention in tiles and the order of NCCL's messages."""

from __future__ import annotations

import pytest

from plait.verify.parity import compare, worst
from tests.parity.context_parallel import Case, reference, train
from tests.simulated_device.conftest import Row
from tests.simulated_device.pool import SimulatedPool

CASES = [
    Case("all-gather-kv", "packed", "mistral", window=True, stage=2),
    Case("ring", "uneven", "llama", stage=3, more=(("recompute", {"mode": "full"}),)),
    Case("ulysses", "padded", "qwen3", stage=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_sequences(simulated: SimulatedPool, row: Row, case: Case) -> None:
    """Losses, gradients, norms and weights are those of one process on the CPU, on both ranks."""
    found = [worst(compare(reference(case), trace)) for trace in simulated.run(case.world, train, case)]
    assert all(difference.ok(1e-10) for difference in found), found
    row(f"cp 2 ({case.kind}), {case.data} rows, ZeRO {case.stage}", "one process on the CPU", max(difference.error for difference in found))
