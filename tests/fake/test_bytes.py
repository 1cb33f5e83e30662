"""Measured bytes in memory and on the wire equal the ledger's for every ZeRO stage."""

from itertools import product

import numpy as np
import pytest
import torch

from plait.model.facts import model_facts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from tests.covers import cover
from tests.fake.worlds import check_bytes, fake_rank, integers, sent_by
from tests.measured.memory import measure_step
from tests.parity import cases
from tests.parity.data_parallel import settings

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 on the wire": {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
    "fp32, bf16 on the wire": {"communication_data_type": "bf16"},
}
LAYOUTS = [
    # (ranks, ZeRO stage, replicas, rank)
    (4, 0, 1, 0), (1, 0, 1, 0), (2, 1, 1, 0), (5, 2, 1, 4),
    (7, 3, 1, 6), (8, 1, 2, 0), (8, 2, 2, 0), (8, 3, 2, 0),
]  # fmt: skip


def features(world, stage, replicas, rank, kind, accumulation, precision):
    """Return the pairs of settings that have to meet."""
    layout = (world, stage, replicas)
    return frozenset(
        {(layout, kind), (layout, accumulation), (stage, precision), (kind, precision)}
    )


@pytest.mark.parametrize(
    ("world", "stage", "replicas", "rank", "kind", "accumulation", "precision"),
    cover(
        (
            (*layout, *others)
            for layout in LAYOUTS
            for others in product(("llama", "frozen"), (1, 3), PRECISIONS)
        ),
        features=features,
        strength=1,
    ),
)
def test_memory_and_traffic(
    fake_world, kind, world, stage, replicas, rank, accumulation, precision
):
    config = settings(world, stage, replicas, accumulation, **PRECISIONS[precision])
    check_bytes(fake_rank(fake_world, kind, config, rank=rank, tied=kind == "llama"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_1_to_1024_ranks(fake_world, stage):
    for world in (1, 2, 4, 16, 64, 256, 1024):
        fake = fake_rank(fake_world, "llama", settings(world, stage, 1, 1), tied=True)
        assert measure_step(fake.engine, fake.data) == integers(fake.ledger.memory), world


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_does_not_grow_with_the_batch(fake_world, stage):
    config = settings(4, stage, 1, 1)
    sent = []
    for samples, length in ((2, 8), (4, 8), (2, 16)):
        fake = fake_rank(fake_world, "llama", config, tied=True, samples=samples, length=length)
        sent.append(sent_by(fake.engine, fake.data))
    assert sent[0] == sent[1] == sent[2]


def test_accumulation_divides_the_traffic_of_a_sample(fake_world):
    """Stages 0 and 1 send the same for several micro-batches as for one."""
    for stage in (0, 1):
        sent = []
        for accumulation in (1, 4):
            fake = fake_rank(fake_world, "llama", settings(4, stage, 1, accumulation), tied=True)
            sent.append(sent_by(fake.engine, fake.data))
        assert sent[0] == sent[1]


def test_100_000_candidates_in_one_call():
    """An entry of a ledger for a whole search space equals the ledger of that candidate."""
    model = cases.build("llama", tied=True, dtype=torch.float32)
    facts = model_facts(model, ("model.layers.0", "model.layers.1"))
    generator = np.random.default_rng(0)
    number = 100_000
    stage = generator.integers(0, 4, number)
    degrees = {
        "dp_replicate": 2 ** generator.integers(0, 4, number),
        "dp_shard": np.where(stage == 0, 1, 2 ** generator.integers(0, 11, number)),
        "accumulation": generator.integers(1, 9, number),
    }

    def ledger_of(stage, degrees):
        techniques = (Precision(), DataParallel.sweep(stage=stage))
        return account_all(techniques, Ledger.start(**degrees), facts)

    ledger = ledger_of(stage, degrees)
    for index in range(0, number, 9973):
        degrees_of_candidate = {name: values[index] for name, values in degrees.items()}
        candidate = ledger_of(stage[index], degrees_of_candidate)
        for table in ("memory", "traffic"):
            entry = {kind: int(count[index]) for kind, count in getattr(ledger, table).items()}
            assert entry == integers(getattr(candidate, table))


@pytest.mark.parametrize(
    ("world", "stage", "kind"), [(1, 0, "llama"), (3, 1, "gpt2"), (2, 2, "llama"), (4, 3, "qwen3")]
)
def test_updates_in_the_backward(fake_world, world, stage, kind):
    """Only the gradients change. Those of one unit, or of one unsharded parameter, are left."""
    for precision in ("fp32", "bf16"):
        measurements = []
        for in_backward in (False, True):
            config = {
                **settings(world, stage, 1, 1),
                "gradient_clipping": 0,
                "bf16": {"enabled": precision == "bf16", "check_grad_overflow": False},
            }
            config["parallel"] |= {"unused_parameters": False, "optimizer_in_backward": in_backward}
            fake = fake_rank(fake_world, kind, config, tied=kind == "llama")
            measured = measure_step(fake.engine, fake.data)
            memory = integers(fake.ledger.memory)
            assert measured == {name: memory.get(name, 0) for name in measured}
            measurements.append(measured)
        at_end, inside = measurements
        assert inside["gradients"] < at_end["gradients"]
        assert {**inside, "gradients": 0} == {**at_end, "gradients": 0}
