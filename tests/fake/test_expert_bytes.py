"""Expert parallelism: states and traffic equal the ledger's, up to DeepSeek-V3 on 2,048 ranks."""

import json
from collections import Counter
from pathlib import Path

import pytest

from plait.errors import ModelError
from tests.fake.worlds import check_states, single_rank

RECORDED = Path(__file__).parents[2] / "benchmarks/results/deepseek_v3.json"
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 128, "vocab_size": 640,
    "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def run(sizes, degrees, *, stage, rank, length, experts=None):
    """Run one step of two micro-batches of a DeepSeek-V3, and return it with its ledger."""
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
def test_memory_and_traffic(degrees, stage, rank):
    measured, ledger = run(SMALL, degrees, stage=stage, rank=rank, length=64)
    check_states(measured, ledger)
    assert {sent.ranks for sent in measured.traffic if sent.axis == "ep"} == {degrees["ep"]}
    if "pp" not in degrees:
        sums = Counter({"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0})
        for sent in measured.traffic:
            if sent.kind in sums:
                sums[sent.kind] += sent.wire_bytes
        assert sums == {kind: int(ledger.traffic.get(kind, [0])[0]) for kind in sums}


@pytest.mark.proof
@pytest.mark.parametrize("rank", [0, 640, 2047])
def test_deepseek_v3(rank):
    """The published layout of 671 billion parameters has the recorded bytes (arXiv:2412.19437)."""
    degrees = {"pp": 16, "dp_shard": 128, "ep": 64}
    measured, ledger = run({}, degrees, stage=1, rank=rank, length=4096)
    sent = Counter()
    for collective in measured.traffic:
        sent[collective.axis] += collective.wire_bytes
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["bytes_of_rank"][str(rank)]
    assert {**check_states(measured, ledger), "sent": dict(sent)} == recorded


def test_grouped_products_in_float32_are_refused():
    """torch would otherwise end the dry run with an error that names no setting."""
    message = "computes its experts in float32 by torch's grouped_mm, .* set bf16.enabled = true"
    with pytest.raises(ModelError, match=message):
        run(SMALL, {"dp_replicate": 2}, stage=0, rank=0, length=8, experts="grouped_mm")
