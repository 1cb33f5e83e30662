"""Distribution of a sequence over ranks, and its restoration from their shards."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.parallel.context.kinds import SequenceLayout


@given(ranks=st.integers(1, 9), length=st.integers(1, 70), zigzag=st.booleans())
def test_joined_shards_are_the_padded_sequence(ranks, length, zigzag):
    sequence = torch.arange(2 * length * 3).view(2, length, 3)
    layouts = [SequenceLayout(ranks, rank, zigzag) for rank in range(ranks)]
    shards = [layout.shard(sequence, dim=1, fill=-100) for layout in layouts]
    padded = layouts[0].padded(length)
    assert {shard.shape[1] for shard in shards} == {padded // ranks}
    assert 0 <= padded - length < layouts[0].count

    joined = layouts[0].join(shards, dim=1)
    assert torch.equal(joined[:, :length], sequence)
    assert (joined[:, length:] == -100).all()
    assert torch.equal(layouts[0].stacked(joined, dim=1), torch.cat(shards))
    for layout, shard in zip(layouts, shards, strict=True):
        for chunk in layout.chunks(shard.shape[1]):
            local = shard[:, chunk.local_start : chunk.local_start + chunk.size]
            assert torch.equal(local, joined[:, chunk.start : chunk.start + chunk.size])


def test_zigzag_shares_causal_work():
    pairs = set()
    for rank in range(4):
        chunks = SequenceLayout(4, rank, zigzag=True).chunks(16)
        # The query at position p attends to p + 1 keys.
        pairs.add(sum(sum(range(c.start + 1, c.start + c.size + 1)) for c in chunks))
    assert len(pairs) == 1
