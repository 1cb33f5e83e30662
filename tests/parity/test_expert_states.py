"""Experts on different ranks with hybrid sharding, and with states and parameters in files, equal one process; what they hold and send is
the ledger's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.verify.keep_float64 import keeping_float64
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.experts import (
    Account,
    Case,
    account_of,
    assert_equal,
    balanced,
    build,
    carried_over,
    configured,
    routers,
    train,
)
from tests.pool import Pool

EP2, EP4, CP2, TP2, PP2 = ("ep", 2), ("ep", 4), ("cp", 2), ("tp", 2), ("pp", 2)
FULL, RING = ("recompute", {"mode": "full"}), ("context", "ring")
FILES = {"fraction": 1, "device": "disk", "path": tempfile.gettempdir()}
HYBRID: tuple[tuple[str, Any], ...] = (("dp_replicate", 2), ("dp_shard", 2))
CASES = [
    Case("mixtral", 3, (EP2,), dp=4, routed="one", balance=True, more=(*HYBRID, FULL)),
    Case("mixtral", 1, (EP2,), dp=2, routed="one", balance=True, offload="states"),
    Case("qwen3_moe", 3, (EP2,), dp=2, routed="unused", balance=True, offload="both"),
    Case("mixtral", 3, (EP2,), dp=4, routed="one", more=(("activation_offload", FILES),)),
]
MORE = [
    Case(
        "gpt_oss",
        3,
        (TP2, EP4),
        dp=2,
        balance=True,
        data="one_target",
        offload="parameters",
        more=(("activation_offload", FILES),),
    ),
    Case(
        "deepseek_v3",
        3,
        (EP2,),
        dp=4,
        rate=0.01,
        more=(("activation_offload", FILES), ("mlp_tile_tokens", 3)),
    ),
    Case(
        "mixtral",
        2,
        (EP2,),
        dp=4,
        routed="one",
        more=(("activation_offload", FILES), ("recompute", {"mode": "selective"})),
    ),
    Case("mixtral", 1, (EP2,), dp=4, balance=True, more=HYBRID),
    Case("mixtral", 2, (EP4,), dp=4, balance=True, balanced="global", more=HYBRID),
    Case("deepseek_v3", 3, (EP2, CP2), dp=4, rate=0.01, data="packed", more=(*HYBRID, RING)),
    Case(
        "qwen2_moe",
        1,
        (EP2, TP2),
        dp=4,
        routed="unused",
        data="padded",
        more=(*HYBRID, ("sequence_parallel", True)),
    ),
    Case("gpt_oss", 2, (EP2, PP2), dp=4, more=HYBRID),
    Case("mixtral", 2, (EP2,), dp=4, balance=True, routed="unused", offload="states"),
    Case("mixtral", 3, (EP2,), dp=2, balance=True, routed="one", offload="parameters"),
    Case(
        "deepseek_v3",
        3,
        (EP2,),
        dp=2,
        rate=0.01,
        offload="both",
        more=(FULL, ("mlp_tile_tokens", 3)),
    ),
    Case(
        "qwen2_moe",
        2,
        (EP2, TP2),
        dp=2,
        routed="unused",
        offload="states",
        more=(("sequence_parallel", True),),
    ),
    Case("gpt_oss", 3, (EP4,), dp=4, offload="both"),
    Case("gpt_oss", 1, (EP2, PP2), dp=2, offload="states"),
    Case("mixtral", 3, (EP2,), dp=4, offload="both", more=HYBRID),
    Case("mixtral", 2, (EP4,), dp=4, balance=True, offload="states", more=HYBRID),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool: Pool, case: Case) -> None:
    """To 1e-10, two steps of two micro-batches, clipped."""
    assert_equal(case, pool.run(case.world, train, case))


@pytest.mark.proof
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more_equal_one_process(pool: Pool, case: Case) -> None:
    """With everything that experts go with."""
    assert_equal(case, pool.run(case.world, train, case))


def hybrid(
    rank: int, world: int, case: Case, plain: Case, folder: str
) -> tuple[Account, list[float]]:
    """(bytes, what checkpoints carried over). Runs in a worker."""
    model, other = build(case), build(plain)
    facts = model_facts(model, find_blocks(model))
    for router in (*routers(model), *routers(other)):
        router.register_forward_hook(balanced)
    ids = torch.arange(2 * 2 * 16).view(4, 16) % cases.VOCABULARY
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        batch = {"input_ids": ids + engine.dp_rank, "labels": ids}
        engine.train_batch(batch)  # after which ranks know which buffers change
        with count_traffic() as traffic:
            engine.train_batch(batch)
        without = plait.initialize(other, configured(plain), loss_fn=plait.causal_lm_loss)
        carried = carried_over((engine, batch), (without, batch), folder)
    return account_of(engine, facts, traffic.bytes(), rank), carried


def test_hybrid_sharding_holds_and_sends_its_account(pool: Pool, tmp_path: Path) -> None:
    """Experts are sharded over all ranks that have the same ones, also those of other replicas; its checkpoint goes on without ep."""
    case, plain = Case("mixtral", 3, (EP2,), dp=4, more=HYBRID), Case("mixtral", 1, dp=4)
    for account, carried in pool.run(4, hybrid, case, plain, str(tmp_path)):
        assert account.sent == account.said
        assert account.held == account.said_held
        assert max(map(abs, carried)) < 1e-12
