"""Bytes of experts on different ranks: what one rank of a fake world holds and sends is the ledger's, up to DeepSeek-V3 on 2,048 ranks."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config.resolving.resolve import load, resolve
from plait.engine.single_rank import SingleRankRun, run_single_rank
from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.pipeline.estimates import facts_of_rank

RECORDED = Path(__file__).parents[2] / "benchmarks/results/deepseek_v3.json"
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "first_k_dense_replace": 1,
    "vocab_size": 640,
}


def single_rank_run(
    sizes: dict[str, Any], degrees: dict[str, int], *, stage: int, rank: int, length: int
) -> tuple[SingleRankRun, Ledger]:
    """One step of two micro-batches of a DeepSeek-V3, and its ledger."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model("deepseek_v3", use_cache=False, **sizes)
        model = AutoModelForCausalLM.from_config(
            config, experts_implementation="grouped_mm" if stage else "batched_mm"
        )
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": stage > 0},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW"},
        "parallel": degrees,
    }
    resolved = resolve(
        load(file), world_size=prod(degree for axis, degree in degrees.items() if axis != "ep")
    )
    layout, blocks = resolved.layout, find_blocks(model)
    plan = make_plan(model, tp=layout.tp, blocks=blocks) if layout.tp > 1 else None
    own, at = model_facts(model, blocks, tensor_plan=plan), layout.coordinates(rank)
    pipeline = resolved.pipeline.plan(resolved.context(model=model, blocks=blocks))
    if pipeline is not None:
        own = facts_of_rank(own, pipeline.cut, pipeline.schedule.stages_of(at["pp"]))
    ledger = account_all(
        resolved.techniques, Ledger.of_rank(layout, at, accumulation=2, tokens=length), own
    )
    return run_single_rank(model, resolved, rank=rank, samples=1, length=length), ledger


def check(found: SingleRankRun, ledger: Ledger, *, ep: int) -> None:
    measured = {
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
    }
    assert measured == {kind: int(ledger.memory[kind][0]) for kind in measured}
    assert {sent.ranks for sent in found.traffic if sent.axis == "ep"} == {ep}


@pytest.mark.parametrize(
    ("degrees", "stage", "rank"),
    [
        ({"dp_shard": 8, "ep": 4}, 1, 5),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, 1, 5),
        pytest.param({"cp": 2, "tp": 2, "ep": 4}, 0, 3, marks=pytest.mark.proof),
        pytest.param({"dp_shard": 4, "cp": 2, "ep": 2}, 3, 5, marks=pytest.mark.proof),
        pytest.param({"dp_replicate": 8, "ep": 4}, 0, 7, marks=pytest.mark.proof),
        pytest.param({"pp": 2, "dp_shard": 8, "ep": 8}, 2, 12, marks=pytest.mark.proof),
    ],
)
def test_holds_and_sends_its_account(degrees: dict[str, int], stage: int, rank: int) -> None:
    """States, and what is sent to other experts and to ranks with the same ones."""
    found, ledger = single_rank_run(SMALL, degrees, stage=stage, rank=rank, length=64)
    check(found, ledger, ep=degrees["ep"])
    if "pp" not in degrees:
        sums = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
        for sent in found.traffic:
            if sent.kind in sums:
                sums[sent.kind] += sent.wire_bytes
        assert sums == {kind: int(ledger.traffic.get(kind, [0])[0]) for kind in sums}


@pytest.mark.proof
@pytest.mark.parametrize("rank", [0, 640, 2047])
def test_deepseek_v3(rank: int) -> None:
    """671 billion parameters in the published layout: 16 stages, 64 ranks with different experts, ZeRO stage 1 (arXiv:2412.19437); and what
    is recorded of it."""
    found, ledger = single_rank_run(
        {}, {"pp": 16, "dp_shard": 128, "ep": 64}, stage=1, rank=rank, length=4096
    )
    measured = {
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
    }
    assert measured == {kind: int(ledger.memory[kind][0]) for kind in measured}
    sent: Counter[str] = Counter()
    for one in found.traffic:
        sent[one.axis] += one.wire_bytes
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["bytes_of_rank"][str(rank)]
    assert {**measured, "sent": dict(sent)} == recorded


def test_grouped_products_in_float32() -> None:
    """torch would end the dry run with an error of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("deepseek_v3", **SMALL), experts_implementation="grouped_mm"
        )
    resolved = resolve(load({"train_micro_batch_size_per_gpu": 1}), world_size=2)
    with pytest.raises(
        ModelError,
        match="computes its experts in float32 by torch's grouped_mm, .* set bf16.enabled = true",
    ):
        run_single_rank(model, resolved, rank=0, samples=1, length=8)
