"""Activations: what a dry run on fake tensors predicts is what a real micro-batch keeps, to the byte."""

import pytest
import torch

import plait
from tests.covers import cover
from tests.fake.activations import predicted_activations
from tests.fake.worlds import account, batch, expected_traffic, integers, resolved_of, sent_by
from tests.measured.memory import measure_activations
from tests.parity import cases
from tests.parity.tensor_parallel import settings

SAMPLES, LENGTH = 2, 8
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
    """(model, resolved, ledger) before anything is applied."""
    model, resolved = cases.build(kind, tied=False, dtype=torch.float32), resolved_of(config)
    (measured,) = predicted_activations(model, resolved, samples=SAMPLES, length=LENGTH)
    return (
        model,
        resolved,
        account(model, resolved, 0, tokens=SAMPLES * LENGTH, activations=measured),
    )


def check(fake_world, kind, tp, sequence, stage, mode, dtype, **more):
    """Blocks, head and loss; and the traffic that recomputation repeats."""
    fake_world(2 * tp)
    config = settings(2 * tp, tp, stage, 1, 1, sequence, recompute=RECOMPUTE[mode], **more)
    config |= {
        "bf16": {"enabled": dtype == "bf16"},
        "activation_checkpointing": {"partition_activations": mode == "sliced"},
    }
    model, resolved, ledger = predicted(kind, config)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    held, memory = measure_activations(engine, batch(1)), integers(ledger.memory)
    assert {name: held[name] for name in KINDS} == {name: memory[name] for name in KINDS}
    assert sent_by(engine, batch(1)) == expected_traffic(ledger)


@pytest.mark.parametrize(
    ("kind", "tp", "sequence", "stage", "mode", "dtype"), cover(CASES, strength=1)
)
def test_foretold_is_measured(fake_world, kind, tp, sequence, stage, mode, dtype):
    check(fake_world, kind, tp, sequence, stage, mode, dtype)


@pytest.mark.parametrize(("tp", "loss_parallel"), [(1, False), (2, True), (1, True), (2, False)])
def test_with_the_loss_in_pieces(fake_world, tp, loss_parallel):
    """The head's input takes the place of the logits; the loss's collectives go out twice."""
    check(
        fake_world,
        "llama",
        tp,
        tp == 2 and loss_parallel,
        3,
        "selective",
        None,
        loss_chunk_tokens=6,
        loss_parallel=loss_parallel,
    )


@pytest.mark.parametrize(
    ("tp", "sequence", "mode", "dtype"),
    [
        (1, False, "none", "bf16"),
        (1, False, "half", None),
        (2, True, "none", None),
        (2, False, "full", None),
    ],
)
def test_with_the_mlp_in_tiles(fake_world, tp, sequence, mode, dtype):
    """What is wide is not kept, and nothing is sent again."""
    check(fake_world, "llama", tp, sequence, 3, mode, dtype, mlp_tile_tokens=6)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_tile_keeps_nothing_wide(fake_world, mode):
    """Not the results of operators either that are kept of the rest of a block."""
    fake_world(1)
    kept = []
    for tokens in (0, 4):
        config = settings(
            1,
            1,
            0,
            1,
            1,
            recompute=RECOMPUTE[mode] | ({"keep": ["matmul"]} if mode == "selective" else {}),
            mlp_tile_tokens=tokens,
        )
        model, _, ledger = predicted("llama", config)
        kept.append(integers(ledger.memory)["activations"])
    wide = 2 * SAMPLES * LENGTH * model.config.intermediate_size * 4  # gate and up of a block
    assert kept[0] - kept[1] >= model.config.num_hidden_layers * wide
