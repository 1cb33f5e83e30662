"""Bytes of experts on different ranks: what one rank of a fake world holds and sends is the ledger's, up to DeepSeek-V3 on 2,048 ranks."""

import json
from collections import Counter
from pathlib import Path

import pytest

from plait.errors import ModelError
from tests.fake.worlds import check_states, single_rank

RECORDED = Path(__file__).parents[2] / "benchmarks/results/deepseek_v3.json"
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 64, "intermediate_size": 128, "first_k_dense_replace": 1, "vocab_size": 640,
}  # fmt: skip


def run(sizes, degrees, *, stage, rank, length, experts=None):
    """One step of two micro-batches of a DeepSeek-V3, and its ledger."""
    config = {
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": stage > 0},
        "zero_optimization": {"stage": stage},
        "parallel": degrees,
    }
    implementation = experts or ("grouped_mm" if stage else "batched_mm")
    return single_rank(
        "deepseek_v3",
        {"use_cache": False, **sizes},
        config,
        rank=rank,
        length=length,
        experts_implementation=implementation,
    )


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
def test_holds_and_sends_its_account(degrees, stage, rank):
    """States, and what is sent to other experts and to ranks with the same ones."""
    found, ledger = run(SMALL, degrees, stage=stage, rank=rank, length=64)
    check_states(found, ledger)
    assert {sent.ranks for sent in found.traffic if sent.axis == "ep"} == {degrees["ep"]}
    if "pp" not in degrees:
        sums = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
        for sent in found.traffic:
            if sent.kind in sums:
                sums[sent.kind] += sent.wire_bytes
        assert sums == {kind: int(ledger.traffic.get(kind, [0])[0]) for kind in sums}


@pytest.mark.proof
@pytest.mark.parametrize("rank", [0, 640, 2047])
def test_deepseek_v3(rank):
    """671 billion parameters in the published layout: 16 stages, 64 ranks with different experts, ZeRO stage 1 (arXiv:2412.19437); and what
    is recorded of it."""
    found, ledger = run({}, {"pp": 16, "dp_shard": 128, "ep": 64}, stage=1, rank=rank, length=4096)
    sent = Counter()
    for one in found.traffic:
        sent[one.axis] += one.wire_bytes
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["bytes_of_rank"][str(rank)]
    assert {**check_states(found, ledger), "sent": dict(sent)} == recorded


def test_grouped_products_in_float32():
    """torch would end the dry run with an error of its own."""
    with pytest.raises(
        ModelError,
        match="computes its experts in float32 by torch's grouped_mm, .* set bf16.enabled = true",
    ):
        run(SMALL, {"dp_replicate": 2}, stage=0, rank=0, length=8, experts="grouped_mm")
