"""Parts of sequences compute what one process does: losses, gradients, the norm and weights in float64, with what cp goes with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.errors import InputError, ModelError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.parallel import materialise
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.verify.keep_float64 import keeping_float64
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.context_parallel import SEED, Case, assert_equal, build, configured, steps, train

FULL, SELECTIVE, BUDGET = (
    {"mode": "full"},
    {"mode": "selective"},
    {"budget_gib": 0.0002, "sequence_length": 16},
)
TWO = [
    Case("all-gather-kv", "packed", "mistral", window=True),
    Case("ulysses", "packed", "mistral", window=True),
    Case("ring", "packed", "mistral", window=True),
    Case("all-gather-kv", "one_target", "gpt2", settings=(("recompute", FULL),)),
    Case("ulysses", "padded", "gpt_neox", stage=1),
    Case("ring", "border", "gemma", tied=True, stage=3, settings=(("recompute", SELECTIVE),)),
    Case("all-gather-kv", "padded", "gemma2", window=True, eager=True, stage=2),
    Case("ulysses", "uneven", "qwen3", settings=(("loss_chunk_tokens", 7),)),
    Case("ring", "uneven", "phi3", eager=True, settings=(("recompute", BUDGET),)),
    Case("ring", "one_target", "llama", stage=2, settings=(("loss_chunk_tokens", 5),)),
    Case("all-gather-kv", "border", "llama", stage=3, settings=(("recompute", SELECTIVE),)),
    Case("ulysses", "causal", "gpt2", tied=True, settings=(("recompute", SELECTIVE),)),
    Case("ring", "packed", "llama", stage=3, adapted=True),
]
"""Processes of a pool that exists for others, so that each is a third of a second."""
FOUR = [
    Case("ulysses", "packed", degrees=(("cp", 4),)),  # 2 key-value heads
    Case("ring", "uneven", stage=3, degrees=(("cp", 2), ("dp_shard", 2))),
    Case("all-gather-kv", "packed", tied=True, degrees=(("cp", 2), ("pp", 2))),
    Case("ring", "packed", degrees=(("cp", 2), ("tp", 2)), settings=(("sequence_parallel", True),)),
]


@pytest.mark.parametrize("case", [*TWO, *FOUR], ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    """To 1e-10, two steps of two micro-batches."""
    assert_equal(case, pool.run(case.world, train, case))


def one_engine(rank, world, case, folder):
    """(evaluation, prediction, bytes sent, bytes accounted for, refusals, whether a checkpoint carried over). Runs in a worker."""
    model = build(case)
    facts = model_facts(model, find_blocks(model))
    piece = steps(case.data, 2)[0][0]
    ids = torch.arange(2 * 2 * 16).view(4, 16) % cases.VOCABULARY
    refused = []
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        evaluated = engine.eval_batch(piece)
        predicted = (
            engine.predict({name: entry for name, entry in piece.items() if name != "labels"})
            .logits.detach()
            .clone()
        )
        engine.train_batch({"input_ids": ids, "labels": ids})  # compares what ranks share
        with count_traffic() as traffic:
            engine.train_batch({"input_ids": ids, "labels": ids})
        calls: tuple[Any, ...] = (
            lambda: engine(ids),
            lambda: engine.model(input_ids=ids),
            lambda: engine.generate([[1, 2, 3]]),
            lambda: engine.train_batch(
                {"input_ids": ids, "labels": ids, "attention_mask": ids[:, None, None]}
            ),
            lambda: engine.train_batch(
                {"input_ids": ids, "labels": ids, "attention_mask": (ids > 3).long()}
            ),
            lambda: engine.train_batch({"input_ids": ids, "labels": ids, "weights": ids[:, :3]}),
            lambda: engine.predict({"input_ids": ids, "use_cache": True}),
            lambda: engine.predict({"input_ids": ids, "output_attentions": True}),
            lambda: engine.sharded.prepare_batch({"input_ids": ids, "labels": ids})["labels"],
        )
        for call in calls:
            with pytest.raises((InputError, ModelError)) as error:
                call()
            refused.append(str(error.value))
        engine.save_checkpoint(folder)
        expected = engine.train_batch({"input_ids": ids, "labels": ids})
        again = build(case)
        alone = configured(case)
        alone["parallel"] = {"dp_shard": 2} if case.stage else {}
        alone["train_micro_batch_size_per_gpu"] = 1
        with keeping_float64(again):
            other = plait.initialize(again, alone, loss_fn=plait.causal_lm_loss)
            other.load_checkpoint(folder)
            mine = slice(other.dp_rank, None, 2)
            found = other.train_batch({"input_ids": ids[mine], "labels": ids[mine]})
        carried = (
            float(found) - float(expected),
            float(found.grad_norm) - float(expected.grad_norm),
        )
    layout = engine.mesh.layout
    start = Ledger.of_rank(layout, layout.coordinates(rank), accumulation=2, tokens=2 * 16)
    ledger = account_all(engine.config.techniques, start, facts)
    sent = {kind: count for kind, count in traffic.bytes().items() if kind != "control"}
    return (
        evaluated,
        predicted,
        sent,
        {kind: int(count[0]) for kind, count in ledger.traffic.items() if count[0]},
        refused,
        carried,
    )


@pytest.mark.parametrize(
    "case",
    [
        Case("all-gather-kv", "packed"),
        Case("ulysses", "uneven", stage=3),
        Case("ring", "packed", stage=1),
    ],
    ids=lambda case: case.name,
)
def test_everything_else_of_an_engine(pool, case, tmp_path):
    """It evaluates and predicts full sequences, sends what the ledger says, refuses what it would compute on a part alone, and its
    checkpoint goes on without cp."""
    model = build(case)
    template = materialise.template_of(model)
    materialise.allocate(model, torch.device("cpu"))
    materialise.initialise(model, template, find_blocks(model), seed=SEED)
    piece = steps(case.data, 2)[0][0]
    with keeping_float64(model), torch.no_grad():
        output = model.eval()(**{name: entry for name, entry in piece.items() if name != "labels"})
        total, count = plait.causal_lm_loss(output, piece)
    words = (
        "passes a batch to the model unchanged",
        "batch that is not split over cp ranks",
        "use a layout without this technique",
        "must be [2, 16]",
        "zeros before ones",
        "`weights` has the shape [2, 3]",
        "cache",
        "output_attentions",
        "read `shift_labels`",
    )
    for evaluated, predicted, sent, accounted, refused, carried in pool.run(
        2, one_engine, case, str(tmp_path)
    ):
        assert evaluated == pytest.approx((float(total), float(count)), rel=1e-12)
        torch.testing.assert_close(predicted, output.logits, rtol=1e-11, atol=1e-12)
        assert sent == accounted
        for word, message in zip(words, refused, strict=True):
            assert word in message
        assert max(map(abs, carried)) < 1e-12


def other_rows(rank, world):
    """What a loader that gives each rank its own rows meets. Runs in a worker."""
    case = Case("ring")
    engine = plait.initialize(build(case), configured(case), loss_fn=plait.causal_lm_loss)
    ids = torch.arange(64).view(4, 16) + rank
    with pytest.raises(InputError) as error:
        engine.train_batch({"input_ids": ids, "labels": ids})
    return str(error.value)


def test_other_rows_on_each_rank(pool):
    """Each part would be of another sequence, and the loss a plausible number."""
    assert all(
        "not the same on all ranks of the cp axis" in message for message in pool.run(2, other_rows)
    )


def page(rank, world):
    """The steps that the code of the page has trained. Runs in a worker."""
    text = (Path(__file__).parents[2] / "docs/how-to/context-parallelism.md").read_text(
        encoding="utf-8"
    )
    block, tiles = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ids = torch.arange(30)[None]
    names = {
        "plait": plait,
        "model": build(Case("ring")),
        "batches": [{"input_ids": ids, "labels": ids}] * 2,
    }
    exec(block, names)
    exec(tiles + block[block.index("model.config") :], names | {"model": build(Case("ring"))})
    return int(names["engine"].global_steps)  # type: ignore[attr-defined]


def test_the_page_runs(pool):
    """On two processes."""
    assert pool.run(2, page) == [2, 2]
