"""The activations that a dry run predicts equal those of a real micro-batch, to the byte."""

import pytest
import torch

import plait
from tests.covers import cover
from tests.fake.activations import predicted_activations
from tests.fake.worlds import account, batch, expected_traffic, integers, resolved_of, sent_by
from tests.measured.memory import measure_activations
from tests.parity import cases
from tests.parity.tensor_parallel import settings

SAMPLES = 2
LENGTH = 8
KINDS = ("activations", "logits")
RECOMPUTE = {
    "none": {},
    "full": {"mode": "full"},
    "half": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "sliced": {"mode": "full"},
}
CASES = [
    (kind, tp, sequence, stage, mode, dtype)
    for kind in ("llama", "gpt2", "qwen3")
    for tp, sequence in ((2, True), (1, False), (2, False))
    for stage in (3, 0, 1, 2)
    for mode in ("half", "none", "full", "selective", "sliced")
    for dtype in (None, "bf16")
    if not (kind == "gpt2" and sequence)
    and not (dtype and stage == 0)
    and not (mode == "sliced" and (tp == 1 or sequence))
]


def predicted(kind, config):
    """Return the model, the resolved configuration and the ledger with predicted activations."""
    model = cases.build(kind, tied=False, dtype=torch.float32)
    resolved = resolved_of(config)
    (activations,) = predicted_activations(model, resolved, samples=SAMPLES, length=LENGTH)
    ledger = account(model, resolved, 0, tokens=SAMPLES * LENGTH, activations=activations)
    return model, resolved, ledger


def check(fake_world, kind, tp, sequence, stage, mode, dtype, **parallel):
    """Compare activations, logits, and the traffic that recomputation repeats."""
    fake_world(2 * tp)
    config = settings(2 * tp, tp, stage, 1, 1, sequence, recompute=RECOMPUTE[mode], **parallel)
    config |= {
        "bf16": {"enabled": dtype == "bf16"},
        "activation_checkpointing": {"partition_activations": mode == "sliced"},
    }
    model, resolved, ledger = predicted(kind, config)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    measured = measure_activations(engine, batch(1))
    expected = integers(ledger.memory)
    assert {name: measured[name] for name in KINDS} == {name: expected[name] for name in KINDS}
    assert sent_by(engine, batch(1)) == expected_traffic(ledger)


@pytest.mark.parametrize(
    ("kind", "tp", "sequence", "stage", "mode", "dtype"), cover(CASES, strength=1)
)
def test_predicted_activations_are_measured(fake_world, kind, tp, sequence, stage, mode, dtype):
    check(fake_world, kind, tp, sequence, stage, mode, dtype)


@pytest.mark.parametrize(("tp", "loss_parallel"), [(1, False), (2, True), (1, True), (2, False)])
def test_chunked_loss(fake_world, tp, loss_parallel):
    """The head's input is kept in place of the logits. The loss runs its collectives twice."""
    sequence = tp == 2 and loss_parallel
    options = {"loss_chunk_tokens": 6, "loss_parallel": loss_parallel}
    check(fake_world, "llama", tp, sequence, 3, "selective", None, **options)


@pytest.mark.parametrize(
    ("tp", "sequence", "mode", "dtype"),
    [
        (1, False, "none", "bf16"),
        (1, False, "half", None),
        (2, True, "none", None),
        (2, False, "full", None),
    ],
)
def test_tiled_mlp(fake_world, tp, sequence, mode, dtype):
    """Intermediate activations of the MLP are not kept, and no collective is repeated."""
    check(fake_world, "llama", tp, sequence, 3, mode, dtype, mlp_tile_tokens=6)


@pytest.mark.parametrize(
    "recompute",
    [{}, {"mode": "selective", "keep": ["matmul"]}],
    ids=["none", "selective"],
)
def test_tiled_mlp_keeps_no_intermediate_activations(fake_world, recompute):
    """Products of a tile are dropped even if those of the other parts of a block are kept."""
    fake_world(1)
    sizes = []
    for tokens in (0, 4):
        config = settings(1, 1, 0, 1, 1, recompute=recompute, mlp_tile_tokens=tokens)
        model, _, ledger = predicted("llama", config)
        sizes.append(integers(ledger.memory)["activations"])
    # The outputs of gate and up projection in float32.
    intermediate = 2 * SAMPLES * LENGTH * model.config.intermediate_size * 4
    assert sizes[0] - sizes[1] >= model.config.num_hidden_layers * intermediate
