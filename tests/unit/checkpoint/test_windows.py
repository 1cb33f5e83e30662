"""Which rank holds which part: by the rule, by torch's own DTensors, and every element exactly once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.checkpoint.windows import TensorRecord, overlap, slices_within
from plait.cluster.layout import Layout

CUTS = st.lists(
    st.sampled_from([("tp", 0), ("tp", 1), ("dp_shard", 0), ("dp_shard", 1), ("cp", 0)]),
    max_size=3,
    unique_by=lambda c: c[0],
)


@given(
    shape=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    cuts=CUTS,
    degrees=st.fixed_dictionaries(
        {
            "pp": st.just(2),
            "dp_replicate": st.integers(1, 2),
            "dp_shard": st.integers(1, 5),
            "tp": st.integers(1, 4),
        }
    ),
    stage=st.integers(0, 1),
)
def test_every_element_is_written_once(shape, cuts, degrees, stage):
    """By one rank, and found there by any other layout's window."""
    layout = Layout(**degrees, cp=2)
    record = TensorRecord(
        dtype="float32",
        shape=tuple(shape),
        cuts=tuple(cuts),
        stages=(stage, 1) if stage == 0 else (1,),
    )
    written = torch.zeros(shape, dtype=torch.int64)
    owners = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if record.is_written_by(at):
            owners[rank] = record.window(at, layout.degrees)
            written[tuple(slice(start, start + size) for start, size in owners[rank])] += 1
    assert bool((written == 1).all())
    wanted = tuple((size // 3, size - size // 2) for size in shape)
    found = torch.zeros(shape, dtype=torch.int64)
    for rank, held in record.parts(layout, wanted):
        assert owners[rank] == held
        part = overlap(held, wanted)
        assert part is not None
        found[tuple(slice(start, start + size) for start, size in part)] += 1
    assert bool((found[tuple(slice(start, start + size) for start, size in wanted)] == 1).all())
    assert int(found.sum()) == int(torch.tensor([size for _, size in wanted]).prod())


def test_parts_of_windows():
    assert overlap(((0, 4), (2, 3)), ((3, 5), (0, 3))) == ((3, 1), (2, 1))
    assert overlap(((0, 4),), ((4, 2),)) is None
    assert overlap((), ()) == ()
    assert slices_within(((3, 1), (2, 1)), ((2, 4), (0, 3))) == (slice(1, 2), slice(2, 3))
