"""`plait.iterate_weights`: every value of every layout, once, in the same order on all ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import plait
from plait.errors import InputError
from tests.parity import cases, experts
from tests.parity.layouts import FOUR, TWO

BUCKET_BYTES = 4096
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": {"parallel": {"ep": 2}},
    "ep x ZeRO 3": {"parallel": {"ep": 2}, "zero_optimization": {"stage": 3}},
    "pp": {"parallel": {"pp": 2}},
}


def llama(seed, *, tied):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(cases.transformers_config("llama", tied=tied))


def mixtral(seed):
    """A layer keeps all of its experts in one tensor."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(
        "mixtral", vocab_size=cases.VOCABULARY, **tokens, **experts.SIZES["mixtral"]
    )
    return AutoModelForCausalLM.from_config(config)


def gathered(rank, world, layout, kind, trains):
    """Compare the buckets of a layout with the model in one process. Runs in a worker."""
    build = {
        "llama": lambda: llama(7, tied=False),
        "tied": lambda: llama(7, tied=True),
        "mixtral": lambda: mixtral(7),
    }[kind]
    expected = build().state_dict()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        **layout,
    }
    engine = plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))
    if trains:
        engine.train_batch({"input_ids": ids, "labels": ids})

    seen: dict[str, torch.Tensor] = {}
    sizes = []
    for bucket in plait.iterate_weights(engine.sharded, bucket_bytes=BUCKET_BYTES):
        assert not seen.keys() & bucket.keys(), "a name is yielded once"
        distinct = {id(tensor): tensor for tensor in bucket.values()}
        sizes.append(sum(tensor.nbytes for tensor in distinct.values()))
        assert sizes[-1] <= BUCKET_BYTES or len(distinct) == 1
        assert not any(tensor.requires_grad for tensor in bucket.values())
        seen |= {name: tensor.clone() for name, tensor in bucket.items()}
    assert all(first + second > BUCKET_BYTES for first, second in pairwise(sizes)), (
        "buckets are filled"
    )

    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(seen[name], tensor), name
    if trains:  # and training goes on
        engine.train_batch({"input_ids": ids, "labels": ids})
    engine.close()


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("layout", ["ZeRO 1", "ZeRO 3", "tp", "sequence parallel", "pp"])
def test_two_ranks(pool, layout, kind):
    pool.run(2, gathered, TWO[layout], kind, layout == "ZeRO 3")


@pytest.mark.parametrize("layout", ["tp x pp", "pp x ZeRO 3", "hybrid sharding"])
def test_four_ranks(pool, layout):
    pool.run(4, gathered, FOUR[layout], "tied", False)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts(pool, layout):
    pool.run(2, gathered, EXPERT_LAYOUTS[layout], "mixtral", layout != "pp")


def handed_over(rank, world, target):
    """Tokens of a trainer and of a generator on another layout that has loaded its weights. Runs in a worker."""
    config = {"train_micro_batch_size_per_gpu": 2}
    trainer = plait.parallelize(llama(7, tied=True), {**config, **TWO["ZeRO 3"]})
    generator = plait.parallelize(llama(8, tied=True), {**config, **target})
    for bucket in plait.iterate_weights(trainer, bucket_bytes=BUCKET_BYTES):
        generator.model.load_state_dict(bucket, strict=False)
    prompts, settings = [[5, 3, 8]], {"max_new_tokens": 6, "temperature": 0, "eos_token_id": []}
    tokens = [plait.generate(one, prompts, **settings)[0].token_ids for one in (trainer, generator)]
    trainer.close()
    generator.close()
    return tokens[0], tokens[1]


@pytest.mark.parametrize("target", ["tp", "pp", "ZeRO 1"])
def test_a_generator_on_another_layout(pool, target):
    for trained, generated in pool.run(2, handed_over, TWO[target]):
        assert trained == generated


def test_wrong_arguments():
    sharded = plait.parallelize(llama(7, tied=False), {"train_micro_batch_size_per_gpu": 2})
    with pytest.raises(InputError, match="bucket_bytes = 0 must be at least 1"):
        plait.iterate_weights(sharded, bucket_bytes=0)
    sharded.close()
