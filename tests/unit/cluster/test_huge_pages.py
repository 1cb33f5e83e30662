"""Memory on huge pages: large parameters are moved to it, and small ones stay."""

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
        tensor = host_memory.empty_on_huge_pages(shape, dtype)
        assert tensor.data_ptr() % HUGE_PAGE == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        # This compares shape and dtype, too.
        torch.testing.assert_close(tensor.fill_(3), torch.full(shape, 3, dtype=dtype))
    assert host_memory.empty_on_huge_pages((0, 5), torch.float32).shape == (0, 5)


def test_a_partly_used_huge_page_takes_only_used_bytes():
    before = process_bytes(os.getpid())
    tensors = []
    for _ in range(16):
        tensor = host_memory.empty_on_huge_pages((HUGE_PAGE + 4096,), torch.uint8)
        tensors.append(tensor.fill_(1))
    used_bytes = process_bytes(os.getpid()) - before
    assert used_bytes < 16 * tensors[0].nbytes + HUGE_PAGE // 2


def test_moved_parameters_stay_the_same_objects():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(8, 8), nn.Linear(1024, 1024, bias=False))
    model[2].weight = model[0].weight
    large = model[0].weight
    small = model[1].weight
    small_pointer = small.data_ptr()
    host_memory.move_to_huge_pages(model)
    assert model[0].weight is large
    assert model[2].weight is large
    assert isinstance(large, nn.Parameter)
    assert large.requires_grad
    assert large.shape == (1024, 1024)
    assert large.data_ptr() % HUGE_PAGE == 0
    assert small.data_ptr() == small_pointer

    with torch.no_grad():
        large.normal_()
    model[0](torch.ones(2, 1024)).sum().backward()
    assert large.grad is not None
