"""What is a block of optimizer states follows from a parameter's whole shape."""

import pytest

from plait.parallel.precision.optimizer_states import block_of, state_bytes


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((32000, 4096), 256),
        ((4096, 14336), 256),
        ((4096, 11008), 32),  # 43 x 256: an eighth has 1376
        ((8192, 29568), 16),
        ((50257, 768), 32),
        ((64, 3, 2048), 256),
        ((4096,), 0),
        ((2048, 1), 0),
        ((16, 128), 0),  # fewer than 4096 numbers
        ((64, 128), 16),
        ((1000, 2880), 0),  # an eighth has 360 = 8 x 45
    ],
)
def test_block(shape, block):
    assert block_of(shape) == block


def test_bytes():
    kwargs = {"itemsize": 4, "tensors": 2, "numel": 4096 * 4096}
    found = {
        form: state_bytes(form, (4096, 4096), **kwargs) / 4096**2
        for form in (None, "bf16", "int8", "float8")
    }
    assert found == {None: 8, "bf16": 6, "int8": 2 + 8 / 256, "float8": 2 + 8 / 256}
    assert (
        state_bytes("int8", (100,), itemsize=2, tensors=2, numel=100) == 800
    )  # float32, though the parameter is narrower
