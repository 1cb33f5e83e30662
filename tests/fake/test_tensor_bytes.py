"""Tensor parallelism's memory and traffic on a fake world: measured equals the ledger's, and traffic grows with activations, not
parameters."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from tests.covers import cover
from tests.fake.worlds import FakeWorld
from tests.measured.memory import measure_step
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.tensor_parallel import settings

SAMPLES, LENGTH = 2, 8


def step(
    kind: str, config: dict[str, Any], *, samples: int = SAMPLES, length: int = LENGTH
) -> tuple[dict[str, int], dict[str, int], Ledger]:
    """(memory, traffic, ledger) of rank 0 for one step."""
    world = (
        config["parallel"]["tp"]
        * config["parallel"]["dp_replicate"]
        * config["parallel"]["dp_shard"]
    )
    model = cases.build(kind, tied=False, dtype=torch.float32)
    blocks = find_blocks(model)
    facts = model_facts(
        model, blocks, tensor_plan=make_plan(model, tp=config["parallel"]["tp"], blocks=blocks)
    )
    resolved = resolve(
        load({**config, "train_micro_batch_size_per_gpu": samples}), world_size=world
    )
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    accumulation = config["gradient_accumulation_steps"]
    ids = torch.arange(samples * accumulation * length).view(-1, length) % cases.VOCABULARY
    batch = {"input_ids": ids, "labels": ids}
    held = measure_step(engine, batch)
    with count_traffic() as traffic:
        engine.train_batch(batch)
    layout = resolved.layout
    start = Ledger.of_rank(layout, accumulation=accumulation, tokens=samples * length)
    techniques = resolved.techniques
    sent = {name: count for name, count in traffic.bytes().items() if name != "control"}
    return held, sent, account_all(techniques, start, facts)


LAYOUTS = [(2, 2, 0, 1), (4, 2, 0, 1), (4, 2, 1, 1), (4, 2, 3, 1), (8, 2, 2, 2)]


@pytest.mark.parametrize(
    ("world", "tp", "stage", "replicas", "kind", "sequence", "accumulation"),
    cover(
        (
            (*layout, *others)
            for layout in LAYOUTS
            for others in product(("llama", "qwen3"), (False, True), (1, 2))
        ),
        features=lambda world, tp, stage, replicas, *others: (
            (world, tp, stage, replicas),
            *others,
        ),
    ),
)
def test_memory_and_traffic(
    fake_world: FakeWorld,
    kind: str,
    world: int,
    tp: int,
    stage: int,
    replicas: int,
    sequence: bool,
    accumulation: int,
) -> None:
    """Exact, for every kind and collective."""
    fake_world(world)
    held, sent, ledger = step(kind, settings(world, tp, stage, replicas, accumulation, sequence))
    assert held == {name: int(count[0]) for name, count in ledger.memory.items()}
    assert sent == {name: int(count[0]) for name, count in ledger.traffic.items() if count[0]}


@pytest.mark.parametrize(
    ("kind", "world", "stage", "sequence"),
    [("gpt2", 2, 0, False), ("llama", 4, 1, True), ("qwen3", 4, 2, False), ("llama", 4, 3, True)],
)
def test_updates_in_the_backward(
    fake_world: FakeWorld, kind: str, world: int, stage: int, sequence: bool
) -> None:
    """The gradients of one unit's slices, of one parameter's where tp alone splits; everything else as at the end."""
    fake_world(world)
    found = []
    for in_backward in (False, True):
        config = {**settings(world, 2, stage, 1, 1, sequence), "gradient_clipping": 0}
        config["parallel"] |= {"unused_parameters": False, "optimizer_in_backward": in_backward}
        held, sent, ledger = step(kind, config)
        assert held == {name: int(count[0]) for name, count in ledger.memory.items()}
        found.append((held, sent))
    (at_end, sent_at_end), (inside, sent_inside) = found
    assert inside["gradients"] < at_end["gradients"]
    assert {**inside, "gradients": 0} == {**at_end, "gradients": 0}
    assert sent_inside == sent_at_end


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hidden_sums_send_the_same(fake_world: FakeWorld, kind: str, stage: int) -> None:
    fake_world(4)
    held, sent, ledger = step(kind, settings(4, 2, stage, 1, 2, tensor_overlap=3))
    assert held == {name: int(count[0]) for name, count in ledger.memory.items()}
    assert sent == {name: int(count[0]) for name, count in ledger.traffic.items() if count[0]}


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "gpt_neox"])
def test_other_families(fake_world: FakeWorld, kind: str) -> None:
    """Gathered outputs, sliced inputs, biases."""
    fake_world(2)
    held, sent, ledger = step(kind, settings(2, 2, 0, 1, 1))
    assert held == {name: int(count[0]) for name, count in ledger.memory.items()}
    assert sent == {name: int(count[0]) for name, count in ledger.traffic.items() if count[0]}


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_traffic_grows_with_activations_only(fake_world: FakeWorld, sequence: bool) -> None:
    """MISSION T3: twice the samples, twice the bytes (but for the gradients of replicated norms under sequence parallelism)."""
    fake_world(2)
    config = settings(2, 2, 0, 1, 1, sequence)
    _, once, _ = step("llama", config)
    _, twice, _ = step("llama", config, samples=2 * SAMPLES)
    _, longer, _ = step("llama", config, length=2 * LENGTH)
    norms = (
        2 * 5 * 32 * 4 // 2 if sequence else 0
    )  # five norms of 32 float32 gradients, all-reduced over 2 ranks
    for doubled in (twice, longer):
        assert sum(doubled.values()) - norms == 2 * (sum(once.values()) - norms)
