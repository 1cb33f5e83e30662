"""Mixture-of-experts models compute what one process does, with Transformers' eager experts and its own loss: losses with the balance loss,
gradients, the norm, weights and the biases of routers, in float64."""

from __future__ import annotations

import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from tests.parity.experts import SIZES, Case, assert_equal, build, train
from tests.pool import Pool

FULL, SELECTIVE = ("recompute", {"mode": "full"}), ("recompute", {"mode": "selective"})
CASES = [
    Case("mixtral", 0, balance=True, dp=2, more=(FULL,)),
    Case("mixtral", 3, balance=True, dp=2, routed="one", more=(("loss_chunk_tokens", 7),)),
    Case("mixtral", 1, (("pp", 2),), balance=True, more=(FULL,)),
    Case(
        "qwen3_moe",
        0,
        (("pp", 2),),
        balance=True,
        mask=False,
        more=(("pipeline", {"schedule": "gpipe"}),),
    ),
    Case("deepseek_v3", 3, dp=2, rate=0.01, more=(FULL,)),
    Case("deepseek_v3", 0, (("pp", 2),), rate=0.01, more=(SELECTIVE,)),
    Case("gpt_oss", 0, dp=2, balance=True, routed="unused", more=(SELECTIVE,)),
]
MORE = [
    Case("qwen3_moe", 2, balance=True, dp=2, routed="unused", mask=False),
    Case("gpt_oss", 3, dp=2, routed="one"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool: Pool, case: Case) -> None:
    """To 1e-10, two steps of two micro-batches."""
    assert_equal(case, pool.run(case.world, train, case))


def sampled(count: int) -> list[Case]:
    """Some of the matrix."""
    layouts: list[tuple[int, tuple[tuple[str, Any], ...], int]] = [
        *((stage, (), dp) for stage in (0, 1, 2, 3) for dp in (2, 3)),
        *((stage, (("pp", 2),), dp) for stage in (0, 1, 2, 3) for dp in (1, 2)),
    ]
    more: list[tuple[tuple[str, Any], ...]] = [
        (),
        (FULL,),
        (SELECTIVE,),
        (("loss_chunk_tokens", 7),),
    ]
    more += [
        (("pipeline", {"schedule": "gpipe"}),),
        (("pipeline", {"schedule": "interleaved-1f1b", "stages_per_rank": 2}),),
    ]
    whole = list(
        product(
            SIZES,
            layouts,
            (False, True),
            ("spread", "one", "unused"),
            (0.0, 0.01),
            more,
            (False, True),
        )
    )
    found = []
    for family, (stage, degrees, dp), balance, routed, rate, settings, mask in random.Random(
        21
    ).sample(whole, 8 * count):
        staged = [value for key, value in settings if key == "pipeline"]
        fits = (
            bool(staged) <= bool(degrees),
            not (staged and staged[0].get("stages_per_rank")),  # of few layers
            not rate or family == "deepseek_v3",
            not balance or family != "deepseek_v3",
        )
        if all(fits):
            found.append(Case(family, stage, degrees, balance, routed, rate, settings, dp, mask))  # type: ignore[arg-type]
    return found[:count]


@pytest.mark.proof
@pytest.mark.parametrize("case", [*MORE, *sampled(60)], ids=lambda case: case.name)
def test_sample_equals_one_process(pool: Pool, case: Case) -> None:
    """The same, for a part of the matrix that no person chose."""
    assert_equal(case, pool.run(case.world, train, case))


def page(rank: int, world: int) -> list[int]:
    """The steps that each block of code of the page has trained. Runs in a worker."""
    text = (Path(__file__).parents[2] / "docs/how-to/mixture-of-experts.md").read_text(
        encoding="utf-8"
    )
    found = []
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        ids = torch.arange(30).view(2, 15)
        names = {
            "plait": plait,
            "model": build(Case("mixtral")),
            "batches": [{"input_ids": ids, "labels": ids}] * 2,
        }
        exec(block, names)
        found.append(int(names["engine"].global_steps))  # type: ignore[attr-defined]
    return found


def test_the_page_runs(pool: Pool) -> None:
    """On two processes."""
    for found in pool.run(2, page):
        assert found and set(found) == {2}
