"""Parts of sequences with FlexAttention and FlashAttention compute what one process does with SDPA: losses, gradients, norm and weights in
float64, with documents, windows, caps, value heads of another width, and fewer key-value heads than ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.parallel.context.attention_function import PackedDocuments
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import cases, flash
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
    Case(
        "mixtral",
        degrees=(CP2, ("pp", 2)),
        data="padded",
        balance=True,
        window=True,
        more=(ULYSSES,),
    ),
    Case("llama", degrees=(("cp", 4),), data="one_target", kv_heads=1, more=(RING,)),
]
FLASH = [
    Case("mistral", degrees=(CP2,), data="packed", window=True, more=(ULYSSES,)),
    Case("gemma2", 3, (CP2,), data="uneven", window=True, more=(ULYSSES, FULL)),
    Case("deepseek_v3", degrees=(CP2,), data="packed", more=(ULYSSES,)),
]
MORE_FLASH = [
    Case("llama", degrees=(("cp", 4),), data="packed", kv_heads=1, more=(ULYSSES,)),
    Case(
        "mixtral",
        1,
        (CP2, ("ep", 2)),
        dp=2,
        data="padded",
        balance=True,
        window=True,
        more=(ULYSSES,),
    ),
    Case("llama", degrees=(CP2, TP2), data="border", more=(ULYSSES, ("sequence_parallel", True))),
    Case("qwen3_moe", 2, (CP2, ("pp", 2)), data="packed", balance=True, more=(ULYSSES, FULL)),
]


def trained(case: Case, implementation: str) -> Result:
    model: Any = build(case)
    model.config._attn_implementation_internal = (
        implementation  # which Transformers allows where it is installed
    )
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


def other_documents(
    rank: int, world: int, case: Case
) -> tuple[list[int], list[float], list[float]]:
    """How often documents are looked for in two steps and two evaluations; the evaluations' losses with FlashAttention, and with SDPA.
    Runs in a worker."""
    pieces = []
    for at in (5, 9):  # of the same shape, with documents of other lengths
        ids = torch.arange(2 * 16).view(2, 16) % cases.VOCABULARY
        positions = torch.arange(16).repeat(2, 1)
        positions[:, at:] -= at
        pieces.append({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})
    counts, losses, called = [], [], []
    find = PackedDocuments.from_starts

    def counted(starts: torch.Tensor, device: torch.device) -> PackedDocuments:
        called.append(starts.device.type)
        return find(starts, device)

    with flash.installed(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PackedDocuments, "from_starts", counted)
        for implementation in ("flash_attention_2", "sdpa"):
            model: Any = build(case)
            model.config._attn_implementation_internal = implementation
            with keeping_float64(model):
                engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
                for _ in range(2):
                    engine.train_batch(list(pieces))
                    counts.append(len(called))
                found = [engine.eval_batch(piece) for piece in (*pieces, pieces[0])]
                counts.append(len(called))
            losses.append([total for total, _ in found])
            called.clear()
    return counts, *losses


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("degrees", [(CP2,), (CP2, ("pp", 2))], ids=["cp2", "cp2-pp2"])
def test_documents_are_found_once_per_micro_batch(
    pool: Pool, mode: str, degrees: tuple[tuple[str, int], ...]
) -> None:
    """In none of the layers, nor in their recomputation; each micro-batch has its own."""
    case = Case(
        "llama", degrees=degrees, data="packed", more=(ULYSSES, ("recompute", {"mode": mode}))
    )
    for counts, found, expected in pool.run(case.world, other_documents, case):
        assert counts == [
            2,
            4,
            7,
            0,
            0,
            0,
        ]  # two micro-batches a step, three evaluations; none for SDPA
        assert found == pytest.approx(expected, rel=1e-10)
        assert found[0] == found[2] != found[1]


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
