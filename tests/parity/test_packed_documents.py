"""Packed documents compute in float64, on any layout, what one row per document computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

import plait
from plait.data.packing import Documents, Stream
from plait.model.blocks import find_blocks
from plait.parallel import materialise
from plait.parallel.context.families import FAMILIES, WITHOUT_DOCUMENTS
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import cases, experts
from tests.parity.context_parallel import SEED, STEPS, Case, build, configured
from tests.parity.data_parallel import assert_same, plain_trace
from tests.unit.model.families import family

ROW_TOKENS = 16
# Documents of one token, of a row, and of two rows are among them.
DOCUMENT_TOKENS = np.array(
    [9, 4, 16, 3, 7, 5, 2, 11, 13, 6, 8, 1, 30, 12, 4, 10, 5, 9, 3, 14, 16, 2, 7, 15, 8, 6, 11, 5],
    dtype=np.uint64,
)


@cache
def packed():
    """Rows of random documents, a fifth of whose tokens are not targets."""
    draws = np.random.default_rng(5)
    count = int(DOCUMENT_TOKENS.sum())
    tokens = draws.integers(1, cases.VOCABULARY, count).astype(np.uint16)
    scored = (draws.random(count) < 0.8).astype(np.uint8)
    ends = np.cumsum(DOCUMENT_TOKENS, dtype=np.uint64)
    return Documents(Stream(tokens, ends, scored), ROW_TOKENS, padding=0)


def documents_of(batch):
    """Return a batch per document with targets, without positions."""
    documents = []
    for ids, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        starts = [*torch.where(positions == 0)[0].tolist(), len(ids)]
        for first, last in pairwise(starts):
            document = {"input_ids": ids[first:last][None], "labels": labels[first:last][None]}
            # Padding has no targets.
            if (document["labels"] >= 0).any():
                documents.append(document)
    return documents


def steps(micro_batches):
    """Micro-batches of two rows, as a loader reads them."""
    rows = packed()
    assert len(rows) >= 2 * micro_batches
    plan = []
    for step in range(STEPS):
        plan.append([])
        for index in range(micro_batches):
            numbers = (np.arange(2) + 2 * (index + step)) % len(rows)
            plan[-1].append(rows.take(len(rows) - 1 - numbers))
    return plan


def loss_and_gradients(model, batches):
    """Return the sum of the losses of all targets, and its gradients."""
    loss = 0
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        loss = loss + plait.causal_lm_loss(model(**inputs), batch)[0]
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in WITHOUT_DOCUMENTS])
def test_a_family(kind):
    """`data.packing = "documents"` allows these families."""
    torch.manual_seed(0)
    model = experts.build(experts.Case(kind)) if kind in experts.SIZES else family(kind)
    model.config.use_cache = False
    batch = packed().take(np.arange(-5, -1) % len(packed()))
    documents = documents_of(batch)
    assert len(documents) > 6
    with keeping_float64(model):
        expected = loss_and_gradients(model, documents)
        actual = loss_and_gradients(model, [batch])
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


CASES = [
    Case("ring", degrees=(("dp_shard", 2),), stage=3),
    Case("ring", degrees=(("tp", 2),), settings=(("sequence_parallel", True),)),
    Case("ring", degrees=(("pp", 2),)),
    Case("ring", degrees=(("cp", 2),)),
    Case("ulysses", family="gpt2", degrees=(("cp", 2),)),
]


def train(rank, world, case):
    """Runs on every rank."""
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        return engine_trace(engine, steps(2 * engine.dp_size))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout(pool, case):
    model = build(replace(case, degrees=(), settings=()), layers=case.layers)
    template = materialise.template_of(model)
    materialise.allocate(model, torch.device("cpu"))
    materialise.initialise(model, template, find_blocks(model), seed=SEED)
    unpacked_steps = []
    for step in steps(2 * case.dp):
        unpacked_steps.append([document for batch in step for document in documents_of(batch)])
    expected = plain_trace(model, unpacked_steps)
    for trace in pool.run(case.world, train, case):
        if trace is not None:
            assert_same(expected, trace)
