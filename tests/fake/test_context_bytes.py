"""Context parallelism: traffic and memory equal the ledger's, and activations fall as 1 / cp."""

import pytest
import torch

import plait
from tests.fake.activations import predicted_activations
from tests.fake.worlds import STATES, FakeRank, account, batch, check_bytes, resolved_of
from tests.parity import cases

LENGTH = 32
CASES = [
    ("all-gather-kv", "llama", {"cp": 4, "dp_shard": 2}, 3, {}),
    ("all-gather-kv", "gpt2", {"cp": 2, "tp": 2}, 0, {"recompute": {"mode": "full"}}),
    ("all-gather-kv", "llama", {"cp": 2, "dp_replicate": 2}, 0,
     {"recompute": {"mode": "selective"}}),
    ("ring", "llama", {"cp": 4, "tp": 2}, 0, {"recompute": {"mode": "full"}}),
    ("ring", "qwen3", {"cp": 2, "dp_shard": 2}, 1, {}),
    ("ring", "gpt2", {"cp": 2}, 0, {"recompute": {"mode": "selective"}}),
    ("ulysses", "llama", {"cp": 4}, 0, {"recompute": {"mode": "full"}}),
    ("ulysses", "qwen3", {"cp": 2, "dp_shard": 2}, 2, {}),
    ("ulysses", "llama", {"cp": 2, "tp": 2}, 0,
     {"sequence_parallel": True, "recompute": {"mode": "selective"}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "family", "degrees", "stage", "options"), CASES)
def test_memory_and_traffic(fake_world, kind, family, degrees, stage, options):
    """The last rank sends and holds the bytes of its ledger."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "parallel": {**degrees, **options, "context": kind},
    }
    resolved = resolved_of(config)
    last = resolved.layout.world_size - 1
    fake_world(last + 1, last)
    model = cases.build(family, tied=False, dtype=torch.float32)
    (activations,) = predicted_activations(model, resolved, length=LENGTH)
    ledger = account(model, resolved, last, tokens=2 * LENGTH, activations=activations)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    check_bytes(FakeRank(engine, ledger, batch(1, length=LENGTH)), kinds=STATES)


@pytest.mark.parametrize(
    "kind", ["all-gather-kv", "ulysses", pytest.param("ring", marks=pytest.mark.proof)]
)
def test_activations_fall_with_cp(fake_world, kind):
    """Eight ranks keep as much per rank of a million tokens as one rank of an eighth of them."""
    sizes = []
    for cp, length in ((1, 2**17), (8, 2**20)):
        fake_world(cp)
        resolved = resolved_of(
            {"train_micro_batch_size_per_gpu": 1, "parallel": {"cp": cp, "context": kind}}
        )
        model = cases.build("wide", tied=False, dtype=torch.float32)
        (activations,) = predicted_activations(model, resolved, samples=1, length=length)
        plain = activations.stages[0].modes["none"]
        sizes.append((sum(plain.saved), plain.head))
    (blocks_of_one, head_of_one), (blocks, head) = sizes
    # Labels are shifted before they are cut.
    assert head == pytest.approx(head_of_one, rel=1e-2)
    # Ulysses repeats key-value heads.
    assert blocks == pytest.approx(blocks_of_one, rel=0.35 if kind == "ulysses" else 0.1)
