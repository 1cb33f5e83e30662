"""The technique of docs/how-to/add-a-technique.md equals one process, without a change of Plait.

It sends the bytes that it accounts for.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError, ModelError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all, check_all
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.added_technique import context_parallel
from tests.parity.added_technique.context_parallel import ContextParallel
from tests.parity.data_parallel import assert_same, materialised, plain_trace, training_config

LENGTH = 8
STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "cp": (2, {"cp": 2}, 0),
    "cp x dp_shard, stage 3": (4, {"cp": 2, "dp_shard": 2}, 3),
    "cp of four": (4, {"cp": 4}, 0),
}
"""Number of processes, degrees, ZeRO stage."""


def steps(micro_batches):
    """Return steps whose micro-batches and parts have different numbers of targets.

    The last token of a part predicts the first one of the next part.
    """
    generator = torch.Generator().manual_seed(11)
    result = []
    for step in range(STEPS):
        batches = []
        for index in range(micro_batches):
            ids = torch.randint(0, cases.VOCABULARY, (2, LENGTH), generator=generator)
            labels = ids.clone()
            labels[0, : index + step] = -100
            batches.append({"input_ids": ids, "labels": labels})
        result.append(batches)
    return result


def configured(name):
    _, degrees, stage = LAYOUTS[name]
    return training_config(degrees, stage=stage)


def train(rank, world, name):
    """Return trace, evaluation, bytes sent, and bytes accounted for. Runs on every rank."""
    model = cases.build("llama", tied=False)
    facts = model_facts(model, find_blocks(model))
    with keeping_float64(model):
        config = plait.load_config(configured(name)).with_techniques(
            ContextParallel(sequence_length=LENGTH)
        )
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        batches = steps(2 * engine.dp_size)
        first = 2 * engine.dp_rank
        evaluation = engine.eval_batch(batches[0][first])
        trace = engine_trace(engine, batches)
        with count_traffic() as traffic:
            engine.train_batch(batches[0][first : first + 2])
        with pytest.raises(InputError, match="unchanged, but SequenceParts must transform"):
            engine(torch.zeros(2, LENGTH, dtype=torch.int64))

    layout = engine.mesh.layout
    start = Ledger.of_rank(layout, layout.coordinates(rank), accumulation=2, tokens=2 * LENGTH)
    ledger = account_all(engine.config.techniques, start, facts)
    sent = {kind: count for kind, count in traffic.bytes().items() if kind != "control"}
    accounted = {kind: int(count[0]) for kind, count in ledger.traffic.items() if count[0]}
    return trace, evaluation, sent, accounted


@cache
def reference(micro_batches):
    """Return the trace of one plain process on full sequences."""
    return plain_trace(materialised("llama", tied=False), steps(micro_batches))


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_process_and_sends_its_account(pool, name):
    world, degrees, _ = LAYOUTS[name]
    ranks = world // degrees["cp"]
    results = pool.run(world, train, name)
    for trace, _, sent, accounted in results:
        assert_same(reference(2 * ranks), trace)
        assert sent == accounted

    # Each data-parallel rank evaluates its first micro-batch.
    model = materialised("llama", tied=False)
    loss = 0.0
    targets = 0
    with keeping_float64(model), torch.no_grad():
        for batch in steps(2 * ranks)[0][::2]:
            total, count = plait.causal_lm_loss(model(input_ids=batch["input_ids"]), batch)
            loss += float(total)
            targets += int(count)
    for _, evaluation, _, _ in results:
        assert evaluation == pytest.approx((loss, targets), rel=1e-12)


def test_unsupported_settings_are_refused():
    def check(kind, degrees, *techniques):
        model = cases.build(kind, tied=False)
        config = {"train_micro_batch_size_per_gpu": 1, "parallel": degrees}
        resolved = resolve(load(config), world_size=degrees["cp"])
        resolved = resolved.model_copy(update={"added": techniques})
        check_all(resolved.context(model=model, blocks=find_blocks(model)))

    technique = ContextParallel(sequence_length=8)
    check("llama", {"cp": 2}, technique)
    with pytest.raises(
        ConfigError, match="parallel.cp = 3: a sequence has 8 tokens and 8 % 3 != 0"
    ):
        check("llama", {"cp": 3}, technique)
    with pytest.raises(ModelError, match="only the attention of a Llama is known here"):
        check("gpt2", {"cp": 2}, technique)
    # Without the added technique, Plait's own check refuses the model.
    with pytest.raises(ModelError, match="BloomForCausalLM .* is not among the causal language"):
        check("bloom", {"cp": 2})


def test_the_page_shows_this_code():
    """Every block of the page is an excerpt of the technique or of this file."""
    folder = Path(__file__).parent
    page = (folder.parents[2] / "docs/how-to/add-a-technique.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    paths = (Path(context_parallel.__file__), Path(__file__))
    code = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert len(blocks) >= 4
    for block in blocks:
        # Without white space, because the formatter wraps the lines of a page elsewhere.
        assert "".join(block.split()) in "".join(code.split()), block
