"""An MLP in tiles computes what one process does on all tokens: losses, gradients, the norm and weights in float64, in every layout."""

import pytest
import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from tests.covers import proof_after
from tests.measured.traffic import count_traffic
from tests.parity import adapted
from tests.parity.experts import (
    assert_equal,
    build,
    case_of,
    cases_of,
    configured,
    steps,
    train,
)

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
"""`make test` takes the first, `make proof` all, and test_combinations.py what nobody chose."""


@pytest.mark.parametrize("case", proof_after(1, CASES, name=lambda case: case.name))
def test_equals_one_process(pool, case):
    """To 1e-10, two steps of two micro-batches, clipped."""
    assert_equal(case, pool.run(case.world, train, case))


def sent(rank, world, tokens):
    """Bytes of a step. Runs in a worker."""
    case = case_of(f"llama zero3 tp2 dp2 tile{tokens} sequence causal")
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        with count_traffic() as traffic:
            engine.train_batch(steps(case, 4)[0][:2])
    return {
        kind: count
        for kind, count in traffic.bytes().items()
        if kind not in ("control", "broadcast")
    }


def test_tiles_send_nothing_again(pool):
    """At stage 3 a block is gathered as often as without tiles, and a tile that is computed again waits for nobody."""
    assert pool.run(4, sent, 4) == pool.run(4, sent, 0)


def adapters(rank, world):
    """Largest differences of gradients with tiles and without, in an own training loop. Runs in a worker."""
    found = []
    for tokens in (0, 3):
        model = adapted.model(torch.float64)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "parallel": {"mlp_tile_tokens": tokens},
        }
        with keeping_float64(model):
            sharded = plait.parallelize(model, config)
            ids = torch.arange(32).view(2, 16) % 32 + rank
            sharded(input_ids=ids, labels=ids).loss.backward()
        found.append(
            {
                name: p.grad.full_tensor()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
    assert len(found[0]) > 10
    return [float((found[1][name] - value).abs().max()) for name, value in found[0].items()]


def test_adapters(pool):
    """LoRA on the layers of an MLP, whose own weights are frozen."""
    assert all(max(found) < 1e-13 for found in pool.run(2, adapters))


@pytest.mark.parametrize("context", proof_after(1, ["ulysses", "ring", "all-gather-kv"]))
def test_with_inputs_of_blocks_in_files(pool, context):
    """Parts of sequences, in tiles, with what blocks keep elsewhere than on the device."""
    case = case_of(f"mistral cp2 packed window {context} files full tile5")
    assert_equal(case, pool.run(case.world, train, case))
