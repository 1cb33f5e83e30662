"""Attention of each kind launches about as many kernels as a ring that is written by hand."""

from typing import get_args

from benchmarks.context_kernels import kernels_by_hand, kernels_of_layer
from plait.parallel.context.kinds import Kind


def test_at_most_a_fifth_more_kernels_than_by_hand():
    """Kernels of forward and backward of a layer are counted on the first or the last rank."""
    ratios = {}
    for tokens, ranks, rank in ((8192, 2, 0), (32768, 8, 7), (1048576, 32, 31)):
        by_hand = kernels_by_hand(tokens, ranks, rank).total()
        for kind in get_args(Kind):
            launched = kernels_of_layer(kind, tokens, ranks, rank).total()
            ratios[kind, tokens, ranks, rank] = launched / by_hand
    assert max(ratios.values()) <= 1.2, ratios


def test_one_flash_call_per_step():
    """A step of the ring needs one call, gathered keys need one per chunk of queries."""
    for kind, calls in (("ring", 8), ("all-gather-kv", 2), ("ulysses", 1)):
        counts = kernels_of_layer(kind, 32768, 8, 3)
        assert counts["_flash_attention_forward"] == calls, kind
        assert counts["_flash_attention_backward"] == calls, kind


def test_windows_are_computed_by_flash():
    """Each pair of chunks within the window is one call, and no mask is made."""
    counts = kernels_of_layer("ring", 32768, 8, 3, window=4096)
    assert counts["_flash_attention_forward"] == counts["_flash_attention_backward"] == 6
    assert not {"masked_fill", "arange", "bmm"} & set(counts)
