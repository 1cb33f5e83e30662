"""Parts of sequences with FlexAttention and FlashAttention compute what one process does with SDPA: losses, gradients, norm and weights in
float64, with documents, windows, caps, value heads of another width, and fewer key-value heads than ranks."""

from __future__ import annotations

from typing import Any

import pytest

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import flash
from tests.parity.experts import Case, Result, assert_equal, biases, build, configured, steps
from tests.pool import Pool

RING, ULYSSES, GATHERED = ("context", "ring"), ("context", "ulysses"), ("context", "all-gather-kv")
CP2, TP2, FULL = ("cp", 2), ("tp", 2), ("recompute", {"mode": "full"})
FLEX = [Case("gemma2", degrees=(CP2,), data="uneven", window=True, more=(GATHERED, FULL))]
MORE_FLEX = [
    Case("mistral", degrees=(CP2,), data="packed", window=True, more=(RING,)),
    Case("llama", 3, (CP2,), dp=2, data="packed", more=(ULYSSES,)),
    Case("deepseek_v3", 1, (CP2, ("ep", 2)), data="packed", more=(RING, FULL)),
    Case("gpt_oss", degrees=(CP2,), data="uneven", more=(RING,)),
    Case("gemma3_text", degrees=(("cp", 4),), data="packed", window=True, more=(GATHERED,)),
    Case("llama", degrees=(CP2, TP2), data="border", more=(RING, ("sequence_parallel", True))),
    Case("mixtral", degrees=(CP2, ("pp", 2)), data="padded", balance=True, window=True, more=(ULYSSES,)),
    Case("llama", degrees=(("cp", 4),), data="one_target", kv_heads=1, more=(RING,)),
]
FLASH = [
    Case("mistral", degrees=(CP2,), data="packed", window=True, more=(ULYSSES,)),
    Case("gemma2", 3, (CP2,), data="uneven", window=True, more=(ULYSSES, FULL)),
    Case("deepseek_v3", degrees=(CP2,), data="packed", more=(ULYSSES,)),
]
MORE_FLASH = [
    Case("llama", degrees=(("cp", 4),), data="packed", kv_heads=1, more=(ULYSSES,)),
    Case("mixtral", 1, (CP2, ("ep", 2)), dp=2, data="padded", balance=True, window=True, more=(ULYSSES,)),
    Case("llama", degrees=(CP2, TP2), data="border", more=(ULYSSES, ("sequence_parallel", True))),
    Case("qwen3_moe", 2, (CP2, ("pp", 2)), data="packed", balance=True, more=(ULYSSES, FULL)),
]


def trained(case: Case, implementation: str) -> Result:
    model: Any = build(case)
    model.config._attn_implementation_internal = implementation  # which Transformers allows where it is installed
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(case, 2 * engine.dp_size))
        engine.eval_batch(steps(case, 2)[0][0])
    return trace, biases(model)


def with_flex(rank: int, world: int, case: Case) -> Result:
    """Runs in a worker."""
    with flash.flex_backward():
        return trained(case, "flex_attention")


def with_flash(rank: int, world: int, case: Case) -> Result:
    """Runs in a worker."""
    with flash.installed():
        return trained(case, "flash_attention_2")


@pytest.mark.parametrize("case", FLEX, ids=lambda case: case.name)
def test_flex_attention(pool: Pool, case: Case) -> None:
    """torch's own, uncompiled."""
    assert_equal(case, pool.run(case.world, with_flex, case))


@pytest.mark.parametrize("case", FLASH, ids=lambda case: case.name)
def test_flash_attention(pool: Pool, case: Case) -> None:
    """Through Transformers, with a package of its interface."""
    assert_equal(case, pool.run(case.world, with_flash, case))


@pytest.mark.proof
@pytest.mark.parametrize("case", MORE_FLEX, ids=lambda case: case.name)
def test_flex_attention_with_more(pool: Pool, case: Case) -> None:
    """With sinks, tp, ep and pp."""
    assert_equal(case, pool.run(case.world, with_flex, case))


@pytest.mark.proof
@pytest.mark.parametrize("case", MORE_FLASH, ids=lambda case: case.name)
def test_flash_attention_with_more(pool: Pool, case: Case) -> None:
    """With repeated key-value heads, tp, ep and pp."""
    assert_equal(case, pool.run(case.world, with_flash, case))
