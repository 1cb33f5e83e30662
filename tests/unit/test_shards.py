"""Lengths are split by one rule, that of `torch.chunk`."""

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from plait.cluster.layout import shard_length, shard_lengths, shard_size


@hypothesis.given(st.integers(0, 300), st.integers(1, 20))
def test_shards_are_torch_chunks(length, ranks):
    # `chunk` returns a chunk of no elements, and no chunks for further ranks.
    chunks = [chunk.numel() for chunk in torch.arange(length).chunk(ranks)]
    chunks += [0] * (ranks - len(chunks))
    assert shard_lengths(length, ranks) == chunks
    assert shard_size(length, ranks) == chunks[0]


CASES = st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(0, 19))


@hypothesis.given(st.lists(CASES, min_size=1))
def test_arrays_are_split_as_integers(cases):
    lengths, ranks, rank = np.array(cases).T
    assert shard_length(lengths, ranks, rank).tolist() == [shard_length(*case) for case in cases]
