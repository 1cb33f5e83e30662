"""A step on a CPU reuses memory that the previous step has freed, so no page is zeroed again."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

import plait
from plait.cluster import host_memory
from plait.engine import build
from tests.parity import cases

SCRIPT = """
import ctypes, resource
from plait.cluster.topology import keep_host_memory
if {keeps}:
    assert keep_host_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(20 * 2**20) for _ in range(16)]
    for block in blocks:
        ctypes.memset(block, 1, 20 * 2**20)
    for block in reversed(blocks):
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints the page faults of the last of four steps that each allocate and free the same memory."""
PAGES = 16 * 20 * 2**20 // 4096


def page_faults(*, keeps):
    environment = dict(os.environ)
    for name in host_memory.USER_VARIABLES:
        environment.pop(name, None)
    command = [sys.executable, "-c", SCRIPT.format(keeps=keeps)]
    return int(subprocess.check_output(command, env=environment, text=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_fewer_pages_are_zeroed():
    assert page_faults(keeps=False) > PAGES / 2
    assert page_faults(keeps=True) < PAGES / 100


@pytest.mark.parametrize("name", host_memory.USER_VARIABLES)
def test_allocator_settings_of_the_user_stay(name):
    assert not host_memory.keep_freed_memory({name: "glibc.malloc.hugetlb=1"})


def count_calls(rank, world, folder):
    """Return how often `initialize` keeps freed memory. Runs on every rank."""
    zero = {"stage": 1}
    if folder:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model = cases.build("plain", tied=False, dtype=torch.float32)
    # The setting of the allocator cannot be read.
    with patch.object(build, "keep_host_memory") as called:
        plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    return called.call_count


def test_freed_memory_is_returned_if_states_are_in_files(pool, tmp_path):
    """The page cache of the files needs it."""
    assert pool.run(1, count_calls, None) == [1]
    assert pool.run(1, count_calls, str(tmp_path)) == [0]
