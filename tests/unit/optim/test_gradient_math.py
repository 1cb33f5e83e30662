"""Norms and scaling factors of gradients keep more digits than the gradients have."""

import pytest
import torch

from plait._torch.operators import TorchDispatchMode
from plait.optim import gradient_math
from plait.optim.gradient_math import joined_norm, multiply_all, norms_of

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_16_bits_are_float32(dtype, monkeypatch):
    """float16's own norm of the first tensor is infinite, and bfloat16 has only two digits."""
    # Chunks of 7 elements make several of these small tensors.
    monkeypatch.setattr(gradient_math, "_CHUNK", 7)
    for tensor in (
        torch.full((30, 20), 5000.0, dtype=dtype),
        torch.randn(5, 40).to(dtype).t(),
        torch.zeros(0, dtype=dtype),
    ):
        (norm,) = norms_of([tensor])
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(tensor.double().norm().item(), rel=1e-6)


def test_a_long_tensor_is_converted_in_chunks(monkeypatch):
    """The conversion to float32 copies the elements on a CPU."""
    sizes = []
    vector_norm = torch.linalg.vector_norm

    def recorded(x, *args, **kwargs):
        sizes.append(x.numel())
        return vector_norm(x, *args, **kwargs)

    # The chunk in use is larger than this tensor.
    monkeypatch.setattr(gradient_math, "_CHUNK", 100)
    monkeypatch.setattr(torch.linalg, "vector_norm", recorded)
    norms_of([torch.ones(1000, dtype=torch.bfloat16)])
    assert max(sizes) == 100


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_factor_is_not_rounded_to_the_gradients(dtype, as_tensor):
    """1 / 3 in bfloat16 is wrong by 0.2 %, and this factor is 0 in float16."""
    factor = torch.tensor(2.0**-26 / 3, dtype=torch.float64)
    tensor = torch.full((4,), 30000.0, dtype=dtype)
    wide = torch.full((2,), 3.0, dtype=torch.float64)
    multiply_all([tensor, wide], factor if as_tensor else factor.item())
    assert torch.equal(tensor, torch.full((4,), 30000.0, dtype=torch.float64).mul(factor).to(dtype))
    assert wide[0].item() == pytest.approx(2.0**-26, rel=1e-15)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_factor_with_another_default_dtype(dtype):
    tensor = torch.full((4,), 3.0, dtype=dtype)
    torch.set_default_dtype(torch.float64)
    try:
        multiply_all([tensor], 0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(tensor, torch.full((4,), 1.5, dtype=dtype))


def test_norms_of_several_dtypes():
    """float64 keeps its digits, and complex gradients have real norms."""
    tensors = [
        torch.full((3,), 1 / 3, dtype=torch.float64),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64) * 1j,
    ]
    norms = norms_of(tensors)
    assert [norm.dtype for norm in norms] == [torch.float64, torch.float32, torch.float32]
    assert [norm.item() for norm in norms] == pytest.approx([3**-0.5, 2, 2**0.5], rel=1e-7)


def test_the_joined_norm_is_that_of_all_elements():
    tensors = [
        torch.randn(50),
        torch.randn(7, 3, dtype=torch.float64),
        torch.zeros(0),
        torch.randn(9),
    ]
    expected = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm()
    actual = joined_norm(norms_of(tensors))
    assert actual.dtype == torch.float64
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert joined_norm(norms_of([torch.ones(2), torch.full((2,), torch.inf)])).isinf()


def test_the_number_of_operators_does_not_grow_with_the_tensors():
    class OperatorNames(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    def operators(count):
        tensors = list(torch.ones(count, 3).unbind())
        with OperatorNames() as mode:
            multiply_all(tensors, 1 / joined_norm(norms_of(tensors)))
        return mode.names

    assert operators(2) == operators(60)
