"""Quantisation by its definition: error at most half a scale, bytes by the formula, what is not finite stays so."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plait.comm.quantise import BLOCK, Packing, Segment, dequantise, packed_bytes, quantise
from plait.errors import ModelError
from plait.verify.keep_float64 import keeping_float64

segments_of = st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=5)


def packing(given_, bits):
    return Packing(tuple(Segment(numel, matrix) for numel, matrix in given_), bits)


def rows_of(numel, *, rows=3, dtype=torch.float32):
    return torch.randn(rows, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_at_most_half_a_scale(bits):
    x = rows_of(5 * BLOCK) * torch.logspace(-6, 6, 5 * BLOCK)
    codes, scales = quantise(x, bits)
    assert codes.shape == (3, 5 * BLOCK * bits // 8)
    error = (dequantise(codes, scales, bits) - x).view(3, 5, BLOCK).abs().amax(-1)
    assert (error <= 0.5001 * scales).all()
    assert (error > 0.2 * scales).all(), "or it is no quantisation"


def test_where_another_dtype_is_the_default():
    """`torch.empty` without a dtype would make states and sums twice as large."""
    codes, scales = quantise(rows_of(BLOCK), 8)
    torch.set_default_dtype(torch.float64)
    try:
        assert dequantise(codes, scales, 8).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_extremes_and_zeros_are_exact(bits):
    x = torch.zeros(1, 3 * BLOCK)
    x[0, 5], x[0, BLOCK + 7] = -3.5, 1e-30
    assert torch.equal(dequantise(*quantise(x, bits), bits)[0, BLOCK * 2 :], torch.zeros(BLOCK))
    torch.testing.assert_close(dequantise(*quantise(x, bits), bits), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(bits, bad):
    x = rows_of(2 * BLOCK, rows=1)
    x[0, 3] = bad
    back = dequantise(*quantise(x, bits), bits)
    assert not back[0, :BLOCK].isfinite().all()
    assert back[0, BLOCK:].isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    segments_of,
    st.sampled_from([4, 8]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_packing(given_, bits, dtype):
    """Vectors are exact, matrices within half a scale, bytes as counted."""
    made = packing(given_, bits)
    rows = rows_of(sum(numel for numel, _ in given_), dtype=dtype)
    packed = made.pack(rows)
    sizes = [packed_bytes(n, bits) if matrix else n * dtype.itemsize for n, matrix in given_]
    assert packed.shape == (3, made.row_bytes(dtype))
    assert made.row_bytes(dtype) == sum(sizes)
    back = made.unpack(packed, dtype)
    assert back.shape == rows.shape and back.dtype == dtype
    sums, at, is_bf16 = made.unpack_sum(packed, dtype), 0, dtype == torch.bfloat16
    for numel, matrix in given_:
        a, b = rows[:, at : at + numel], back[:, at : at + numel]
        if not matrix:
            assert torch.equal(a, b)
        elif numel:
            bound = a.float().abs().max() / {8: 127, 4: 7}[bits] * 0.51 + 0.01 * is_bf16
            assert ((a - b).abs() <= bound + a.abs() * 0.01 * is_bf16).all()
        at += numel
    tolerances = {"rtol": 0.02, "atol": 0.05 if is_bf16 else 1e-5}
    torch.testing.assert_close(sums.double(), back.double().sum(0), **tolerances)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_of_half_precision_are_summed_wide(dtype):
    """2 / eps + 1 + 1 is 2 / eps where every addition rounds."""
    made, large = packing([(BLOCK, True), (3, False)], 8), 2 / torch.finfo(dtype).eps
    rows = torch.zeros(3, BLOCK + 3, dtype=dtype)
    rows[:, BLOCK:] = torch.tensor([large, 1.0, 1.0], dtype=dtype).unsqueeze(1)
    assert made.unpack_sum(made.pack(rows), dtype)[BLOCK:].tolist() == [large + 2] * 3


@pytest.mark.parametrize("bits", [4, 8])
def test_error_feedback_makes_the_mean_over_time_right(bits):
    """Without it, numbers below half a scale never arrive."""
    made = packing([(BLOCK, True)], bits)
    x = torch.full((1, BLOCK), 0.02)
    x[0, 0] = 1.0
    plain, fed, error = torch.zeros(1, BLOCK), torch.zeros(1, BLOCK), torch.zeros(1, BLOCK)
    for _ in range(200):
        plain += made.unpack(made.pack(x), torch.float32)
        fed += made.unpack(made.pack(x, error), torch.float32)
    scale = 1 / {8: 127, 4: 7}[bits]
    assert ((fed / 200 - x).abs() <= scale / 200 + 1e-6).all()
    if bits == 4:
        assert (plain[0, 1:] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_whose_scale_has_no_finite_inverse(bits):
    """They are sent as zeros, and stay in the error."""
    made = packing([(BLOCK, True)], bits)
    x, error = torch.zeros(1, BLOCK), torch.zeros(1, BLOCK)
    x[0, 3] = 1e-39
    assert torch.equal(made.unpack(made.pack(x, error), torch.float32), torch.zeros(1, BLOCK))
    assert torch.equal(error, x)


def test_an_overflow_does_not_stay_in_the_error():
    made = packing([(2 * BLOCK, True)], 8)
    error = torch.zeros(1, 2 * BLOCK)
    x = rows_of(2 * BLOCK, rows=1)
    x[0, 0] = float("inf")
    made.pack(x, error)
    assert error.isfinite().all()
    assert error[0, BLOCK:].abs().sum() > 0


def test_a_run_of_other_length():
    """A rank may have larger shards of the same parameters. Segments that do not describe a run are refused."""
    segments = [Segment(6, True), Segment(2, False)]
    longer = Packing.for_rows(segments, 8, numel=24).segments
    assert longer == (Segment(18, True), Segment(6, False))
    words = r"13 elements .* have 8 on this rank.*parallel.unused_parameters = true"
    with pytest.raises(ModelError, match=words):
        Packing.for_rows(segments, 8, numel=13)


class Quantising(nn.Module):
    """Module that quantises in its forward, as a unit's weights are gathered while the module around it runs."""

    def forward(self, x):
        return quantise(x, 8)


def test_verification_in_float64_reads_the_same():
    """Verification leaves out casts to narrower dtypes in a model's forward. A float64 scale would be read as two numbers."""
    x = torch.randn(2, BLOCK, dtype=torch.float64)
    module = Quantising()
    expected = module(x)
    with keeping_float64(module):
        codes, scales = module(x)
    assert scales.dtype == torch.float32
    assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])
