"""A step on a CPU takes again what the step before freed, without the system zeroing it anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

import plait
from plait.cluster import host_memory
from plait.engine import build
from tests.parity import cases

FAULTS = """
import ctypes, resource
from plait.cluster.topology import keep_host_memory
if {kept}:
    assert keep_host_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(20 * 2**20) for _ in range(16)]
    for block in blocks:
        ctypes.memset(block, 1, 20 * 2**20)
    for block in reversed(blocks):
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""How many pages the system hands out in the last step, which takes what the steps before took."""
PAGES = 16 * 20 * 2**20 // 4096


def faults(*, kept):
    environment = {
        name: value for name, value in os.environ.items() if name not in host_memory.USER_VARIABLES
    }
    script = FAULTS.format(kept=kept)
    return int(
        subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_fewer_pages_are_zeroed():
    assert faults(kept=False) > PAGES / 2
    assert faults(kept=True) < PAGES / 100


@pytest.mark.parametrize("name", host_memory.USER_VARIABLES)
def test_who_sets_the_allocator_keeps_it_so(name):
    assert not host_memory.keep_freed_memory({name: "glibc.malloc.hugetlb=1"})


def calls(rank, world, folder):
    """Runs in a worker."""
    zero = {
        "stage": 1,
        **({"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if folder else {}),
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model = cases.build("plain", tied=False, dtype=torch.float32)
    with patch.object(build, "keep_host_memory") as called:
        plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    return called.call_count


def test_not_where_states_are_in_files(pool, tmp_path):
    run: Callable[..., list[int]] = pool.run
    assert run(1, calls, None) == [1]
    assert run(1, calls, str(tmp_path)) == [0]
