"""The blocks in which optimizer states are quantised follow from the shape of a parameter."""

import pytest

from plait.parallel.precision.optimizer_states import block_of, state_bytes


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((32000, 4096), 256),
        ((4096, 14336), 256),
        # 11008 = 43 x 256, but an eighth of a row, 1376 = 43 x 32, must hold complete blocks too.
        ((4096, 11008), 32),
        ((8192, 29568), 16),
        ((50257, 768), 32),
        ((64, 3, 2048), 256),
        # Vectors are not quantised.
        ((4096,), 0),
        ((2048, 1), 0),
        # Fewer than 4096 numbers.
        ((16, 128), 0),
        ((64, 128), 16),
        # An eighth of a row has 360 = 8 x 45 numbers.
        ((1000, 2880), 0),
    ],
)
def test_block(shape, block):
    assert block_of(shape) == block


@pytest.mark.parametrize(
    ("form", "expected"), [(None, 8), ("bf16", 6), ("int8", 2 + 8 / 256), ("float8", 2 + 8 / 256)]
)
def test_bytes_per_number(form, expected):
    numel = 4096 * 4096
    size = state_bytes(form, (4096, 4096), itemsize=4, tensors=2, numel=numel)
    assert size / numel == expected


def test_states_that_are_not_quantised_are_float32():
    assert state_bytes("int8", (100,), itemsize=2, tensors=2, numel=100) == 2 * 4 * 100
