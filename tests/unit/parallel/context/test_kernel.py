"""Attention in blocks of keys, and its gradients, equal one softmax over all keys."""

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
    """References with the interface of CUDA's fused kernels stand in for them on the CPU."""
    with registered("CPU"):
        yield


def reference(query, key, value, rule, starts=None, sinks=None):
    """Attention by one softmax over all keys."""
    position = torch.arange(query.shape[2])
    groups = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(groups, 1)
    values = value.repeat_interleave(groups, 1)
    scores = query @ keys.transpose(-1, -2) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap

    visible = (position <= position[:, None])[None]
    if starts is not None:
        visible = visible & (position >= starts[..., None])
    if rule.window:
        visible = visible & (position > position[:, None] - rule.window)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is None:
        return torch.softmax(scores, -1) @ values
    sink_scores = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink_scores], -1), -1)[..., :-1] @ values


def softmax_of(blocks, rule, sinks=None):
    """Output and log-sum-exp of queries over the keys of all blocks."""
    softmax = PartialSoftmax(blocks[0].query, blocks[0].value.shape[3])
    for block in blocks:
        attend(block, rule, softmax)
    return softmax.finished(sinks)


def check(tensors, rule, starts=None, sinks=None, *, zigzag=True, tolerance=1e-11):
    """Compare outputs and gradients of attention in blocks with one softmax over all keys.

    Each chunk of queries attends to both halves of the keys, in both orders, and to all at once.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    query, key, value = leaves
    if sinks is not None:
        sinks = sinks.detach().requires_grad_()
        leaves.append(sinks)
    expected = reference(query, key, value, rule, starts, sinks)
    grad = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, leaves, grad)

    length = query.shape[2]
    half = length // 2
    gradients = GradientSums(GradientSum(query), GradientSum(key), GradientSum(value))
    of_sinks = torch.zeros_like(query[0, :, 0, 0])

    def block(chunk, low, high):
        rows = slice(chunk.start, chunk.start + chunk.size)
        row_starts = None if starts is None else starts[:, rows]
        parts = (query[:, :, rows], key[:, :, low:high], value[:, :, low:high])
        return AttentionBlock(*parts, chunk.start, low, row_starts, column=low)

    chunks = [chunk for rank in (0, 1) for chunk in SequenceLayout(2, rank, zigzag).chunks(half)]
    with torch.no_grad():
        for chunk in chunks:
            rows = slice(chunk.start, chunk.start + chunk.size)
            halves = [block(chunk, half, length), block(chunk, 0, half)]
            full = [block(chunk, 0, length)]
            for blocks in (halves, halves[::-1], full):
                output, log_sum_exp = softmax_of(blocks, rule, sinks)
                torch.testing.assert_close(
                    output, expected[:, :, rows], rtol=tolerance, atol=tolerance
                )

            outputs = BackwardInputs(grad[:, :, rows], output, log_sum_exp)
            into = replace(gradients, query=GradientSum(query[:, :, rows]))
            for each in halves if chunk.start else full:
                attend_backward(each, rule, outputs, into)
            gradients.query.add(rows.start, into.query.total)
            if sinks is not None:
                of_sinks += sink_gradient(sinks, grad[:, :, rows], output, [log_sum_exp])

    sums = [gradients.query.total, gradients.key.total, gradients.value.total]
    if sinks is not None:
        sums.append(of_sinks)
    for actual, gradient in zip(sums, expected_gradients, strict=True):
        # A gradient is a sum over all queries, so its error is larger than an output's.
        torch.testing.assert_close(
            actual.to(gradient.dtype), gradient, rtol=1e2 * tolerance, atol=1e2 * tolerance
        )


def random_inputs(*, kv_heads=2, width=5, value_width=5, length=LENGTH):
    """Queries of 4 heads, keys and values in float64."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, width, dtype=torch.float64)
    key = torch.randn(2, kv_heads, length, width, dtype=torch.float64)
    return query, key, torch.randn(2, kv_heads, length, value_width, dtype=torch.float64)


def document_starts():
    """Start of the document of each position, for two rows that each hold two documents."""
    position = torch.arange(LENGTH)
    return torch.stack([torch.where(position >= start, start, 0) for start in (5, 11)])


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("size", [1.0, 1000.0])
@pytest.mark.parametrize("name", ["products", "cpu", "flash", "efficient"])
def test_a_sink_counts_once(name, size):
    """A sink is one more key with the value 0, however many blocks of keys there are."""
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * size
    check(random_inputs(), AttentionRule(0.3, kernel=name), sinks=sinks)


@pytest.mark.parametrize("scale", [0.3, 1000.0], ids=["", "large scores"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("window", [None, 3, 7])
def test_blocks_equal_one_softmax(monkeypatch, window, packed, scale):
    """Large scores overflow a softmax that is combined without its maximum."""
    # torch refuses a backward on CPUs, although FlexAttention has one.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    names = ("products", "sdpa", "flex")
    starts = document_starts() if packed else None
    for softcap, name, tile, zigzag in product((None, 2.0), names, (2**22, 40), (True, False)):
        # FlexAttention is slow without being compiled, so some cases are left out.
        if name == "flex" and (tile == 40 or zigzag != (softcap is None)):
            continue
        # Tiles of 40 elements split the scores of these small inputs, too.
        monkeypatch.setattr(kernel, "TILE_ELEMENTS", tile)
        check(random_inputs(), AttentionRule(scale, window, softcap, name), starts, zigzag=zigzag)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("window", [None, 1, 3, 7, 12])
@pytest.mark.parametrize(
    ("kv_heads", "width", "value_width"),
    [(4, 8, 8), (2, 5, 5), (1, 12, 7), (2, 24, 16), (4, 3, 9)],
    ids=["", "grouped", "one key head", "latent", "wide values"],
)
def test_kernels_of_cuda(kv_heads, width, value_width, window):
    """Some widths are no multiple of 8, which the kernels require, and some lengths are uneven."""
    names = ("flash",) if window else ("flash", "efficient")
    sizes = {"kv_heads": kv_heads, "width": width, "value_width": value_width}
    for name, length, zigzag in product(names, (16, 36), (True, False)):
        tensors = random_inputs(**sizes, length=length)
        check(tensors, AttentionRule(0.3, window, kernel=name), zigzag=zigzag)


def test_block_masks_of_documents_are_shared_by_layers():
    """FlexAttention's mask is created once per micro-batch, and dropped with it."""
    starts = document_starts()
    rule = AttentionRule(0.3, kernel="flex")
    query, key, value = random_inputs()
    # Only the cache itself tells how many masks exist.
    masks = kernel._document_masks
    before = len(masks)
    with torch.no_grad():
        for _layer in range(3):
            softmax_of([AttentionBlock(query[:, :, 8:], key, value, 8, 0, starts[:, 8:])], rule)
    assert len(masks) == before + 1
    assert len(masks[starts]) == 1
    del starts
    gc.collect()
    assert len(masks) == before


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_sums_of_16_bits_are_in_float32(name):
    """Outputs stay in bf16. Gradients of blocks are added up in float32."""
    tensors = random_inputs(width=8, value_width=8)
    rule = AttentionRule(0.3, kernel=name)
    rows = slice(8, 16)
    query, key, value = (x.bfloat16() for x in tensors)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = reference(*exact, rule)[:, :, rows]
    expected_gradients = torch.autograd.grad(expected, exact, torch.ones_like(expected))

    sums = (GradientSum(query), GradientSum(key), GradientSum(value))
    blocks = []
    for low, high in ((8, 16), (0, 8)):
        parts = (query[:, :, rows], key[:, :, low:high], value[:, :, low:high])
        blocks.append(AttentionBlock(*parts, 8, low, row=8, column=low))
    with torch.no_grad():
        softmax = PartialSoftmax(query[:, :, rows], 8)
        for block in blocks:
            attend(replace(block, row=0), rule, softmax)
        output, log_sum_exp = softmax.finished()
        inputs = []
        for part in (torch.ones_like(output), output, log_sum_exp):
            padded = part.new_zeros(2, 4, LENGTH, *part.shape[3:])
            padded[:, :, rows] = part
            inputs.append(padded)
        for block in blocks:
            attend_backward(block, rule, BackwardInputs(*inputs), GradientSums(*sums))

    assert output.dtype == torch.bfloat16
    assert log_sum_exp.dtype == torch.float32
    # bf16 has 8 bits, and probabilities are rounded to it once more in the backward.
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)
    for actual, gradient in zip(sums, expected_gradients, strict=True):
        assert actual.total.dtype == torch.float32
        torch.testing.assert_close(actual.total.double(), gradient, rtol=3e-2, atol=3e-2)
