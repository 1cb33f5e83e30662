"""Attention in parts equals attention at once, and so do its gradients: windows, caps, documents, fused and not, in tiles, in any order."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch
from torch.nn.attention import flex_attention

from plait.parallel.context import kernel
from plait.parallel.context.kernel import Gradients, Kernel, Piece, Rule, attend, attend_backward, finished, merged, sink_gradient
from plait.parallel.context.layout import SequenceLayout

LENGTH = 16


def at_once(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, starts: torch.Tensor | None) -> torch.Tensor:
    """With a mask [seq, seq]."""
    groups, at = query.shape[1] // key.shape[1], torch.arange(LENGTH)
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    seen = (at <= at[:, None])[None]
    if starts is not None:
        seen = seen & (at >= starts[..., None])
    if rule.window:
        seen = seen & (at > at[:, None] - rule.window)
    return torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1) @ value.repeat_interleave(groups, 1)


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_a_sink_counts_once(size: float) -> None:
    """A softmax over all keys and one more, whose value is 0, from halves of the keys; its gradient is a sum over halves of the queries."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, LENGTH, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = (torch.randn(4, dtype=torch.float64) * size).requires_grad_()
    rule, at = Rule(0.3), torch.arange(LENGTH)
    scores = (query @ key.transpose(-1, -2) * 0.3).masked_fill(at > at[:, None], -torch.inf)
    weights = torch.softmax(torch.cat([scores, sinks[:, None, None].expand(2, 4, LENGTH, 1)], -1), -1)
    expected = weights[..., :-1] @ value
    grad = torch.randn_like(expected)
    *gradients, of_sinks = torch.autograd.grad(expected, (query, key, value, sinks), grad)
    into, total = Gradients(*(torch.zeros_like(x) for x in (query, key, value))), torch.zeros_like(sinks)
    with torch.no_grad():
        for rows in (slice(0, 8), slice(8, 16)):
            halves = [Piece(query[:, :, rows], key[:, :, a:b], value[:, :, a:b], rows.start, a, None) for a, b in ((8, 16), (0, 8))]
            found = finished(merged(attend(halves[0], rule), attend(halves[1], rule)), query, sinks)
            torch.testing.assert_close(found[0], expected[:, :, rows], rtol=1e-11, atol=1e-12)
            own, whole = grad[:, :, rows].contiguous(), Piece(query[:, :, rows], key, value, rows.start, 0, None)
            attend_backward(whole, rule, own, found, into.rows(rows.start, rows.stop))
            gradient = sink_gradient(sinks, own, found)
            assert gradient is not None
            total += gradient
    for mine, right in zip((into.query, into.key, into.value, total), (*gradients, of_sinks), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("large", [False, True], ids=["", "large scores"])
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("window", [None, 3, 7])
def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch, window: int | None, documents: bool, large: bool) -> None:
    """Large scores overflow a softmax that is put together without its maximum."""
    torch.manual_seed(0)
    shapes = ((2, 4, LENGTH, 5), (2, 2, LENGTH, 5), (2, 2, LENGTH, 5))
    query, key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    at = torch.arange(LENGTH)
    starts = torch.stack([torch.where(at >= 5, 5, 0), torch.where(at >= 11, 11, 0)]) if documents else None
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # which refuses a backward on CPUs; the rest has one
    several = [(one, 2**22) for one in get_args(Kernel)] + [(one, 40) for one in get_args(Kernel) if one != "flex"]
    for softcap, (name, tile), zigzag in product((None, 2.0), several, (True, False)):
        if name == "flex" and zigzag != (softcap is None):  # slow without being compiled
            continue
        monkeypatch.setattr(kernel, "TILE_ELEMENTS", tile)
        rule = Rule(1000.0 if large else 0.3, window, softcap, name)
        expected = at_once(query, key, value, rule, starts)
        grad = torch.randn_like(expected)
        gradients = torch.autograd.grad(expected, (query, key, value), grad)
        into = Gradients(*(torch.zeros_like(x) for x in (query, key, value)))
        with torch.no_grad():
            for rank in (0, 1):
                for chunk in SequenceLayout(2, rank, zigzag).chunks(LENGTH // 2):
                    rows = slice(chunk.at, chunk.at + chunk.size)
                    own = None if starts is None else starts[:, rows]
                    halves = [Piece(query[:, :, rows], key[:, :, a:b], value[:, :, a:b], chunk.at, a, own) for a, b in ((8, 16), (0, 8))]
                    ring = finished(merged(attend(halves[0], rule), attend(halves[1], rule)), query)
                    whole = Piece(query[:, :, rows], key, value, chunk.at, 0, own)
                    found = finished(attend(whole, rule), query)
                    for output, _ in (ring, found):
                        torch.testing.assert_close(output, expected[:, :, rows], rtol=1e-11, atol=1e-12)
                    attend_backward(whole, rule, grad[:, :, rows].contiguous(), found, into.rows(rows.start, rows.stop))
        for mine, right in zip((into.query, into.key, into.value), gradients, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
