"""Windows of tensors on ranks: every element is written once, and any other layout finds it."""

import hypothesis
import torch
from hypothesis import strategies as st

from plait.checkpoint.windows import TensorRecord, overlap, slices_within
from plait.cluster.layout import Layout

CUTS = st.lists(
    st.sampled_from([("tp", 0), ("tp", 1), ("dp_shard", 0), ("dp_shard", 1), ("cp", 0)]),
    max_size=3,
    unique_by=lambda cut: cut[0],
)
DEGREES = st.fixed_dictionaries(
    {
        "pp": st.just(2),
        "dp_replicate": st.integers(1, 2),
        "dp_shard": st.integers(1, 5),
        "tp": st.integers(1, 4),
    }
)


def slices_of(window):
    return tuple(slice(start, start + size) for start, size in window)


@hypothesis.given(
    shape=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    cuts=CUTS,
    degrees=DEGREES,
    stages=st.sampled_from([(0, 1), (1,)]),
)
def test_every_element_is_written_once(shape, cuts, degrees, stages):
    layout = Layout(**degrees, cp=2)
    record = TensorRecord(dtype="float32", shape=tuple(shape), cuts=tuple(cuts), stages=stages)
    writes = torch.zeros(shape, dtype=torch.int64)
    windows = {}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        if record.is_written_by(coordinates):
            windows[rank] = record.window(coordinates, layout.degrees)
            writes[slices_of(windows[rank])] += 1
    assert bool((writes == 1).all())

    # A window of another layout.
    target = tuple((size // 3, size - size // 2) for size in shape)
    reads = torch.zeros(shape, dtype=torch.int64)
    for rank, window in record.parts(layout, target):
        assert windows[rank] == window
        common = overlap(window, target)
        assert common is not None
        reads[slices_of(common)] += 1
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[slices_of(target)] = 1
    assert torch.equal(reads, expected)


def test_overlaps_of_windows():
    assert overlap(((0, 4), (2, 3)), ((3, 5), (0, 3))) == ((3, 1), (2, 1))
    assert overlap(((0, 4),), ((4, 2),)) is None
    assert overlap((), ()) == ()
    assert slices_within(((3, 1), (2, 1)), ((2, 4), (0, 3))) == (slice(1, 2), slice(2, 3))
