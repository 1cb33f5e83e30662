"""The counter of bytes knows every collective that is dispatched while it counts."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.measured.traffic import count_traffic


@pytest.fixture(autouse=True)
def _four_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_an_unknown_collective_is_refused():
    """Its bytes would be missing in the count, and in what a test compares with it."""
    with pytest.raises(NotImplementedError, match="add it to _OPERATORS"), count_traffic():
        dist.reduce(torch.ones(4), 0)


def test_scalars_and_flags_are_not_counted_as_gradients():
    with count_traffic() as traffic:
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.all_reduce(torch.ones(100, dtype=torch.uint8))
        dist.all_reduce(torch.ones(3))
    # An all-reduce of four ranks sends 2 * 3/4 of its bytes.
    assert traffic.bytes() == {"control": 24 + 150, "all_reduce": 18}
