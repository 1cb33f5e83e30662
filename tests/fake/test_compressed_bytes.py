"""Measured bytes on the wire and in memory equal the ledger's for every compression."""

from itertools import product

import pytest
import torch

import plait
from plait.comm.compress import POWERSGD_START
from tests.covers import cover
from tests.fake.worlds import batch, check_bytes, fake_rank, sent_by
from tests.parity.cases import PlainModel
from tests.parity.data_parallel import settings

SHARDED = {
    "int8 gradients": {"compress_gradients": "int8"},
    "int4 gradients with feedback": {"compress_gradients": "int4", "error_feedback": True},
    "int8 weights": {"compress_weights": "int8"},
    "int4 both": {"compress_gradients": "int4", "compress_weights": "int4"},
    "none": {},
}
BUCKETS = {
    "int8": {"compress_gradients": "int8"},
    "int4": {"compress_gradients": "int4"},
    "int4 without feedback": {"compress_gradients": "int4", "error_feedback": False},
    "powersgd": {"compress_gradients": "powersgd", "powersgd_rank": 2},
}
LAYOUTS = [(2, 1, 1, 0), (5, 2, 1, 4), (7, 3, 1, 6), (8, 1, 2, 0), (8, 2, 2, 0), (8, 3, 2, 0)]


def check(start, kind, config, rank=0, **options):
    """Compare with the ledger, and return the bytes on the wire."""
    fake = fake_rank(start, kind, config, rank=rank, tied=kind == "llama")
    _, sent = check_bytes(fake, **options)
    return sent


def features(ranks, stage, replicas, rank, kind, accumulation, compression):
    """Return the groups of settings that have to meet."""
    return frozenset(
        {
            (stage, compression),
            (replicas, compression),
            (stage, replicas, kind),
            (stage, replicas, accumulation),
        }
    )


@pytest.mark.parametrize(
    ("ranks", "stage", "replicas", "rank", "kind", "accumulation", "compression"),
    cover(
        (
            (*layout, *others)
            for layout in LAYOUTS
            for others in product(("llama", "frozen"), (1, 3), SHARDED)
        ),
        features=features,
        strength=1,
    ),
)
def test_sharded(fake_world, kind, ranks, stage, replicas, rank, accumulation, compression):
    config = settings(ranks, stage, replicas, accumulation)
    config["parallel"] |= SHARDED[compression]
    check(fake_world, kind, config, rank)


@pytest.mark.parametrize(
    ("copy", "weights", "kind"), cover(product((2, 4), ("none", "int8"), ("llama", "frozen")))
)
def test_second_copy(fake_world, kind, weights, copy):
    """The backward gathers from fewer ranks and receives less."""
    config = settings(8, 3, 1, 2)
    config["parallel"] |= {"compress_weights": weights}
    without_copy = check(fake_world, kind, config)
    config["parallel"] |= {"secondary_partition": copy}
    assert check(fake_world, kind, config)["all_gather"] < without_copy["all_gather"]


@pytest.mark.parametrize(
    ("ranks", "kind", "bucket_mib", "compression"),
    cover(product((2, 5), ("llama", "frozen"), (0.001, 0.02, 25), BUCKETS)),
)
def test_stage_0(fake_world, ranks, kind, bucket_mib, compression):
    config = settings(ranks, 0, 1, 3)
    config["parallel"] |= {**BUCKETS[compression], "bucket_mib": bucket_mib}
    steps = POWERSGD_START if compression == "powersgd" else 1
    # Fifths of a bucket are rounded to bytes, so the sum may be off by one per bucket.
    check(fake_world, kind, config, steps=steps, slack=30 if ranks == 5 else 0)


ALGORITHMS = ("all-reduce", "reduce-scatter+all-gather", "ring", "recursive-doubling")


@pytest.mark.parametrize(
    ("ranks", "wire", "bucket_mib", "algorithm"),
    cover(product((2, 5, 8), ("fp32", "bf16"), (0.02, 25), ALGORITHMS)),
)
def test_algorithms(fake_world, ranks, wire, bucket_mib, algorithm):
    config = settings(ranks, 0, 1, 2, communication_data_type=wire)
    config["parallel"] |= {"all_reduce": algorithm, "bucket_mib": bucket_mib}
    # Every message is rounded to bytes, so the sum may be off by one per message.
    check(fake_world, "llama", config, slack=0 if ranks == 2 else 20)


def test_int8_is_a_quarter_of_float32_and_int4_an_eighth(fake_world):
    # Blocks of numbers with a scale fit the width of 512. Tiny matrices would be mostly padding.
    sizes = []
    for compression in ("none", "int8 gradients", "int4 both"):
        fake_world(2)
        with torch.device("meta"):
            model = PlainModel(tied=False, width=512)
        config = settings(2, 2, 1, 1)
        config["parallel"] |= SHARDED[compression]
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        sizes.append(sent_by(engine, {**batch(1), "side": True})["reduce_scatter"])
    assert sizes[0] / sizes[1] == pytest.approx(3.9, abs=0.05)
    assert sizes[0] / sizes[2] == pytest.approx(7.6, abs=0.1)
