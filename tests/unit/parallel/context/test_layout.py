"""Which tokens a rank has: every token once, chunks in their order, and what is cut comes back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.parallel.context.kinds import SequenceLayout


@given(ranks=st.integers(1, 9), length=st.integers(1, 70), zigzag=st.booleans())
def test_what_is_cut_comes_back(ranks, length, zigzag):
    whole = torch.arange(2 * length * 3).view(2, length, 3)
    layouts = [SequenceLayout(ranks, rank, zigzag) for rank in range(ranks)]
    parts = [layout.shard(whole, dim=1, fill=-100) for layout in layouts]
    padded = layouts[0].padded(length)
    assert {part.shape[1] for part in parts} == {
        padded // ranks
    } and 0 <= padded - length < layouts[0].count
    together = layouts[0].join(parts, dim=1)
    assert torch.equal(together[:, :length], whole) and bool((together[:, length:] == -100).all())
    assert torch.equal(layouts[0].stacked(together, dim=1), torch.cat(parts))
    for layout, part in zip(layouts, parts, strict=True):
        for chunk in layout.chunks(part.shape[1]):
            assert torch.equal(
                part[:, chunk.local_start : chunk.local_start + chunk.size],
                together[:, chunk.start : chunk.start + chunk.size],
            )


def test_zigzag_shares_causal_work():
    seen = [
        sum(
            sum(range(c.start + 1, c.start + c.size + 1))
            for c in SequenceLayout(4, rank, zigzag=True).chunks(16)
        )
        for rank in range(4)
    ]
    assert len(set(seen)) == 1
