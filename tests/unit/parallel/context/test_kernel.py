"""Attention in parts equals attention at once, and so do its gradients, with each kernel, in any order of the parts."""

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.attention import flex_attention

from plait.parallel.context import kernel
from plait.parallel.context.kernel import (
    AttentionBlock,
    AttentionRule,
    BackwardInputs,
    GradientSum,
    GradientSums,
    PartialSoftmax,
    attend,
    attend_backward,
    sink_gradient,
)
from plait.parallel.context.kinds import SequenceLayout
from tests.fused_attention import registered

LENGTH = 16


@pytest.fixture
def cuda_kernels():
    """CUDA's fused kernels, by references with the same interface, on the CPU."""
    with registered("CPU"):
        yield


def at_once(query, key, value, rule, starts=None, sinks=None):
    at = torch.arange(query.shape[2])
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ keys.transpose(-1, -2) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    seen = (at <= at[:, None])[None]
    if starts is not None:
        seen = seen & (at >= starts[..., None])
    if rule.window:
        seen = seen & (at > at[:, None] - rule.window)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        more = sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1] @ values
    return torch.softmax(scores, -1) @ values


def softmax_of(pieces, rule, sinks=None):
    """Output and log-sum-exp of queries over the keys of all pieces."""
    found = PartialSoftmax(pieces[0].query, pieces[0].value.shape[3])
    for piece in pieces:
        attend(piece, rule, found)
    return found.finished(sinks)


def check(tensors, rule, starts=None, sinks=None, *, zigzag=True, tolerance=1e-11):
    """Each chunk of queries, with halves of the keys and with all of them, equals attention at once. So do all gradients."""
    query, key, value = (x.detach().requires_grad_() for x in tensors)
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    expected = at_once(query, key, value, rule, starts, sinks)
    grad = torch.randn_like(expected)
    leaves = [query, key, value, *([] if sinks is None else [sinks])]
    gradients = torch.autograd.grad(expected, leaves, grad)
    length = query.shape[2]
    half = length // 2
    keys, values, queries = GradientSum(key), GradientSum(value), GradientSum(query)
    total = None if sinks is None else torch.zeros_like(sinks)

    def block(chunk, low, high):
        rows = slice(chunk.start, chunk.start + chunk.size)
        ends = None if starts is None else starts[:, rows]
        parts = (query[:, :, rows], key[:, :, low:high], value[:, :, low:high])
        return AttentionBlock(*parts, chunk.start, low, ends, column=low)

    layouts = [SequenceLayout(2, rank, zigzag) for rank in (0, 1)]
    with torch.no_grad():
        for chunk in (chunk for layout in layouts for chunk in layout.chunks(half)):
            rows = slice(chunk.start, chunk.start + chunk.size)
            halves = [block(chunk, half, length), block(chunk, 0, half)]
            full = block(chunk, 0, length)
            for pieces in (halves, halves[::-1], [full]):
                output, log_sum_exp = softmax_of(pieces, rule, sinks)
                right = expected[:, :, rows]
                torch.testing.assert_close(output, right, rtol=tolerance, atol=tolerance)
            outputs = BackwardInputs(grad[:, :, rows], output, log_sum_exp)
            into = GradientSums(GradientSum(query[:, :, rows]), keys, values)
            for piece in halves if chunk.start else [full]:
                attend_backward(piece, rule, outputs, into)
            queries.add(rows.start, into.query.total)
            if total is not None:
                total += sink_gradient(sinks, grad[:, :, rows], output, [log_sum_exp])
    sums = [queries.total, keys.total, values.total, *([] if total is None else [total])]
    sums = [actual.to(right.dtype) for actual, right in zip(sums, gradients, strict=True)]
    torch.testing.assert_close(sums, [*gradients], rtol=1e2 * tolerance, atol=1e2 * tolerance)


def random(*, kv_heads=2, width=5, value_width=5, length=LENGTH):
    """Queries of 4 heads, keys and values in float64."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, width, dtype=torch.float64)
    key = torch.randn(2, kv_heads, length, width, dtype=torch.float64)
    return query, key, torch.randn(2, kv_heads, length, value_width, dtype=torch.float64)


def documents():
    at = torch.arange(LENGTH)
    return torch.stack([torch.where(at >= 5, 5, 0), torch.where(at >= 11, 11, 0)])


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("size", [1.0, 1000.0])
@pytest.mark.parametrize("name", ["products", "cpu", "flash", "efficient"])
def test_a_sink_counts_once(name, size):
    """The softmax is over all keys and one more, whose value is 0. It is computed from halves of the keys."""
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * size
    check(random(), AttentionRule(0.3, kernel=name), sinks=sinks)


@pytest.mark.parametrize("scale", [0.3, 1000.0], ids=["", "large scores"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("window", [None, 3, 7])
def test_parts_are_the_whole(monkeypatch, window, packed, scale):
    """Large scores overflow a softmax that is combined without its maximum."""
    # torch refuses a backward on CPUs, although FlexAttention has one.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    names, starts = ("products", "sdpa", "flex"), documents() if packed else None
    for softcap, name, tile, zigzag in product((None, 2.0), names, (2**22, 40), (True, False)):
        # FlexAttention is slow without being compiled, so some cases are left out.
        if name == "flex" and (tile == 40 or zigzag != (softcap is None)):
            continue
        monkeypatch.setattr(kernel, "TILE_ELEMENTS", tile)
        check(random(), AttentionRule(scale, window, softcap, name), starts, zigzag=zigzag)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("window", [None, 1, 3, 7, 12])
@pytest.mark.parametrize(
    ("kv_heads", "width", "value_width"),
    [(4, 8, 8), (2, 5, 5), (1, 12, 7), (2, 24, 16), (4, 3, 9)],
    ids=["", "grouped", "one key head", "latent", "wide values"],
)
def test_kernels_of_cuda(kv_heads, width, value_width, window):
    """Cases are grouped heads, widths that no kernel has, values of another width than queries, windows, and uneven lengths."""
    names = ("flash",) if window else ("flash", "efficient")
    for name, length, zigzag in product(names, (16, 36), (True, False)):
        tensors = random(kv_heads=kv_heads, width=width, value_width=value_width, length=length)
        check(tensors, AttentionRule(0.3, window, kernel=name), zigzag=zigzag)


def test_block_masks_of_documents_are_shared_by_layers():
    """FlexAttention's mask is created once per micro-batch, and dropped with it."""
    starts, rule = documents(), AttentionRule(0.3, kernel="flex")
    query, key, value = random()
    before = len(kernel._document_masks)
    with torch.no_grad():
        for _layer in range(3):
            softmax_of([AttentionBlock(query[:, :, 8:], key, value, 8, 0, starts[:, 8:])], rule)
    assert len(kernel._document_masks) == before + 1 and len(kernel._document_masks[starts]) == 1
    del starts
    gc.collect()
    assert len(kernel._document_masks) == before


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_sums_of_16_bits_are_in_float32(name):
    """Parts in bf16 are as near to float64 as bf16 is, outputs stay in bf16, and sums over parts are in float32."""
    tensors = random(width=8, value_width=8)
    rule, rows = AttentionRule(0.3, kernel=name), slice(8, 16)
    query, key, value = (x.bfloat16() for x in tensors)
    exact = [x.bfloat16().double().requires_grad_() for x in tensors]
    expected = at_once(*exact, rule)[:, :, rows]
    gradients = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    into = GradientSums(GradientSum(query), GradientSum(key), GradientSum(value))
    pieces = []
    for low, high in ((8, 16), (0, 8)):
        parts = (query[:, :, rows], key[:, :, low:high], value[:, :, low:high])
        pieces.append(AttentionBlock(*parts, 8, low, row=8, column=low))
    with torch.no_grad():
        softmax = PartialSoftmax(query[:, :, rows], 8)
        for piece in pieces:
            attend(replace(piece, row=0), rule, softmax)
        output, log_sum_exp = softmax.finished()
        inputs = []
        for part in (torch.ones_like(output), output, log_sum_exp):
            inputs.append(part.new_zeros(2, 4, LENGTH, *part.shape[3:]))
            inputs[-1][:, :, rows] = part
        for piece in pieces:
            attend_backward(piece, rule, BackwardInputs(*inputs), into)
    assert output.dtype == torch.bfloat16 and log_sum_exp.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    for total, right in zip((into.query, into.key, into.value), gradients, strict=True):
        assert total.total.dtype == torch.float32
        torch.testing.assert_close(total.total.double(), right, rtol=3e-2, atol=3e-2)
