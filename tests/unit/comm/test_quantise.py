"""Quantised messages: their errors, bytes, sums, and numbers that are not finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plait.comm.quantise import BLOCK, Packing, Segment, dequantise, packed_bytes, quantise
from plait.errors import ModelError
from plait.verify.keep_float64 import keeping_float64

LARGEST_CODE = {8: 127, 4: 7}
segment_lists = st.lists(
    st.builds(Segment, st.integers(0, 700), st.booleans()), min_size=1, max_size=5
)


def random_rows(numel, *, rows=3, dtype=torch.float32):
    return torch.randn(rows, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_at_most_half_a_scale(bits):
    x = random_rows(5 * BLOCK) * torch.logspace(-6, 6, 5 * BLOCK)
    codes, scales = quantise(x, bits)
    assert codes.shape == (3, 5 * BLOCK * bits // 8)
    error = (dequantise(codes, scales, bits) - x).view(3, 5, BLOCK).abs().amax(-1)
    assert (error <= 0.5001 * scales).all()
    # A smaller error would mean that nothing was quantised.
    assert (error > 0.2 * scales).all()


def test_the_default_dtype_does_not_matter():
    """`torch.empty` without a dtype would make sums twice as large."""
    codes, scales = quantise(random_rows(BLOCK), 8)
    torch.set_default_dtype(torch.float64)
    try:
        assert dequantise(codes, scales, 8).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_extremes_and_zeros_are_exact(bits):
    x = torch.zeros(1, 3 * BLOCK)
    x[0, 5] = -3.5
    x[0, BLOCK + 7] = 1e-30
    decoded = dequantise(*quantise(x, bits), bits)
    assert not decoded[0, BLOCK * 2 :].any()
    torch.testing.assert_close(decoded, x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite_stay_so(bits, bad):
    x = random_rows(2 * BLOCK, rows=1)
    x[0, 3] = bad
    decoded = dequantise(*quantise(x, bits), bits)
    assert not decoded[0, :BLOCK].isfinite().all()
    assert decoded[0, BLOCK:].isfinite().all()


@settings(max_examples=60)
@given(
    segment_lists,
    st.sampled_from([4, 8]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_packing(segments, bits, dtype):
    """Vectors are exact, and errors of matrices are at most half a scale."""
    packing = Packing(tuple(segments), bits)
    numels = [segment.numel for segment in segments]
    rows = random_rows(sum(numels), dtype=dtype)
    packed = packing.pack(rows)
    row_bytes = 0
    for segment in segments:
        exact_bytes = segment.numel * dtype.itemsize
        row_bytes += packed_bytes(segment.numel, bits) if segment.matrix else exact_bytes
    assert packing.row_bytes(dtype) == row_bytes
    assert packed.shape == (3, row_bytes)

    unpacked = packing.unpack(packed, dtype)
    assert unpacked.shape == rows.shape
    assert unpacked.dtype == dtype
    # bfloat16 rounds the decoded numbers, too.
    rounding = 0.01 if dtype == torch.bfloat16 else 0
    parts = zip(segments, rows.split(numels, 1), unpacked.split(numels, 1), strict=True)
    for segment, expected, actual in parts:
        if not segment.matrix:
            assert torch.equal(actual, expected)
        elif segment.numel:
            bound = expected.float().abs().max() / LARGEST_CODE[bits] * 0.51 + rounding
            assert ((expected - actual).abs() <= bound + expected.abs() * rounding).all()

    sums = packing.unpack_sum(packed, dtype).double()
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(sums, unpacked.double().sum(0), rtol=0.02, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_of_half_precision_are_summed_in_float32(dtype):
    """2 / eps + 1 + 1 would be 2 / eps if every addition rounded."""
    packing = Packing((Segment(BLOCK, True), Segment(3, False)), 8)
    large = 2 / torch.finfo(dtype).eps
    rows = torch.zeros(3, BLOCK + 3, dtype=dtype)
    rows[:, BLOCK:] = torch.tensor([large, 1.0, 1.0], dtype=dtype).unsqueeze(1)
    assert packing.unpack_sum(packing.pack(rows), dtype)[BLOCK:].tolist() == [large + 2] * 3


@pytest.mark.parametrize("bits", [4, 8])
def test_error_feedback_corrects_the_mean_over_time(bits):
    """Numbers below half a scale never arrive without error feedback."""
    packing = Packing((Segment(BLOCK, True),), bits)
    x = torch.full((1, BLOCK), 0.02)
    x[0, 0] = 1.0
    error = torch.zeros(1, BLOCK)
    total = torch.zeros(1, BLOCK)
    for _ in range(200):
        total += packing.unpack(packing.pack(x, error), torch.float32)
    scale = 1 / LARGEST_CODE[bits]
    assert ((total / 200 - x).abs() <= scale / 200 + 1e-6).all()
    if bits == 4:
        assert not packing.unpack(packing.pack(x), torch.float32)[0, 1:].any()


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_whose_scale_has_no_finite_inverse(bits):
    """They are sent as zeros, and stay in the error."""
    packing = Packing((Segment(BLOCK, True),), bits)
    error = torch.zeros(1, BLOCK)
    x = torch.zeros(1, BLOCK)
    x[0, 3] = 1e-39
    assert not packing.unpack(packing.pack(x, error), torch.float32).any()
    assert torch.equal(error, x)


def test_an_overflow_does_not_stay_in_the_error():
    packing = Packing((Segment(2 * BLOCK, True),), 8)
    error = torch.zeros(1, 2 * BLOCK)
    x = random_rows(2 * BLOCK, rows=1)
    x[0, 0] = float("inf")
    packing.pack(x, error)
    assert error.isfinite().all()
    assert error[0, BLOCK:].abs().sum() > 0


def test_segments_of_larger_shards():
    """Another rank may have a multiple of the elements of this rank, but no other number."""
    segments = [Segment(6, True), Segment(2, False)]
    longer = Packing.for_rows(segments, 8, numel=24).segments
    assert longer == (Segment(18, True), Segment(6, False))
    message = r"13 elements .* have 8 on this rank.*parallel.unused_parameters = true"
    with pytest.raises(ModelError, match=message):
        Packing.for_rows(segments, 8, numel=13)


class QuantisingModule(nn.Module):
    """Module that quantises in its forward, as the compressed gather of a unit inside it does."""

    def forward(self, x):
        return quantise(x, 8)


def test_verification_in_float64_keeps_scales_in_float32():
    """Verification omits casts in a model's forward, but a scale has four bytes in a message."""
    x = torch.randn(2, BLOCK, dtype=torch.float64)
    module = QuantisingModule()
    expected = module(x)
    with keeping_float64(module):
        actual = module(x)
    # This compares dtypes, too.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
