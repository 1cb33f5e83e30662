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


def build(kind, seed=7):
    """Build a small model. A layer of Mixtral keeps all of its experts in one tensor."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    if kind == "mixtral":
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        fields = {"vocab_size": cases.VOCABULARY, **tokens, **experts.SIZES["mixtral"]}
        config = AutoConfig.for_model("mixtral", **fields)
    else:
        config = cases.transformers_config("llama", tied=kind == "tied")
    return AutoModelForCausalLM.from_config(config)


def compare_buckets(rank, world, layout, kind, trains):
    """Compare the buckets of a layout with the model in one process. Runs on every rank."""
    # With a learning rate of 0 a step changes nothing.
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        **layout,
    }
    engine = cases.engine(build(kind), config)
    ids = torch.randint(0, cases.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids, "labels": ids}
    if trains:
        engine.train_batch(batch)

    weights: dict[str, torch.Tensor] = {}
    sizes = []
    for bucket in plait.iterate_weights(engine.sharded, bucket_bytes=BUCKET_BYTES):
        assert not weights.keys() & bucket.keys(), "a name is yielded once"
        # Tied parameters have two names.
        distinct = {id(tensor): tensor for tensor in bucket.values()}
        sizes.append(sum(tensor.nbytes for tensor in distinct.values()))
        assert sizes[-1] <= BUCKET_BYTES or len(distinct) == 1
        for name, tensor in bucket.items():
            assert not tensor.requires_grad
            weights[name] = tensor.clone()
    for size, next_size in pairwise(sizes):
        assert size + next_size > BUCKET_BYTES, "buckets are filled"

    torch.testing.assert_close(weights, dict(build(kind).state_dict()), rtol=0, atol=0)
    if trains:
        engine.train_batch(batch)
    engine.close()


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("layout", ["ZeRO 1", "ZeRO 3", "tp", "sequence parallel", "pp"])
def test_two_ranks(pool, layout, kind):
    pool.run(2, compare_buckets, TWO[layout], kind, layout == "ZeRO 3")


@pytest.mark.parametrize("layout", ["tp x pp", "pp x ZeRO 3", "hybrid sharding"])
def test_four_ranks(pool, layout):
    pool.run(4, compare_buckets, FOUR[layout], "tied", False)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts(pool, layout):
    pool.run(2, compare_buckets, EXPERT_LAYOUTS[layout], "mixtral", layout != "pp")


def hand_over(rank, world, target):
    """Load a trainer's weights into a model of another layout, and return tokens of both.

    Runs on every rank.
    """
    config = {"train_micro_batch_size_per_gpu": 2}
    trainer = plait.parallelize(build("tied"), {**config, **TWO["ZeRO 3"]})
    generator = plait.parallelize(build("tied", seed=8), {**config, **target})
    for bucket in plait.iterate_weights(trainer, bucket_bytes=BUCKET_BYTES):
        generator.model.load_state_dict(bucket, strict=False)

    tokens = []
    for sharded in (trainer, generator):
        results = plait.generate(
            sharded, [[5, 3, 8]], max_new_tokens=6, temperature=0, eos_token_id=[]
        )
        tokens.append(results[0].token_ids)
        sharded.close()
    return tokens


@pytest.mark.parametrize("target", ["tp", "pp", "ZeRO 1"])
def test_a_generator_on_another_layout(pool, target):
    for trainer_tokens, generator_tokens in pool.run(2, hand_over, TWO[target]):
        assert trainer_tokens == generator_tokens


def test_a_bucket_without_bytes_is_refused():
    sharded = plait.parallelize(build("llama"), {"train_micro_batch_size_per_gpu": 2})
    with pytest.raises(InputError, match="bucket_bytes = 0 must be at least 1"):
        plait.iterate_weights(sharded, bucket_bytes=0)
    sharded.close()


def test_parameters_in_files_are_refused(tmp_path):
    """The message names the section that moves the parameters to files, with their states."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"train_micro_batch_size_per_gpu": 2}
    zero = {"stage": 1, "offload_optimizer": nvme}
    sharded = plait.parallelize(build("llama"), {**config, "zero_optimization": zero})
    with pytest.raises(InputError, match=r'offload_optimizer.device = "nvme".*set it to "none"'):
        plait.iterate_weights(sharded)
    sharded.close()

    zero["offload_optimizer"] = {"device": "none"}
    sharded = plait.parallelize(build("llama"), {**config, "zero_optimization": zero})
    assert list(plait.iterate_weights(sharded))
    sharded.close()
