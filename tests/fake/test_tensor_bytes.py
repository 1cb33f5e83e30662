"""Tensor parallelism: memory and traffic equal the ledger's, and traffic grows with activations."""

from itertools import product

import pytest

from tests.covers import cover
from tests.fake.worlds import check_bytes, fake_rank
from tests.parity.tensor_parallel import settings

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
def test_memory_and_traffic(fake_world, kind, world, tp, stage, replicas, sequence, accumulation):
    check_bytes(
        fake_rank(fake_world, kind, settings(world, tp, stage, replicas, accumulation, sequence))
    )


@pytest.mark.parametrize(
    ("kind", "world", "stage", "sequence"),
    [("gpt2", 2, 0, False), ("llama", 4, 1, True), ("qwen3", 4, 2, False), ("llama", 4, 3, True)],
)
def test_updates_in_the_backward(fake_world, kind, world, stage, sequence):
    """Only the gradients change. Those of a unit, or of a parameter without ZeRO, are left."""
    measurements = []
    for in_backward in (False, True):
        config = {**settings(world, 2, stage, 1, 1, sequence), "gradient_clipping": 0}
        config["parallel"] |= {"unused_parameters": False, "optimizer_in_backward": in_backward}
        measurements.append(check_bytes(fake_rank(fake_world, kind, config)))
    (at_end, sent_at_end), (inside, sent_inside) = measurements
    assert inside["gradients"] < at_end["gradients"]
    assert {**inside, "gradients": 0} == {**at_end, "gradients": 0}
    assert sent_inside == sent_at_end


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_overlapped_sums_send_the_same(fake_world, kind, stage):
    check_bytes(fake_rank(fake_world, kind, settings(4, 2, stage, 1, 2, tensor_overlap=3)))


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "gpt_neox"])
def test_other_families(fake_world, kind):
    """The families differ in gathered outputs, sliced inputs and biases."""
    check_bytes(fake_rank(fake_world, kind, settings(2, 2, 0, 1, 1)))


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_traffic_grows_with_activations_only(fake_world, sequence):
    """Twice the tokens send twice the bytes."""
    config = settings(2, 2, 0, 1, 1, sequence)
    totals = []
    for sizes in ({}, {"samples": 4}, {"length": 16}):
        _, sent = check_bytes(fake_rank(fake_world, "llama", config, **sizes))
        totals.append(sum(sent.values()))
    # Sequence parallelism all-reduces the gradients of five replicated norms of 32 float32 numbers
    # over two ranks.
    norms = 2 * 5 * 32 * 4 // 2 if sequence else 0
    single, *doubled = [total - norms for total in totals]
    assert doubled == [2 * single, 2 * single]
