"""An MLP in tiles equals one process on all tokens, in float64 and on every layout."""

import pytest
import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from tests.covers import proof_after
from tests.measured.traffic import count_traffic
from tests.parity import adapted, cases
from tests.parity.experts import (
    assert_equal,
    build,
    case_of,
    cases_of,
    configured,
    steps,
    train,
)
from tests.parity.full_tensors import full_gradients

CASES = cases_of("""
    mistral cp2 packed window ring tile3
    llama zero3 dp2 tile3 full
    llama tp2 tile4 sequence selective uneven
    llama zero1 pp2 tile3 zbv layers4
    mixtral zero3 ep2 dp2 one balance tile4
    deepseek_v3 tp2 ep2 rate0.01 uneven sequence tile3 full
    llama zero3 tp2 dp2 tile1 overlap2
    llama zero3 cp4 one_target all-gather-kv tile3 chunk7
""")
"""`make test` takes the first. test_combinations.py takes random combinations."""


@pytest.mark.parametrize("case", proof_after(1, CASES, name=lambda case: case.name))
def test_equals_one_process(pool, case):
    assert_equal(case, pool.run(case.world, train, case))


def bytes_sent(rank, world, tokens):
    """Return the bytes of a step by collective. Runs on every rank."""
    case = case_of(f"llama zero3 tp2 dp2 tile{tokens} sequence causal")
    model = build(case)
    with keeping_float64(model):
        engine = cases.engine(model, configured(case))
        with count_traffic() as traffic:
            engine.train_batch(steps(case, 4)[0][:2])
    # Small messages in which ranks agree on the step are not data of the layers.
    ignored = ("control", "broadcast")
    return {kind: count for kind, count in traffic.bytes().items() if kind not in ignored}


def test_tiles_add_no_traffic(pool):
    """A block of stage 3 is gathered as often as without tiles, also for recomputed tiles."""
    assert pool.run(4, bytes_sent, 4) == pool.run(4, bytes_sent, 0)


def gradients_of_adapters(rank, world, tokens):
    """Return the gradients of a user's own loop with tiles of some tokens. Runs on every rank."""
    model = adapted.model(torch.float64)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "parallel": {"mlp_tile_tokens": tokens},
    }
    ids = torch.arange(32).view(2, 16) % 32 + rank
    with keeping_float64(model):
        plait.parallelize(model, config)(input_ids=ids, labels=ids).loss.backward()
    gradients = full_gradients(model)
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def test_adapters(pool):
    """LoRA adapts the layers of an MLP, whose own weights are frozen."""
    whole = pool.run(2, gradients_of_adapters, 0)
    tiled = pool.run(2, gradients_of_adapters, 3)
    for expected, actual in zip(whole, tiled, strict=True):
        assert len(expected) > 10
        for name, gradient in expected.items():
            assert float((actual[name] - gradient).abs().max()) < 1e-13, name


@pytest.mark.parametrize("context", proof_after(1, ["ulysses", "ring", "all-gather-kv"]))
def test_with_activations_in_files(pool, context):
    """Each rank has a part of each sequence, in tiles, and stores the inputs of blocks on disk."""
    case = case_of(f"mistral cp2 packed window {context} files full tile5")
    assert_equal(case, pool.run(case.world, train, case))
