"""Tensors in mapped files: their values, their memory, and disks without space."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import plait
from plait.errors import PlaitError
from plait.parallel.offload import arena as arena_module
from plait.parallel.offload.arena import PAGE, Arena
from plait.sizes import MIB
from tests.parity import cases


def mapped_resident_bytes():
    """Bytes of file pages that are in this process's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssFile")


def test_tensors_in_files(tmp_path):
    arena = Arena(tmp_path)
    arena.reserve(10 * PAGE)
    matrix = torch.arange(6.0).view(2, 3)
    vector = torch.arange(5, dtype=torch.bfloat16)
    mapped_matrix = arena.copy(matrix)
    mapped_vector = arena.copy(vector)
    mapped_matrix.mul_(2)
    assert torch.equal(mapped_matrix, 2 * matrix)
    assert torch.equal(mapped_vector, vector)
    assert arena.reserved_bytes == 10 * PAGE

    assert arena.holds(mapped_matrix)
    assert arena.holds(mapped_vector[2:])
    assert not arena.holds(torch.ones(2))
    assert arena.empty((0, 3), torch.float32).shape == (0, 3)
    # More than was reserved.
    arena.copy(torch.ones(20 * PAGE))
    assert arena.reserved_bytes > 80 * PAGE
    assert not list(tmp_path.iterdir())


def test_an_evicted_tensor_leaves_memory_and_keeps_its_values(tmp_path):
    arena = Arena(tmp_path)
    tensor = arena.copy(torch.ones(8 * MIB // 4))
    before = mapped_resident_bytes()
    arena.fetch(tensor, write=True)
    assert mapped_resident_bytes() - before >= 8 * MIB * 0.9
    tensor.add_(1)
    arena.evict(tensor)
    assert mapped_resident_bytes() - before <= MIB
    assert torch.equal(tensor, torch.full((8 * MIB // 4,), 2.0))
    # A tensor outside the files is ignored.
    arena.evict(torch.ones(3))


@pytest.mark.parametrize(
    ("stage", "sections", "successes", "section"),
    [
        (1, ["offload_optimizer"], 0, "offload_optimizer"),
        (3, ["offload_param"], 0, "offload_param"),
        (3, ["offload_param", "offload_optimizer"], 0, "offload_param"),
        # There is space for the parameters, but not for the states.
        (3, ["offload_param", "offload_optimizer"], 1, "offload_optimizer"),
    ],
)
def test_a_full_disk_is_reported_before_anything_changes(
    tmp_path, monkeypatch, stage, sections, successes, section
):
    reserved = []
    reserve = os.posix_fallocate

    def full(*arguments):
        if len(reserved) == successes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserved.append(reserve(*arguments))

    # A disk that is full at the right moment cannot be had otherwise.
    monkeypatch.setattr(arena_module.os, "posix_fallocate", full)
    model = cases.build("plain", tied=True, dtype=torch.float32, device="cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = {"stage": stage}
    for name in sections:
        folder = str(tmp_path / name)
        zero[name] = {"device": "nvme", "nvme_path": folder, "buffer_size": 10_000}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    message = rf"{section}.nvme_path.*No space left .*; free some space.*Nothing was changed"
    with pytest.raises(PlaitError, match=message):
        plait.initialize(model, config, loss_fn=plait.causal_lm_loss)

    for name, parameter in model.named_parameters():
        values = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(values, before[name])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaitError, match="nvme_path"):
        Arena(tmp_path / "file" / "folder")
