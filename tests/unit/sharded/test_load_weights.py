"""Weights are read from a file without the file staying in memory beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from plait.sharded import load_weights as module
from plait.sharded.load_weights import load_weights


def mapped_bytes(path: Path) -> int:
    """Of a file, in this process's memory."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ", 1)[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_a_file_is_mapped_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = 4 << 20
    source = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
    path = tmp_path / "model.safetensors"
    save_file(source.state_dict(), path)
    model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
    monkeypatch.setattr(module, "MAPPED", 2 * tensor)
    seen: list[int] = []
    load_weights(model, tmp_path, filled=lambda _: seen.append(mapped_bytes(path)))
    assert len(seen) == 8 and tensor // 2 < max(seen) < 3 * tensor, seen
    assert all(torch.equal(model[at].weight, source[at].weight) for at in range(8))
    monkeypatch.setattr(module, "MAPPED", 1 << 40)
    seen.clear()
    load_weights(model, tmp_path, filled=lambda _: seen.append(mapped_bytes(path)))
    assert max(seen) > 6 * tensor  # what the first part of this test is about
