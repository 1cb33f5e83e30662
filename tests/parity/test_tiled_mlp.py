"""An MLP in tiles computes what one process does on all tokens: losses, gradients, the norm and weights in float64, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from tests.measured.traffic import count_traffic
from tests.parity import adapted
from tests.parity.experts import Case, assert_equal, build, configured, steps, train
from tests.pool import Pool

FULL, SELECTIVE, SEQUENCE = (
    ("recompute", {"mode": "full"}),
    ("recompute", {"mode": "selective"}),
    ("sequence_parallel", True),
)
RING, ULYSSES, GATHERED = ("context", "ring"), ("context", "ulysses"), ("context", "all-gather-kv")
CP2, TP2, EP2, PP2 = ("cp", 2), ("tp", 2), ("ep", 2), ("pp", 2)


def tile(tokens: int) -> tuple[str, Any]:
    return ("mlp_tile_tokens", tokens)


CASES = [
    Case("llama", 3, dp=2, more=(tile(3), FULL)),
    Case("llama", 0, (TP2,), more=(tile(4), SEQUENCE, SELECTIVE), data="uneven"),
    Case("mistral", 0, (CP2,), data="packed", window=True, more=(RING, tile(3))),
    Case("llama", 1, (PP2,), more=(tile(3), ("pipeline", {"schedule": "zbv"})), layers=4),
    Case("mixtral", 3, (EP2,), dp=2, routed="one", balance=True, more=(tile(4),)),
    Case("deepseek_v3", 0, (TP2, EP2), rate=0.01, data="uneven", more=(SEQUENCE, tile(3), FULL)),
]
MORE = [
    Case("llama", 0, dp=2, more=(tile(1),)),
    Case("llama", 2, dp=2, more=(tile(5), SELECTIVE)),
    Case("llama", 3, dp=2, more=(tile(1000),)),
    Case("llama", 1, (TP2,), more=(tile(7),), data="causal"),
    Case("llama", 3, (TP2,), dp=2, more=(tile(1), ("tensor_overlap", 2))),
    Case("llama", 0, (TP2,), more=(tile(1), SEQUENCE), data="uneven"),
    Case("gemma2", 0, (("tp", 4),), more=(tile(6), SEQUENCE)),
    Case("gemma3_text", 3, (CP2,), data="uneven", window=True, more=(ULYSSES, tile(3), FULL)),
    Case(
        "llama",
        3,
        (("cp", 4),),
        data="one_target",
        more=(GATHERED, tile(3), ("loss_chunk_tokens", 7)),
    ),
    Case("llama", 0, (PP2,), more=(tile(3),)),
    Case(
        "llama",
        2,
        (PP2,),
        dp=2,
        more=(tile(3), FULL, ("pipeline", {"schedule": "interleaved-zero-bubble"})),
        layers=4,
    ),
    Case("mixtral", 0, dp=2, routed="one", balance=True, more=(tile(4), FULL)),
    Case("deepseek_v3", 1, (CP2, EP2), rate=0.01, data="packed", more=(RING, tile(3), SELECTIVE)),
    Case(
        "qwen2_moe",
        2,
        (TP2, EP2),
        dp=2,
        routed="unused",
        data="padded",
        more=(tile(2), SEQUENCE),
        kind="batched_mm",
    ),
    Case("gpt_oss", 3, (EP2,), dp=2, more=(tile(3), FULL)),
    Case("qwen3_moe", 1, (PP2, EP2), dp=2, balance=True, routed="one", more=(tile(1),)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool: Pool, case: Case) -> None:
    """To 1e-10, two steps of two micro-batches, clipped."""
    assert_equal(case, pool.run(case.world, train, case))


@pytest.mark.proof
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more_equal_one_process(pool: Pool, case: Case) -> None:
    """Tiles of one token, of more than there are, and what else they go with."""
    assert_equal(case, pool.run(case.world, train, case))


def sent(rank: int, world: int, tokens: int) -> dict[str, int]:
    """Bytes of a step. Runs in a worker."""
    case = Case("llama", 3, (TP2,), dp=2, more=(tile(tokens), SEQUENCE), data="causal")
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        with count_traffic() as traffic:
            engine.train_batch(steps(case, 4)[0][:2])
    return {
        kind: count
        for kind, count in traffic.bytes().items()
        if kind not in ("control", "broadcast")
    }


def test_tiles_send_nothing_again(pool: Pool) -> None:
    """At stage 3 a block is gathered as often as without tiles, and a tile that is computed again waits for nobody."""
    assert pool.run(4, sent, 4) == pool.run(4, sent, 0)


def adapters(rank: int, world: int) -> list[float]:
    """Largest differences of gradients with tiles and without, in an own training loop. Runs in a worker."""
    found = []
    for tokens in (0, 3):
        model = adapted.model(torch.float64)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "parallel": {"mlp_tile_tokens": tokens},
        }
        with keeping_float64(model):
            sharded = plait.parallelize(model, config)
            ids = torch.arange(32).view(2, 16) % 32 + rank
            sharded(input_ids=ids, labels=ids).loss.backward()
        found.append(
            {
                name: p.grad.full_tensor()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
    assert len(found[0]) > 10
    return [float((found[1][name] - value).abs().max()) for name, value in found[0].items()]


def test_adapters(pool: Pool) -> None:
    """LoRA on the layers of an MLP, whose own weights are frozen."""
    assert all(max(found) < 1e-13 for found in pool.run(2, adapters))


@pytest.mark.parametrize("context", [RING, ULYSSES, GATHERED], ids=lambda context: context[1])
def test_with_inputs_of_blocks_in_files(
    pool: Pool, context: tuple[str, Any], tmp_path: Path
) -> None:
    """Parts of sequences, in tiles, with what blocks keep elsewhere than on the device."""
    offload = ("activation_offload", {"fraction": 1, "device": "disk", "path": str(tmp_path)})
    case = Case(
        "mistral", 0, (CP2,), data="packed", window=True, more=(context, offload, FULL, tile(5))
    )
    assert_equal(case, pool.run(case.world, train, case))
