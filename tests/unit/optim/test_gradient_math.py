"""Norms and factors have more digits than the gradients."""

import pytest
import torch

from plait._torch.operators import TorchDispatchMode
from plait.optim import gradient_math
from plait.optim.gradient_math import joined_norm, multiply_all, norms_of

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_16_bits_are_float32(dtype, monkeypatch):
    """A21: float16's own norm of these is inf, bfloat16's is wrong in the third digit. Also in pieces, of any stride."""
    monkeypatch.setattr(gradient_math, "_CHUNK", 7)
    for tensor in (
        torch.full((30, 20), 5000.0, dtype=dtype),
        torch.randn(5, 40).to(dtype).t(),
        torch.zeros(0, dtype=dtype),
    ):
        (found,) = norms_of([tensor])
        assert found.dtype == torch.float32 and float(found) == pytest.approx(
            float(tensor.double().norm()), rel=1e-6
        )


def test_a_long_tensor_is_not_copied_at_once(monkeypatch):
    """A21: a CPU widens what it adds up."""
    monkeypatch.setattr(gradient_math, "_CHUNK", 100)
    seen = []
    original = torch.linalg.vector_norm
    monkeypatch.setattr(
        torch.linalg,
        "vector_norm",
        lambda x, *a, **k: (seen.append(x.numel()), original(x, *a, **k))[1],
    )
    norms_of([torch.ones(1000, dtype=torch.bfloat16)])
    assert max(seen) == 100


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_factor_is_not_rounded_to_the_gradients(dtype, as_tensor):
    """A21: 1 / 3 in bfloat16 is off by 0.2 %, and a small one is 0 in float16. Mixed dtypes."""
    tensor, wide = (
        torch.full((4,), 30000.0, dtype=dtype),
        torch.full((2,), 3.0, dtype=torch.float64),
    )
    factor = torch.tensor(2.0**-26 / 3, dtype=torch.float64)
    multiply_all([tensor, wide], factor if as_tensor else float(factor))
    assert torch.equal(
        tensor, torch.full((4,), 30000 * 2.0**-26 / 3, dtype=torch.float64).to(dtype)
    )
    assert float(wide[0]) == pytest.approx(2.0**-26, rel=1e-15)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_factor_where_another_dtype_is_the_default(dtype):
    tensor = torch.full((4,), 3.0, dtype=dtype)
    torch.set_default_dtype(torch.float64)
    try:
        multiply_all([tensor], 0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(tensor, torch.full((4,), 1.5, dtype=dtype))


def test_other_kinds_of_tensors():
    """float64 keeps its digits beside halves, and complex gradients have real norms."""
    tensors = [
        torch.full((3,), 1 / 3, dtype=torch.float64),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64) * 1j,
    ]
    found = norms_of(tensors)
    assert [norm.dtype for norm in found] == [torch.float64, torch.float32, torch.float32]
    assert [float(norm) for norm in found] == pytest.approx([3**-0.5, 2, 2**0.5], rel=1e-7)


def test_a_joined_norm_is_that_of_all_elements():
    """Also of norms with different digits, and of elements that are not finite."""
    tensors = [
        torch.randn(50),
        torch.randn(7, 3, dtype=torch.float64),
        torch.zeros(0),
        torch.randn(9),
    ]
    expected = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm()
    found = joined_norm(norms_of(tensors))
    assert found.dtype == torch.float64 and float(found) == pytest.approx(float(expected), rel=1e-6)
    assert joined_norm(norms_of([torch.ones(2), torch.full((2,), torch.inf)])).isinf()


def test_operators_of_a_norm_do_not_grow_with_the_tensors():
    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    counts = []
    for number in (2, 60):
        names = []
        tensors = [torch.ones(3) for _ in range(number)]
        with Operators():
            norm = joined_norm(norms_of(tensors))
            multiply_all(tensors, 1 / norm)
        counts.append(names)
    assert counts[0] == counts[1]
