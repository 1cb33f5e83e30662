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
from tests.covers import proof_after
from tests.parity import cases, flash
from tests.parity.experts import (
    assert_equal,
    biases,
    build,
    case_of,
    cases_of,
    configured,
    steps,
)

FLEX = cases_of("""
    gemma2 cp2 uneven window all-gather-kv full
    mistral cp2 packed window ring
    llama zero3 cp2 dp2 packed ulysses
    deepseek_v3 zero1 cp2 ep2 packed ring full
    gpt_oss cp2 uneven ring
    gemma3_text cp4 packed window all-gather-kv
    llama cp2 tp2 border ring sequence
    mixtral cp2 pp2 padded balance window ulysses
    llama cp4 one_target kv1 ring
""")
FLASH = cases_of("""
    mistral cp2 packed window ulysses
    gemma2 zero3 cp2 uneven window ulysses full
    deepseek_v3 cp2 packed ulysses
    llama cp4 packed kv1 ulysses
    mixtral zero1 cp2 ep2 dp2 padded balance window ulysses
    llama cp2 tp2 border ulysses sequence
    qwen3_moe zero2 cp2 pp2 packed balance ulysses full
""")


def trained(case, implementation):
    model: Any = build(case)
    model.config._attn_implementation_internal = (
        implementation  # which Transformers allows where it is installed
    )
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(case, 2 * engine.dp_size))
        engine.eval_batch(steps(case, 2)[0][0])
    return trace, biases(model)


def with_flex(rank, world, case):
    """Runs in a worker."""
    with flash.flex_backward():
        return trained(case, "flex_attention")


def with_flash(rank, world, case):
    """Runs in a worker."""
    with flash.installed():
        return trained(case, "flash_attention_2")


@pytest.mark.parametrize("case", proof_after(0, FLEX, name=lambda case: case.name))
def test_flex_attention(pool, case):
    """torch's own, uncompiled."""
    assert_equal(case, pool.run(case.world, with_flex, case))


@pytest.mark.parametrize("case", proof_after(1, FLASH, name=lambda case: case.name))
def test_flash_attention(pool, case):
    """Through Transformers, with a package of its interface."""
    assert_equal(case, pool.run(case.world, with_flash, case))


def other_documents(rank, world, case):
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

    def counted(starts, device):
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


@pytest.mark.parametrize(
    "words",
    proof_after(1, ["cp2 selective", "cp2", "cp2 full", "cp2 pp2 full", "cp2 pp2 selective"]),
)
def test_documents_are_found_once_per_micro_batch(pool, words):
    """In none of the layers, nor in their recomputation; each micro-batch has its own."""
    case = case_of(f"llama packed ulysses {words}")
    for counts, found, expected in pool.run(case.world, other_documents, case):
        # Two micro-batches a step, three evaluations; none for SDPA.
        assert counts == [2, 4, 7, 0, 0, 0]
        assert found == pytest.approx(expected, rel=1e-10)
        assert found[0] == found[2] != found[1]
