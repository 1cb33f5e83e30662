"""The layout that a model for inference gets."""

from dataclasses import replace

import pytest

from plait.errors import InputError
from plait.inference.deployment import MemoryNeeds, place_model

GIB = 2**30


def cache_of(size, heads):
    """Return the cache of layers that are alike, whose heads tensor parallelism divides."""
    return lambda tp, pp: -(-size // (min(tp, heads) * pp))


LLAMA_70B = MemoryNeeds(
    weight_bytes=131 * GIB,
    split_bytes=131 * GIB,
    cache=cache_of(10 * GIB, 8),
    heads=64,
    key_value_heads=8,
    layers=80,
)


@pytest.mark.parametrize(
    ("devices", "memory", "key_value_heads", "expected"),
    [
        (1, 192, 8, (1, 1)),
        (8, 141, 8, (2, 1)),
        (8, 80, 8, (2, 1)),
        (8, 40, 8, (4, 1)),
        (8, 24, 8, (8, 1)),
        (16, 12, 8, (16, 1)),  # two ranks share a key and value head
        (6, 32, 8, (1, 5)),  # six ranks cannot split 64 heads
        (4, 40, 1, (4, 1)),
        (6, 40, 3, (6, 1)),
        (6, 60, 3, (3, 1)),
    ],
)
def test_the_smallest_layout_that_fits(devices, memory, key_value_heads, expected):
    needs = replace(
        LLAMA_70B,
        key_value_heads=key_value_heads,
        heads=48 if key_value_heads == 3 else 64,
        cache=cache_of(10 * GIB * key_value_heads // 8, key_value_heads),
    )
    placement = place_model(needs, devices=devices, device_bytes=memory * GIB)
    assert (placement.tp, placement.pp) == expected
    assert placement.weight_bytes + placement.cache_bytes <= memory * GIB


def test_a_model_that_does_not_fit_is_refused_with_numbers():
    message = (
        r"at tp = 8, pp = 1 a device would hold 16.4 GiB of weights and 1.2 GiB .*1 machine x 8 dev"
    )
    with pytest.raises(InputError, match=message):
        place_model(LLAMA_70B, devices=8, device_bytes=16 * GIB)


def test_requested_degrees():
    placement = place_model(LLAMA_70B, devices=8, device_bytes=80 * GIB, tp=2, pp=2)
    assert (placement.tp, placement.pp, placement.why) == (2, 2, "as requested")

    for tp, pp, message in (
        (16, None, "--tp 16: a machine has 8 devices"),
        (8, 2, "16 devices, but there are 8"),
    ):
        with pytest.raises(InputError, match=message):
            place_model(LLAMA_70B, devices=8, device_bytes=80 * GIB, tp=tp, pp=pp)
