"""Attention of each kind launches about as many kernels as a ring that is written by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from benchmarks.context_kernels.counts import kernels_by_hand, kernels_of_layer
from plait.parallel.context.kinds import Kind


@pytest.mark.parametrize("kind", get_args(Kind))
def test_at_most_a_fifth_more_than_by_hand(kind: Kind) -> None:
    """Forward and backward of a layer, 8,192 to 1,048,576 tokens, 2 to 32 ranks; the first rank, the last, and one between."""
    found = {}
    for tokens in (8192, 32768, 1048576):
        for ranks in (2, 8, 32):
            for rank in {0, ranks // 2, ranks - 1}:
                counted, by_hand = kernels_of_layer(kind, tokens, ranks, rank), kernels_by_hand(tokens, ranks, rank)
                found[tokens, ranks, rank] = counted.total() / by_hand.total()
    assert max(found.values()) <= 1.2, found


def test_one_flash_call_per_step() -> None:
    """Zigzag chunks of a step are computed in one call, and gathered keys in one call for each chunk of queries."""
    for kind, calls in (("ring", 8), ("all-gather-kv", 2), ("ulysses", 1)):
        counted = kernels_of_layer(kind, 32768, 8, 3)  # type: ignore[arg-type]
        assert counted["_flash_attention_forward"] == counted["_flash_attention_backward"] == calls, kind


def test_windows_are_computed_by_flash() -> None:
    """A chunk sees those chunks that its window reaches, each by one call, and no mask is made."""
    counted = kernels_of_layer("ring", 32768, 8, 3, window=4096)
    assert counted["_flash_attention_forward"] == counted["_flash_attention_backward"] == 6
    assert not {"masked_fill", "arange", "bmm"} & set(counted)
