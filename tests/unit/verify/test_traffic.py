"""The counter of bytes, on collectives whose bytes are known."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.measured.traffic import count_traffic


@pytest.fixture(autouse=True)
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_every_kind():
    """The ring formulas on 64 float32 elements and 4 ranks."""
    x = torch.ones(64)
    with count_traffic() as traffic:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(256), x)
        dist.reduce_scatter_tensor(torch.empty(16), x)
        dist.all_to_all_single(torch.empty(64), x)
        dist.all_gather([torch.empty(64) for _ in range(4)], x)
        dist.send(x, 1)
        dist.barrier()
    assert traffic.bytes() == {
        "all_reduce": 2 * 192,
        "all_gather": 2 * 768,
        "reduce_scatter": 2 * 192,
        "send": 256,
    }


def test_functional_collectives():
    with count_traffic() as traffic:
        functional.all_reduce(torch.ones(64), "sum", dist.group.WORLD).sum()
        functional.all_gather_tensor(torch.ones(64), 0, dist.group.WORLD).sum()
        functional.reduce_scatter_tensor(torch.ones(64), "sum", 0, dist.group.WORLD).sum()
    assert traffic.bytes() == {"all_reduce": 384, "all_gather": 768, "reduce_scatter": 192}


def test_scalars_and_flags_are_control():
    """And are not mistaken for gradients, nor gradients for them."""
    with count_traffic() as traffic:
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.all_reduce(torch.ones(100, dtype=torch.uint8))
        dist.all_reduce(torch.ones(3))
    assert traffic.bytes() == {"control": 24 + 150, "all_reduce": 18}


def test_unknown_collectives_are_not_passed_over():
    """A count that misses something is no proof."""
    with pytest.raises(NotImplementedError, match="add it to _OPERATORS"), count_traffic():
        dist.reduce(torch.ones(4), 0)
