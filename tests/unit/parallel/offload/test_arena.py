"""Mapped tensors: they hold what is put there, leave memory when told, and a full disk is an error before anything happens."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from plait.errors import PlaitError
from plait.parallel.offload import arena as module
from plait.parallel.offload.arena import PAGE, Arena
from plait.sizes import MIB


def mapped_resident():
    """Bytes of file pages that this process maps now."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssFile")
    )
    return int(line.split()[1]) * 1024


def test_tensors_are_ordinary_and_apart(tmp_path):
    arena = Arena(tmp_path)
    arena.reserve(10 * PAGE)
    a, b = (
        arena.copy(torch.arange(6.0).view(2, 3)),
        arena.copy(torch.arange(5, dtype=torch.bfloat16)),
    )
    a.mul_(2)
    assert torch.equal(a, 2 * torch.arange(6.0).view(2, 3)) and torch.equal(
        b, torch.arange(5, dtype=torch.bfloat16)
    )
    assert arena.reserved_bytes == 10 * PAGE
    assert arena.holds(a) and arena.holds(b[2:]) and not arena.holds(torch.ones(2))
    assert arena.empty((0, 3), torch.float32).shape == (0, 3)
    arena.copy(torch.ones(20 * PAGE))  # beyond what was reserved
    assert arena.reserved_bytes > 80 * PAGE
    assert not list(tmp_path.iterdir())


def test_what_is_put_away_leaves_memory_and_comes_back(tmp_path):
    arena = Arena(tmp_path)
    tensor = arena.copy(torch.ones(8 * MIB // 4))
    before = mapped_resident()
    arena.fetch(tensor, write=True)
    assert mapped_resident() - before >= 8 * MIB * 0.9
    tensor.add_(1)
    arena.evict(tensor)
    assert mapped_resident() - before <= MIB
    assert torch.equal(tensor, torch.full((8 * MIB // 4,), 2.0))
    arena.evict(torch.ones(3))  # not mapped: nothing to do


@pytest.mark.parametrize(
    ("stage", "sections", "room", "named"),
    [
        (1, ["offload_optimizer"], 0, "offload_optimizer"),
        (3, ["offload_param"], 0, "offload_param"),
        (3, ["offload_param", "offload_optimizer"], 0, "offload_param"),
        (
            3,
            ["offload_param", "offload_optimizer"],
            1,
            "offload_optimizer",
        ),  # the parameters fit, and the states do not
    ],
)
def test_a_full_disk_is_told_before_anything_happens(
    tmp_path, monkeypatch, stage, sections, room, named
):
    import plait
    from tests.parity import cases

    given, reserve = [], os.posix_fallocate

    def full(*arguments):
        if len(given) == room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        given.append(reserve(*arguments))

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    model = cases.build("plain", tied=True, dtype=torch.float32, device="cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = {
        name: {"device": "nvme", "nvme_path": str(tmp_path / name), "buffer_size": 10_000}
        for name in sections
    }
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **zero}}
    words = rf"{named}.nvme_path.*No space left on device\); free some space.*Nothing was changed"
    with pytest.raises(PlaitError, match=words):
        plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    now = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in model.named_parameters()
    }
    assert all(torch.equal(p, before[name]) for name, p in now.items())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaitError, match="nvme_path"):
        Arena(tmp_path / "file" / "folder")
