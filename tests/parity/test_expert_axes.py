"""Experts together with parts of sequences and with layers that are split over tp: losses with the balance loss, gradients, the norm,
weights and the biases of routers, in float64, against one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.experts import (
    Account,
    Case,
    Result,
    account_of,
    assert_equal,
    build,
    carried_over,
    configured,
    routers,
    steps,
    train,
)
from tests.pool import Pool

FULL, SELECTIVE = ("recompute", {"mode": "full"}), ("recompute", {"mode": "selective"})
RING, ULYSSES, SEQUENCE = ("context", "ring"), ("context", "ulysses"), ("sequence_parallel", True)
CP2, TP2, EP2 = ("cp", 2), ("tp", 2), ("ep", 2)
CASES = [
    Case("mixtral", 0, (CP2, EP2), balance=True, more=(RING, FULL)),
    Case("qwen3_moe", 0, (CP2,), balance=True, routed="unused", more=(ULYSSES,)),
    Case("deepseek_v3", 0, (CP2, EP2), rate=0.01),
    Case("mixtral", 0, (TP2, EP2), balance=True, routed="unused", more=(FULL,)),
    Case("deepseek_v3", 0, (TP2, EP2), rate=0.01),
    Case("mixtral", 0, (TP2, EP2), balance=True, z_loss=0.01, more=(SEQUENCE, FULL)),
    Case("deepseek_v3", 0, (TP2, EP2), rate=0.01, more=(SEQUENCE,)),
]
FOUR = [
    Case("mixtral", 3, (CP2, EP2), balance=True, routed="one", dp=2, more=(RING,)),
    Case("qwen3_moe", 2, (TP2, EP2), balance=True, routed="one", dp=2, more=(SELECTIVE,)),
]
MORE = [
    Case("mixtral", 1, (CP2, ("ep", 4)), balance=True, dp=2, more=(ULYSSES,), mask=False),
    Case("mixtral", 0, (CP2, ("pp", 2), EP2), balance=True, mask=False),
    Case("deepseek_v3", 0, (CP2, ("pp", 2)), rate=0.01, more=(RING,)),
    Case("deepseek_v3", 1, (CP2, EP2), rate=0.01, dp=2, more=(ULYSSES, SELECTIVE)),
    Case("qwen3_moe", 3, (TP2, EP2), balance=True, dp=2, routed="one"),
    Case("mixtral", 1, (TP2, ("ep", 4)), balance=True, dp=2, more=(("loss_chunk_tokens", 7),)),
    Case("mixtral", 0, (TP2, ("pp", 2), EP2), balance=True, mask=False, more=(FULL,)),
    Case("mixtral", 0, (TP2, CP2, EP2), balance=True),
    Case("deepseek_v3", 1, (TP2, EP2), rate=0.01, dp=2),
    Case("qwen3_moe", 0, (TP2,), balance=True, dp=1),
    Case("qwen2_moe", 0, (TP2, EP2), balance=True, more=(SEQUENCE, FULL)),
    Case("qwen2_moe", 3, (TP2,), balance=True, dp=2, routed="unused"),
    Case("qwen3_moe", 0, (TP2, EP2), balance=True, more=(SEQUENCE, SELECTIVE)),
    Case("deepseek_v3", 0, (TP2,), rate=0.01, more=(SEQUENCE, FULL)),
    Case("deepseek_v3", 0, (TP2, ("pp", 2), EP2), z_loss=0.02, more=(SEQUENCE,)),
    Case(
        "mixtral",
        3,
        (TP2, EP2),
        balance=True,
        balanced="global",
        routed="one",
        dp=2,
        more=(SEQUENCE,),
    ),
    Case("mixtral", 0, (TP2, CP2, ("ep", 4)), balance=True, more=(SEQUENCE, RING)),
    Case("mixtral", 0, (("tp", 4), EP2), balance=True, more=(SEQUENCE,)),
    Case("gpt_oss", 0, (TP2, EP2), balance=True),
    Case("gpt_oss", 0, (TP2, EP2), balance=True, routed="unused", more=(SEQUENCE, FULL)),
    Case("gpt_oss", 1, (TP2,), balance=True, dp=2, more=(SEQUENCE,)),
]
LOSSES = [
    Case("mixtral", 0, balance=True, balanced="global", z_loss=0.01, dp=2),
    Case("deepseek_v3", 0, (("pp", 2),), z_loss=0.01, mask=False),
    Case("qwen3_moe", 0, (CP2, EP2), balance=True, z_loss=0.01, more=(RING,)),
]
MORE_LOSSES = [
    Case("gpt_oss", 1, (EP2,), balance=True, balanced="global", dp=2),
    Case(
        "mixtral",
        3,
        (("pp", 2), EP2),
        balance=True,
        balanced="global",
        z_loss=0.01,
        dp=2,
        more=(FULL,),
    ),
    Case("mixtral", 2, (CP2, EP2), balance=True, balanced="global", z_loss=0.02, dp=2),
    Case(
        "mixtral",
        1,
        (TP2, EP2),
        balance=True,
        balanced="global",
        z_loss=0.02,
        dp=2,
        more=(("loss_chunk_tokens", 7),),
    ),
    Case("deepseek_v3", 1, (EP2,), z_loss=0.01, rate=0.0, dp=2),
]


@pytest.mark.parametrize("case", [*CASES, *FOUR, *LOSSES], ids=lambda case: case.name)
def test_equals_one_process(pool: Pool, case: Case) -> None:
    """To 1e-10, two steps of two micro-batches, clipped, of uneven lengths, with padding."""
    assert_equal(case, pool.run(case.world, train, case))


@pytest.mark.proof
@pytest.mark.parametrize("case", [*MORE, *MORE_LOSSES], ids=lambda case: case.name)
def test_more_equals_one_process(pool: Pool, case: Case) -> None:
    """The same."""
    assert_equal(case, pool.run(case.world, train, case))


def watched(rank: int, world: int, case: Case) -> tuple[Result, int]:
    """(what it has trained, rows of an output that a user's hook saw). Runs in a worker."""
    model = build(case)
    seen: list[torch.Tensor] = []
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.register_forward_hook(lambda module, args, output: seen.append(output))
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(case, 2))
    return (trace, {}), int(seen[-1].ne(0).any(1).sum())


def test_a_hook_is_given_all_tokens(pool: Pool) -> None:
    """With sequence parallelism each rank needs the results of its own tokens alone, unless someone looks."""
    case = Case("mixtral", 0, (TP2, EP2), balance=True, data="uneven", more=(SEQUENCE,))
    for result, rows in pool.run(2, watched, case):
        assert_equal(case, [result])
        assert rows == 2 * 18


def saved_config(rank: int, world: int, case: Case, folder: str) -> list[str]:
    """config.json before and after a step, and with the engine closed. Runs in a worker."""
    model, found = build(case), []

    def save() -> None:
        model.config.save_pretrained(f"{folder}/{rank}")
        found.append(Path(folder, str(rank), "config.json").read_text())

    save()
    with (
        keeping_float64(model),
        closing(plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)) as engine,
    ):
        engine.train_batch(steps(case, 2)[0])
        save()
    save()
    return found


@pytest.mark.parametrize("degrees", [CP2, ("pp", 2)], ids=["cp2", "pp2"])
def test_the_models_configuration_is_the_users(
    pool: Pool, degrees: tuple[str, int], tmp_path: Path
) -> None:
    """Also where the balance loss is not computed by the model: what is saved asks for it as before."""
    for before, *after in pool.run(
        2, saved_config, Case("mixtral", 0, (degrees,), balance=True, mask=False), str(tmp_path)
    ):
        assert '"output_router_logits": true' in before
        assert after == [before, before]


def one_engine(rank: int, world: int, case: Case, folder: str) -> tuple[Account, list[float]]:
    """(bytes, what checkpoints carried over to a layout of data-parallel ranks alone and back). Runs in a worker."""
    model, other, plain = build(case), build(case), Case(case.family, 1, dp=2)
    plan = make_plan(model, tp=2, blocks=find_blocks(model)) if ("tp", 2) in case.degrees else None
    facts = model_facts(model, find_blocks(model), tensor_plan=plan)
    even: list[bool] = []

    def balanced(module: Any, args: Any, output: Any) -> Any:
        logits, weights, chosen = output
        return (
            (logits, weights, torch.arange(chosen.numel()).view_as(chosen) % logits.shape[-1])
            if even
            else output
        )

    for router in routers(model):
        router.register_forward_hook(balanced)
    ids = torch.arange(2 * 2 * 16).view(4, 16) % cases.VOCABULARY
    batch = {"input_ids": ids, "labels": ids}
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        engine.train_batch(batch)  # after which ranks know which buffers change
        even.append(True)
        with count_traffic() as traffic:
            engine.train_batch(batch)
        even.clear()
        alone = {**configured(plain), "train_micro_batch_size_per_gpu": 1}
        without = plait.initialize(other, alone, loss_fn=plait.causal_lm_loss)
        mine = {name: rows[without.dp_rank :: 2] for name, rows in batch.items()}
        carried = carried_over((engine, batch), (without, mine), folder)
    return account_of(engine, facts, traffic.bytes(), rank), carried


@pytest.mark.parametrize(
    "case",
    [
        Case("mixtral", 0, (CP2, EP2)),
        Case("mixtral", 0, (TP2, EP2)),
        Case("deepseek_v3", 0, (CP2, EP2), more=(RING,)),
        Case("deepseek_v3", 0, (TP2, EP2), more=(SEQUENCE,)),
    ],
    ids=lambda case: case.name,
)
def test_everything_else_of_an_engine(pool: Pool, case: Case, tmp_path: Path) -> None:
    """It sends and holds what the ledger says, and its checkpoint goes on on data-parallel ranks alone, as theirs goes on with it."""
    for account, carried in pool.run(2, one_engine, case, str(tmp_path)):
        assert account.sent == account.said
        assert account.held == account.said_held
        assert max(map(abs, carried)) < 1e-12
