"""Several documents in a row compute what a row for each computes: losses, gradients, norms and weights in float64, on any layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.data.packing import Documents, Stream
from plait.parallel.context.families import FAMILIES, WITHOUT_DOCUMENTS
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import cases, experts
from tests.parity.context_parallel import STEPS, Case, build, configured
from tests.parity.data_parallel import assert_same, plain_trace
from tests.unit.model.families import family

LENGTHS = [
    9,
    4,
    16,
    3,
    7,
    5,
    2,
    11,
    13,
    6,
    8,
    1,
    30,
    12,
    4,
    10,
    5,
    9,
    3,
    14,
    16,
    2,
    7,
    15,
    8,
    6,
    11,
    5,
]
LENGTH = 16
Piece = dict[str, torch.Tensor]


@cache
def packed():
    """Rows of random documents, of some of which a part is not scored."""
    draw = np.random.default_rng(5)
    total = sum(LENGTHS)
    tokens = draw.integers(1, cases.VOCABULARY, total).astype(np.uint16)
    scored = (draw.random(total) < 0.8).astype(np.uint8)
    return Documents(Stream(tokens, np.cumsum(LENGTHS, dtype=np.uint64), scored), LENGTH, padding=0)


def alone(piece):
    """The documents of a micro-batch, each a batch of its own without positions; padding is left out with them."""
    found = []
    for ids, labels, positions in zip(
        piece["input_ids"], piece["labels"], piece["position_ids"], strict=True
    ):
        starts = [*torch.where(positions == 0)[0].tolist(), len(ids)]
        parts = [slice(first, last) for first, last in pairwise(starts)]
        found += [
            {"input_ids": ids[part][None], "labels": labels[part][None]}
            for part in parts
            if (labels[part] >= 0).any()
        ]
    return found


def steps(micro_batches):
    """As a loader takes them: two rows a micro-batch."""
    rows = packed()
    assert len(rows) >= 2 * micro_batches
    return [
        [
            rows.take(len(rows) - 1 - (np.arange(2) + 2 * (index + step)) % len(rows))
            for index in range(micro_batches)
        ]
        for step in range(STEPS)
    ]


def total_loss(model, pieces):
    return sum(
        plait.causal_lm_loss(model(**{k: v for k, v in piece.items() if k != "labels"}), piece)[0]
        for piece in pieces
    )  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in WITHOUT_DOCUMENTS])
def test_a_family(kind):
    """Every family that `data.packing = "documents"` allows."""
    torch.manual_seed(0)
    model: Any = experts.build(experts.Case(kind)) if kind in experts.SIZES else family(kind)
    model.config.use_cache = False
    with keeping_float64(model):
        gradients = []
        for pieces in (
            [packed().take(np.arange(-5, -1) % len(packed()))],
            alone(packed().take(np.arange(-5, -1) % len(packed()))),
        ):
            loss = total_loss(model, pieces)
            loss.backward()
            gradients.append(
                [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            )
            model.zero_grad()
    assert len(alone(packed().take(np.arange(-5, -1) % len(packed())))) > 6
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


CASES = [
    Case("ring", degrees=(("dp_shard", 2),), stage=3),
    Case("ring", degrees=(("tp", 2),), settings=(("sequence_parallel", True),)),
    Case("ring", degrees=(("pp", 2),)),
    Case("ring", degrees=(("cp", 2),)),
    Case("ulysses", family="gpt2", degrees=(("cp", 2),)),
]


def train(rank, world, case):
    """Runs in a worker."""
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        return engine_trace(engine, steps(2 * engine.dp_size))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout(pool, case):
    from plait.model.blocks import find_blocks
    from plait.parallel import materialise
    from tests.parity.context_parallel import SEED

    model = build(replace(case, degrees=(), settings=()), layers=case.layers)
    template = materialise.template_of(model)
    materialise.allocate(model, torch.device("cpu"))
    materialise.initialise(model, template, find_blocks(model), seed=SEED)
    apart = [[one for piece in step for one in alone(piece)] for step in steps(2 * case.dp)]
    wanted = plain_trace(model, apart)
    for trace in pool.run(case.world, train, case):
        if trace is not None:
            assert_same(wanted, trace)
