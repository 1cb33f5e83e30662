"""Context parallelism equals one process: losses, gradients, norms and weights in float64."""

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
from plait.verify.keep_float64 import keeping_float64
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.context_parallel import Case, assert_equal, build, configured, steps, train
from tests.parity.data_parallel import materialise_model
from tests.parity.experts import account_of, carried_over

FULL = {"recompute": {"mode": "full"}}
SELECTIVE = {"recompute": {"mode": "selective"}}
BUDGET = {"recompute": {"budget_gib": 0.0002, "sequence_length": 16}}
CHUNKS_OF_7 = {"loss_chunk_tokens": 7}
CHUNKS_OF_5 = {"loss_chunk_tokens": 5}
SEQUENCE = {"sequence_parallel": True}


def case_of(kind, data="causal", family="llama", settings=None, **fields):
    return Case(kind, data, family, settings=tuple((settings or {}).items()), **fields)


CASES = [
    case_of("all-gather-kv", "packed", "mistral", window=True),
    case_of("ulysses", "packed", "mistral", window=True),
    case_of("ring", "packed", "mistral", window=True),
    case_of("all-gather-kv", "one_target", "gpt2", FULL),
    case_of("ulysses", "padded", "gpt_neox", stage=1),
    case_of("ring", "border", "gemma", SELECTIVE, tied=True, stage=3),
    case_of("all-gather-kv", "padded", "gemma2", window=True, eager=True, stage=2),
    case_of("ulysses", "uneven", "qwen3", CHUNKS_OF_7),
    case_of("ring", "uneven", "phi3", BUDGET, eager=True),
    case_of("ring", "one_target", "llama", CHUNKS_OF_5, stage=2),
    case_of("all-gather-kv", "border", "llama", SELECTIVE, stage=3),
    case_of("ulysses", "causal", "gpt2", SELECTIVE, tied=True),
    case_of("ring", "packed", "llama", stage=3, adapted=True),
    # The model has 2 key-value heads for 4 ranks.
    case_of("ulysses", "packed", degrees=(("cp", 4),)),
    case_of("ring", "uneven", stage=3, degrees=(("cp", 2), ("dp_shard", 2))),
    case_of("all-gather-kv", "packed", tied=True, degrees=(("cp", 2), ("pp", 2))),
    case_of("ring", "packed", settings=SEQUENCE, degrees=(("cp", 2), ("tp", 2))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_process(pool, case):
    """Two steps of two micro-batches."""
    assert_equal(case, pool.run(case.world, train, case))


REFUSED = (
    "passes a batch to the model unchanged",
    "batch that is not split over cp ranks",
    "use a layout without this technique",
    "require [2, 16]",
    "zeros before ones",
    "`weights` has the shape [2, 3]",
    "cache",
    "output_attentions",
    "read `shift_labels`",
)


def refused_calls(engine, batch):
    """Return calls that would compute on a part of the sequence, in the order of `REFUSED`."""
    ids = batch["input_ids"]
    four_dimensional = {**batch, "attention_mask": ids[:, None, None]}
    padded_on_the_left = {**batch, "attention_mask": (ids > 3).long()}
    return (
        lambda: engine(ids),
        lambda: engine.model(input_ids=ids),
        lambda: engine.generate([[1, 2, 3]]),
        lambda: engine.train_batch(four_dimensional),
        lambda: engine.train_batch(padded_on_the_left),
        lambda: engine.train_batch({**batch, "weights": ids[:, :3]}),
        lambda: engine.predict({"input_ids": ids, "use_cache": True}),
        lambda: engine.predict({"input_ids": ids, "output_attentions": True}),
        lambda: engine.sharded.prepare_batch(batch)["labels"],
    )


def without_labels(batch):
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def use_engine(rank, world, case, folder):
    """Evaluate, predict, train, and exchange checkpoints with a layout without cp.

    Runs on every rank.
    """
    model = build(case)
    facts = model_facts(model, find_blocks(model))
    rows = steps(case.data, 2)[0][0]
    ids = torch.arange(2 * 2 * 16).view(4, 16) % cases.VOCABULARY
    batch = {"input_ids": ids, "labels": ids}
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        evaluation = engine.eval_batch(rows)
        logits = engine.predict(without_labels(rows)).logits.detach().clone()
        # The first step also compares what ranks share.
        engine.train_batch(batch)
        with count_traffic() as traffic:
            engine.train_batch(batch)
        messages = []
        for call in refused_calls(engine, batch):
            with pytest.raises((InputError, ModelError)) as raised:
                call()
            messages.append(str(raised.value))

    config = configured(case)
    config["parallel"] = {"dp_shard": 2} if case.stage else {}
    config["train_micro_batch_size_per_gpu"] = 1
    model_without_cp = build(case)
    with keeping_float64(model), keeping_float64(model_without_cp):
        other = plait.initialize(model_without_cp, config, loss_fn=plait.causal_lm_loss)
        rank_ids = ids[other.dp_rank :: 2]
        rank_batch = {"input_ids": rank_ids, "labels": rank_ids}
        differences = carried_over((engine, batch), (other, rank_batch), folder)
    account = account_of(engine, facts, traffic.bytes(), rank)
    return evaluation, logits, account, messages, differences


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
    """Evaluation and prediction are those of full sequences, and bytes those of the ledger.

    What would compute on a part is refused, and checkpoints go on without cp.
    """
    model = materialise_model(build(case)).eval()
    rows = steps(case.data, 2)[0][0]
    with keeping_float64(model), torch.no_grad():
        output = model(**without_labels(rows))
        total, count = plait.causal_lm_loss(output, rows)
    for evaluation, logits, account, messages, differences in pool.run(
        2, use_engine, case, str(tmp_path)
    ):
        assert evaluation == pytest.approx((float(total), float(count)), rel=1e-12)
        torch.testing.assert_close(logits, output.logits, rtol=1e-11, atol=1e-12)
        assert account.sent == account.predicted_sent
        for text, message in zip(REFUSED, messages, strict=True):
            assert text in message
        assert max(map(abs, differences)) < 1e-12


def train_on_different_rows(rank, world):
    """Train as if a loader gave each rank its own rows. Runs on every rank."""
    case = Case("ring")
    engine = plait.initialize(build(case), configured(case), loss_fn=plait.causal_lm_loss)
    ids = torch.arange(64).view(4, 16) + rank
    with pytest.raises(InputError, match="not the same on all ranks of the cp axis"):
        engine.train_batch({"input_ids": ids, "labels": ids})


def test_different_rows_on_cp_ranks_are_refused(pool):
    """Each part would be of another sequence, and the loss a plausible number."""
    pool.run(2, train_on_different_rows)


def run_page(rank, world):
    """Return the number of steps that the code of the page has trained. Runs on every rank."""
    page = Path(__file__).parents[2] / "docs/how-to/context-parallelism.md"
    text = page.read_text(encoding="utf-8")
    block, tiles = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ids = torch.arange(30)[None]
    names: dict[str, Any] = {
        "plait": plait,
        "model": build(Case("ring")),
        "batches": [{"input_ids": ids, "labels": ids}] * 2,
    }
    exec(block, names)
    # The second block has the configuration only.
    exec(tiles + block[block.index("model.config") :], names | {"model": build(Case("ring"))})
    return int(names["engine"].global_steps)


def test_the_page_runs(pool):
    assert pool.run(2, run_page) == [2, 2]
