"""Attention of each kind launches about as many kernels as a ring that is written by hand."""

from typing import get_args

from benchmarks.context_kernels import kernels_by_hand, kernels_of_layer
from plait.parallel.context.kinds import Kind


def test_at_most_a_fifth_more_than_by_hand():
    """Forward and backward of a layer, from 8,192 tokens on 2 ranks to 1,048,576 on 32; the last rank, and on few ranks the first."""
    found = {}
    for tokens, ranks, rank in ((8192, 2, 0), (32768, 8, 7), (1048576, 32, 31)):
        by_hand = kernels_by_hand(tokens, ranks, rank).total()
        for kind in get_args(Kind):
            found[kind, tokens, ranks, rank] = (
                kernels_of_layer(kind, tokens, ranks, rank).total() / by_hand
            )
    assert max(found.values()) <= 1.2, found


def test_one_flash_call_per_step():
    """Zigzag chunks of a step are computed in one call, and gathered keys in one call for each chunk of queries."""
    for kind, calls in (("ring", 8), ("all-gather-kv", 2), ("ulysses", 1)):
        counted = kernels_of_layer(kind, 32768, 8, 3)
        assert (
            counted["_flash_attention_forward"] == counted["_flash_attention_backward"] == calls
        ), kind


def test_windows_are_computed_by_flash():
    """A chunk sees those chunks that its window reaches, each by one call, and no mask is made."""
    counted = kernels_of_layer("ring", 32768, 8, 3, window=4096)
    assert counted["_flash_attention_forward"] == counted["_flash_attention_backward"] == 6
    assert not {"masked_fill", "arange", "bmm"} & set(counted)
