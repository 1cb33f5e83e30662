"""Experts on different ranks compute what one process does: losses, gradients, the norm and weights in float64, with an expert that no
token is routed to and with all tokens at one expert."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.errors import InputError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.verify.keep_float64 import keeping_float64
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.experts import (
    SIZES,
    Account,
    Case,
    account_of,
    assert_equal,
    balanced,
    build,
    carried_over,
    configured,
    routers,
    steps,
    train,
)
from tests.pool import Pool

FULL, SELECTIVE = ("recompute", {"mode": "full"}), ("recompute", {"mode": "selective"})
EP2 = (("ep", 2),)
CASES = [
    Case("mixtral", 0, EP2, balance=True, dp=2, routed="one", more=(FULL,)),
    Case("mixtral", 0, EP2, balance=True, dp=4),
    Case("qwen3_moe", 1, EP2, balance=True, dp=2, routed="unused", mask=False, more=(FULL,)),
    Case("deepseek_v3", 3, EP2, dp=2, rate=0.01),
    Case("gpt_oss", 2, EP2, dp=2, routed="one", more=(SELECTIVE,)),
    Case("mixtral", 1, (("pp", 2), ("ep", 2)), balance=True, dp=2, more=(FULL,)),
]
MORE = [
    Case("mixtral", 1, EP2, dp=2, routed="one"),
    Case(
        "qwen3_moe", 0, EP2, dp=2, routed="one", more=(("loss_chunk_tokens", 7),), kind="batched_mm"
    ),
    Case("deepseek_v3", 2, EP2, dp=2, more=(SELECTIVE,)),
    Case("gpt_oss", 0, EP2, dp=2, more=(SELECTIVE,)),
    Case("deepseek_v3", 1, EP2, dp=4, routed="unused", rate=0.01),
    Case("deepseek_v3", 0, (("pp", 2), ("ep", 2)), dp=2, rate=0.01),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool: Pool, case: Case) -> None:
    """To 1e-10, two steps of two micro-batches, clipped, of other lengths on every rank."""
    assert_equal(case, pool.run(case.world, train, case))


def sampled(count: int) -> list[Case]:
    """Some of the matrix."""
    layouts: list[tuple[int, tuple[tuple[str, Any], ...], int]] = [
        *(
            (stage, (("ep", ep),), dp)
            for stage in (0, 1, 2, 3)
            for dp, ep in ((2, 2), (4, 2), (4, 4))
        ),
        *((stage, (("pp", 2), ("ep", 2)), 2) for stage in (0, 1, 2, 3)),
    ]
    more: list[tuple[tuple[str, Any], ...]] = [
        (),
        (FULL,),
        (SELECTIVE,),
        (("loss_chunk_tokens", 7),),
    ]
    more += [(("pipeline", {"schedule": "gpipe"}),)]
    whole = list(
        product(
            SIZES,
            layouts,
            (False, True),
            ("spread", "one", "unused"),
            (0.0, 0.01),
            more,
            (False, True),
            ("eager", "batched_mm"),
        )
    )
    found = []
    for family, (stage, degrees, dp), balance, routed, rate, settings, mask, kind in random.Random(
        22
    ).sample(whole, 10 * count):
        ep = dict(degrees)["ep"]
        fits = (
            any(key == "pipeline" for key, _ in settings) <= ("pp" in dict(degrees)),
            not rate or family == "deepseek_v3",
            not balance or family != "deepseek_v3",
            family != "qwen3_moe" or 6 % ep == 0,
        )
        if all(fits):
            found.append(
                Case(family, stage, degrees, balance, routed, rate, settings, dp, mask, kind)
            )  # type: ignore[arg-type]
    return found[:count]


@pytest.mark.proof
@pytest.mark.parametrize("case", [*MORE, *sampled(100)], ids=lambda case: case.name)
def test_sample_equals_one_process(pool: Pool, case: Case) -> None:
    """The same, for a part of the matrix that no person chose."""
    assert_equal(case, pool.run(case.world, train, case))


def one_engine(
    rank: int, world: int, case: Case, folder: str, plain: Case
) -> tuple[Account, list[str], list[float]]:
    """(bytes, refusals, what checkpoints carried over). Runs in a worker."""
    model, other = build(case), build(plain)
    facts = model_facts(model, find_blocks(model))
    for router in (*routers(model), *routers(other)):
        router.register_forward_hook(balanced)
    ids = torch.arange(2 * 2 * 16).view(4, 16) % cases.VOCABULARY
    refused = []
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        batch = {"input_ids": ids + engine.dp_rank, "labels": ids}
        engine.train_batch(batch)  # after which ranks know which buffers change
        with count_traffic() as traffic:
            engine.train_batch(batch)
        for call in (lambda: engine(ids), lambda: engine.generate([[1, 2, 3]])):
            with pytest.raises(InputError) as error:
                call()
            refused.append(str(error.value))
        without = plait.initialize(other, configured(plain), loss_fn=plait.causal_lm_loss)
        carried = carried_over((engine, batch), (without, batch), folder)
    return account_of(engine, facts, traffic.bytes(), rank), refused, carried


@pytest.mark.parametrize("stage", [0, 1])
def test_everything_else_of_an_engine(pool: Pool, stage: int, tmp_path: Path) -> None:
    """It sends and holds what the ledger says, refuses what is not tested, and its checkpoint goes on without ep, as one without ep goes on
    with it."""
    case, plain = Case("mixtral", stage, EP2, dp=2), Case("mixtral", 1 - stage, dp=2)
    for account, refused, carried in pool.run(2, one_engine, case, str(tmp_path), plain):
        assert account.sent == account.said
        assert account.held == account.said_held
        assert all("is not tested with experts" in message for message in refused)
        assert max(map(abs, carried)) < 1e-12


def fast_path(rank: int, world: int, kind: str, dtype: str) -> tuple[float, ...]:
    """Losses of three steps. Runs in a worker."""
    case = Case("mixtral", 1, EP2 if world > 1 else (), balance=True, dp=world, kind=kind)
    model = build(case, dtype=torch.float32)
    config = {**configured(case), "gradient_accumulation_steps": 4 // world}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    batches = steps(case, 4)
    count = 4 // world
    return tuple(
        float(engine.train_batch(step[engine.dp_rank * count : (engine.dp_rank + 1) * count]))
        for step in batches
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "within"),
    [
        ("grouped_mm", "bf16", 2e-2),
        pytest.param("grouped_mm", "fp32", 2e-6, marks=pytest.mark.proof),
    ],
)
def test_the_fast_path(pool: Pool, kind: str, dtype: str, within: float) -> None:
    """Grouped products, in float32 and in bfloat16, against one process with eager experts."""
    (alone,) = pool.run(1, fast_path, "eager", "fp32")
    for found in pool.run(2, fast_path, kind, dtype):
        assert found == pytest.approx(alone, rel=within)
