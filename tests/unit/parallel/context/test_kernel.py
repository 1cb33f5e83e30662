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
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def cuda_kernels():
    """CUDA's fused kernels, by references with the same interface, on the CPU."""
    with registered("CPU"):
        yield


def at_once(query, key, value, rule, starts=None, sinks=None):
    groups, at = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * rule.scale
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
        return torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1] @ value.repeat_interleave(
            groups, 1
        )
    return torch.softmax(scores, -1) @ value.repeat_interleave(groups, 1)


def softmax_of(pieces, rule, sinks=None):
    """Output and log-sum-exp of queries over the keys of all pieces."""
    found = PartialSoftmax(pieces[0].query, pieces[0].value.shape[3])
    for piece in pieces:
        attend(piece, rule, found)
    return found.finished(sinks)


def check(tensors, rule, starts=None, sinks=None, *, zigzag=True, tolerance=1e-11):
    """Each chunk of queries, with halves of the keys and with all of them, equals attention at once; and so do all gradients."""
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
    with torch.no_grad():
        for chunk in (
            chunk for rank in (0, 1) for chunk in SequenceLayout(2, rank, zigzag).chunks(half)
        ):
            rows = slice(chunk.start, chunk.start + chunk.size)
            own = None if starts is None else starts[:, rows]
            halves = [
                AttentionBlock(
                    query[:, :, rows],
                    key[:, :, a:b],
                    value[:, :, a:b],
                    chunk.start,
                    a,
                    own,
                    column=a,
                )
                for a, b in ((half, length), (0, half))
            ]
            whole = AttentionBlock(query[:, :, rows], key, value, chunk.start, 0, own)
            for pieces in (halves, halves[::-1], [whole]):
                output, log_sum_exp = softmax_of(pieces, rule, sinks)
                torch.testing.assert_close(
                    output, expected[:, :, rows], rtol=tolerance, atol=tolerance
                )
            outputs = BackwardInputs(grad[:, :, rows], output, log_sum_exp)
            into = GradientSums(GradientSum(query[:, :, rows]), keys, values)
            for piece in halves if chunk.start else [whole]:
                attend_backward(piece, rule, outputs, into)
            queries.add(rows.start, into.query.total)
            if total is not None:
                more = sink_gradient(sinks, grad[:, :, rows], output, [log_sum_exp])
                assert more is not None
                total += more
    found = [queries.total, keys.total, values.total, *([] if total is None else [total])]
    for mine, right in zip(found, gradients, strict=True):
        torch.testing.assert_close(
            mine.to(right.dtype), right, rtol=1e2 * tolerance, atol=1e2 * tolerance
        )


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
    """A softmax over all keys and one more, whose value is 0, from halves of the keys."""
    tensors = random()
    check(
        tensors, AttentionRule(0.3, kernel=name), sinks=torch.randn(4, dtype=torch.float64) * size
    )


@pytest.mark.parametrize("scale", [0.3, 1000.0], ids=["", "large scores"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("window", [None, 3, 7])
def test_parts_are_the_whole(monkeypatch, window, packed, scale):
    """Large scores overflow a softmax that is combined without its maximum."""
    monkeypatch.setattr(
        flex_attention, "_validate_device", lambda *_: None
    )  # which refuses a backward on CPUs; the rest has one
    names = ("products", "sdpa", "flex")
    for softcap, name, tile, zigzag in product((None, 2.0), names, (2**22, 40), (True, False)):
        if name == "flex" and (
            tile == 40 or zigzag != (softcap is None)
        ):  # slow without being compiled
            continue
        monkeypatch.setattr(kernel, "TILE_ELEMENTS", tile)
        check(
            random(),
            AttentionRule(scale, window, softcap, name),
            documents() if packed else None,
            zigzag=zigzag,
        )


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("window", [None, 1, 3, 7, 12])
@pytest.mark.parametrize(
    ("kv_heads", "width", "value_width"),
    [(4, 8, 8), (2, 5, 5), (1, 12, 7), (2, 24, 16), (4, 3, 9)],
    ids=["", "grouped", "one key head", "latent", "wide values"],
)
def test_kernels_of_cuda(kv_heads, width, value_width, window):
    """Grouped heads, widths that no kernel has, values of another width than queries, windows, lengths that nothing divides."""
    names = ("flash",) if window else ("flash", "efficient")
    for name, length, zigzag in product(names, (16, 36), (True, False)):
        check(
            random(kv_heads=kv_heads, width=width, value_width=value_width, length=length),
            AttentionRule(0.3, window, kernel=name),
            zigzag=zigzag,
        )


def test_block_masks_of_documents_are_shared_by_layers():
    """FlexAttention's mask is made once for a micro-batch, and dropped with it."""
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
    tensors, rule, rows = (
        random(width=8, value_width=8),
        AttentionRule(0.3, kernel=name),
        slice(8, 16),
    )
    query, key, value = (x.bfloat16() for x in tensors)
    exact = [x.bfloat16().double().requires_grad_() for x in tensors]
    expected = at_once(*exact, rule)[:, :, rows]
    gradients = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    into = GradientSums(GradientSum(query), GradientSum(key), GradientSum(value))
    pieces = [
        AttentionBlock(
            query[:, :, rows], key[:, :, low:high], value[:, :, low:high], 8, low, row=8, column=low
        )
        for low, high in ((8, 16), (0, 8))
    ]
    with torch.no_grad():
        found = PartialSoftmax(query[:, :, rows], 8)
        for piece in pieces:
            attend(replace(piece, row=0), rule, found)
        output, log_sum_exp = found.finished()
        whole = [
            torch.zeros_like(query),
            torch.zeros_like(query),
            log_sum_exp.new_zeros(query.shape[:3]),
        ]
        for target, source in zip(
            whole, (torch.ones_like(output), output, log_sum_exp), strict=True
        ):
            target[:, :, rows] = source
        for piece in pieces:
            attend_backward(piece, rule, BackwardInputs(*whole), into)
    assert output.dtype == torch.bfloat16 and log_sum_exp.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    for total, right in zip(
        (into.query.total, into.key.total, into.value.total), gradients, strict=True
    ):
        assert total.dtype == torch.float32
        torch.testing.assert_close(total.double(), right, rtol=3e-2, atol=3e-2)
