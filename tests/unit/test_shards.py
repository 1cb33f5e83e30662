"""The one rule by which lengths are split."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.layout import shard_length, shard_lengths, shard_size


@given(st.integers(0, 300), st.integers(1, 20))
def test_shards_are_torch_chunks(length, ranks):
    """The rule of DTensor and fully_shard, which store every shard as large as the first."""
    chunks = [part.numel() for part in torch.arange(length).chunk(ranks)] if length else []
    chunks += [0] * (ranks - len(chunks))
    assert shard_lengths(length, ranks) == chunks
    assert shard_size(length, ranks) == chunks[0]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(0, 19)), min_size=1))
def test_arrays_are_split_as_integers_are(cases):
    lengths, ranks, at = (np.array(column) for column in zip(*cases, strict=True))
    assert shard_length(lengths, ranks, at).tolist() == [shard_length(*case) for case in cases]
