"""Context parallelism with FlexAttention and FlashAttention equals SDPA in one process.

Losses, gradients, norms and weights are compared in float64, with documents, windows, caps, value
heads of another width, and fewer key-value heads than ranks.
"""

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


def model_with(case, implementation):
    model: Any = build(case)
    # Transformers' public setter refuses implementations that need a GPU.
    model.config._attn_implementation_internal = implementation
    return model


KERNELS = {"flex_attention": flash.flex_backward, "flash_attention_2": flash.installed}


def trained(rank, world, case, implementation):
    """Return the trace and the router biases of a run. Runs on every rank."""
    with KERNELS[implementation]():
        model = model_with(case, implementation)
        with keeping_float64(model):
            engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
            trace = engine_trace(engine, steps(case, 2 * engine.dp_size))
            engine.eval_batch(steps(case, 2)[0][0])
        return trace, biases(model)


@pytest.mark.parametrize("case", proof_after(0, FLEX, name=lambda case: case.name))
def test_flex_attention(pool, case):
    """torch's own implementation, uncompiled."""
    assert_equal(case, pool.run(case.world, trained, case, "flex_attention"))


@pytest.mark.parametrize("case", proof_after(1, FLASH, name=lambda case: case.name))
def test_flash_attention(pool, case):
    """Transformers calls a package with FlashAttention's interface."""
    assert_equal(case, pool.run(case.world, trained, case, "flash_attention_2"))


def evaluations(rank, world, case):
    """Train two steps and evaluate three micro-batches with FlashAttention and with SDPA.

    Returns the number of document searches after each phase, and the losses of both. Runs on every
    rank.
    """
    # Two batches of one shape, with documents of different lengths.
    batches = []
    for border in (5, 9):
        ids = torch.arange(2 * 16).view(2, 16) % cases.VOCABULARY
        positions = torch.arange(16).repeat(2, 1)
        positions[:, border:] -= border
        batches.append({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})

    searches: list[str] = []
    from_starts = PackedDocuments.from_starts

    def count_search(starts, device):
        searches.append(starts.device.type)
        return from_starts(starts, device)

    counts = []
    losses = []
    with flash.installed(), pytest.MonkeyPatch.context() as monkeypatch:
        # A search per layer has the same result, so only its calls show it.
        monkeypatch.setattr(PackedDocuments, "from_starts", count_search)
        for implementation in ("flash_attention_2", "sdpa"):
            searches.clear()
            model = model_with(case, implementation)
            with keeping_float64(model):
                engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
                for _ in range(2):
                    engine.train_batch(list(batches))
                    counts.append(len(searches))
                results = [engine.eval_batch(batch) for batch in (*batches, batches[0])]
                counts.append(len(searches))
            losses.append([total for total, _ in results])
    return counts, *losses


@pytest.mark.parametrize(
    "layout",
    proof_after(1, ["cp2 selective", "cp2", "cp2 full", "cp2 pp2 full", "cp2 pp2 selective"]),
)
def test_documents_are_found_once_per_micro_batch(pool, layout):
    """Neither layers nor their recomputation search again, and micro-batches share nothing."""
    case = case_of(f"llama packed ulysses {layout}")
    for counts, losses, expected in pool.run(case.world, evaluations, case):
        # A step has two micro-batches, and there are three evaluations. SDPA needs no search.
        assert counts == [2, 4, 7, 0, 0, 0]
        assert losses == pytest.approx(expected, rel=1e-10)
        assert losses[0] == losses[2] != losses[1]
