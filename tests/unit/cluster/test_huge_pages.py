"""Large parameters lie on huge pages; small ones, and what refers to either, stay."""

import os

import torch
from torch import nn

from plait.cluster import host_memory
from plait.cluster.host_memory import HUGE_PAGE, process_bytes


def test_memory_begins_with_a_huge_page_and_is_writable():
    for shape, dtype in (
        ((1024, 513), torch.float32),
        ((HUGE_PAGE + 1,), torch.uint8),
        ((3 << 20,), torch.bfloat16),
    ):
        found = host_memory.empty_on_huge_pages(shape, dtype)
        assert found.shape == shape and found.dtype == dtype and found.data_ptr() % HUGE_PAGE == 0
        assert found.untyped_storage().nbytes() == found.nbytes
        assert torch.equal(found.fill_(3), torch.full(shape, 3, dtype=dtype))
    assert host_memory.empty_on_huge_pages((0, 5), torch.float32).shape == (0, 5)


def test_the_end_behind_the_last_huge_page_takes_its_bytes():
    before = process_bytes(os.getpid())
    kept = [
        host_memory.empty_on_huge_pages((HUGE_PAGE + 4096,), torch.uint8).fill_(1)
        for _ in range(16)
    ]
    taken = process_bytes(os.getpid()) - before
    assert taken < sum(one.nbytes for one in kept) + HUGE_PAGE // 2


def test_parameters_keep_their_identity():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(8, 8), nn.Linear(1024, 1024, bias=False))
    model[2].weight = model[0].weight
    large, small = model[0].weight, model[1].weight
    before = small.data_ptr()
    host_memory.move_to_huge_pages(model)
    assert (
        model[0].weight is large
        and model[2].weight is large
        and isinstance(large, nn.Parameter)
        and large.requires_grad
    )
    assert (
        large.data_ptr() % HUGE_PAGE == 0
        and large.shape == (1024, 1024)
        and small.data_ptr() == before
    )
    with torch.no_grad():
        large.normal_()
    model[0](torch.ones(2, 1024)).sum().backward()
    assert large.grad is not None
