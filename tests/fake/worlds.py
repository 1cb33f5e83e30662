"""A rank of a fake world: its engine, its measured bytes and its ledger."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.engine.engine import Engine
from plait.engine.single_rank import run_single_rank
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.pipeline.estimates import facts_of_rank
from tests.measured.memory import measure_step
from tests.measured.traffic import count_traffic
from tests.parity import cases

STATES = ("parameters", "gradients", "optimizer")


def world_of(config):
    """Return the number of ranks of a configuration that sets its degrees."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    return prod(config["parallel"].get(axis, 1) for axis in axes)


def resolved_of(config):
    """Resolve a configuration for the number of ranks that it describes."""
    return resolve(load(config), world_size=world_of(config))


def batch(accumulation, *, samples=2, length=8):
    """Return one rank's data of a step."""
    ids = torch.arange(samples * accumulation * length).view(-1, length) % cases.VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}


def facts_of(model, resolved):
    """Return the facts of a complete model, with the split of its tensors."""
    blocks = find_blocks(model)
    tp = resolved.layout.tp
    plan = make_plan(model, tp=tp, blocks=blocks) if tp > 1 else None
    return model_facts(model, blocks, tensor_plan=plan)


def account(model, resolved, rank, **fields):
    """Return the ledger of a rank from a complete model. `fields` are fields of the ledger."""
    coordinates = resolved.layout.coordinates(rank)
    facts = facts_of(model, resolved)
    context = resolved.context(model=model, blocks=find_blocks(model))
    pipeline = resolved.pipeline.plan(context)
    if pipeline is not None:
        stages = pipeline.schedule.stages_of(coordinates["pp"])
        facts = facts_of_rank(facts, pipeline.cut, stages)

    defaults = {
        "accumulation": resolved.batch.accumulation,
        "optimizer_states": resolved.optimizer.states,
    }
    ledger = Ledger.of_rank(resolved.layout, coordinates, **(defaults | fields))
    return account_all(resolved.techniques, ledger, facts)


def single_rank(kind, sizes, config, *, rank, length, **options):
    """Run one step of a model of Transformers, of any size, as one rank, and account for it.

    Args:
        kind: Type of the model.
        sizes: Fields of its configuration.
        config: Configuration of the run.
        rank: The rank.
        length: Tokens of a sequence.
        options: Arguments of `from_config`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), **options)
    resolved = resolved_of(
        {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **config}
    )
    ledger = account(model, resolved, rank, tokens=length)
    return run_single_rank(model, resolved, rank=rank, samples=1, length=length), ledger


def check_states(single_rank_run, ledger):
    """Compare the states of a rank with its ledger, and return them."""
    measured = {kind: getattr(single_rank_run, kind) for kind in STATES}
    assert measured == {kind: int(ledger.memory[kind][0]) for kind in STATES}
    return measured


@dataclass(frozen=True)
class FakeRank:
    """An engine of one rank of a fake world, in float32, and the data of one step of it."""

    engine: Engine
    ledger: Ledger
    data: Any


def fake_rank(start, kind, config, *, rank=0, tied=False, samples=2, length=8):
    """Start a world and build one of its ranks. A "frozen" model uses its side branch."""
    start(world_of(config), rank)
    model = cases.build(kind, tied=tied, dtype=torch.float32)
    resolved = resolved_of({**config, "train_micro_batch_size_per_gpu": samples})
    ledger = account(model, resolved, rank, tokens=samples * length)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    data = batch(resolved.batch.accumulation, samples=samples, length=length)
    if kind == "frozen":
        data["side"] = True
    return FakeRank(engine, ledger, data)


def integers(counts):
    """Return the bytes by kind of a ledger with a single candidate."""
    return {kind: int(count[0]) for kind, count in counts.items()}


def sent_by(engine, data):
    """Return the bytes that a step sends, by collective, without flags and scalars."""
    with count_traffic() as traffic:
        engine.train_batch(data)
    return {kind: count for kind, count in traffic.bytes().items() if kind != "control"}


def expected_traffic(ledger):
    """Return the predicted bytes on the wire, by collective."""
    return {kind: count for kind, count in integers(ledger.traffic).items() if count}


def check_bytes(fake, *, kinds=(), steps=1, slack=0):
    """Compare a rank's memory and traffic with its ledger, and return the measured bytes of both.

    Args:
        fake: The rank.
        kinds: Kinds of memory that are compared, by default all.
        steps: Steps before the memory is compared.
        slack: Bytes by which the sum over all messages of a collective may be off.
    """
    for _ in range(steps):
        measured = measure_step(fake.engine, fake.data)
    memory = integers(fake.ledger.memory)
    if kinds:
        measured = {kind: measured[kind] for kind in kinds}
        memory = {kind: memory[kind] for kind in kinds}
    assert measured == {kind: memory.get(kind, 0) for kind in measured}
    assert set(memory) <= set(measured)

    sent = sent_by(fake.engine, fake.data)
    expected = expected_traffic(fake.ledger)
    assert sent.keys() == expected.keys()
    assert all(abs(sent[kind] - expected[kind]) <= slack for kind in sent), (sent, expected)
    return measured, sent
