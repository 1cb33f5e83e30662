"""Context parallelism on simulated GPUs through CUDA's fused kernels equals one CPU process."""

import pytest

from plait.verify.parity import compare, worst
from tests.parity.context_parallel import Case, reference
from tests.simulated_device.attention import train_fused

CASES = [
    (
        Case("ring", "uneven", "llama", stage=3, settings=(("recompute", {"mode": "full"}),)),
        "FLASH_DTYPES",
    ),
    (Case("all-gather-kv", "padded", "mistral", window=True, stage=2), "FLASH_DTYPES"),
    (Case("ring", "border", "mistral", window=True), "FLASH_DTYPES"),
    (Case("ulysses", "padded", "qwen3", stage=1), "FLASH_DTYPES"),
    (Case("all-gather-kv", "causal", "llama"), "EFFICIENT_DTYPES"),
    (Case("ring", "causal", "gpt2"), "EFFICIENT_DTYPES"),
]


@pytest.mark.parametrize(
    ("case", "dtypes"),
    CASES,
    ids=lambda value: value.name if isinstance(value, Case) else value[:5],
)
def test_fused_kernels_compute_parts(simulated, row, case, dtypes):
    """Losses, gradients, norms and weights of a run that calls a fused kernel are compared."""
    name = f"cp 2 ({case.kind}), fused kernels, ZeRO {case.stage}"
    for trace, calls in simulated.run(case.world, train_fused, case, dtypes):
        difference = worst(compare(reference(case), trace))
        assert difference.ok(1e-10) and calls > 0, (difference, calls)
        row(name, "one process on the CPU", difference.error)
