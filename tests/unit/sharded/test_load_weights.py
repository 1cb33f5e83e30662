"""Weights are read from a file without the file staying in memory beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import plait
from plait.errors import CheckpointError
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


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    """Also by what would go on to load the folder with Transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors is no readable safetensors file \(.*\); download or save"):
        load_weights(nn.Linear(1, 1), tmp_path)
    with pytest.warns(UserWarning, match="loads"), pytest.raises(CheckpointError, match=r"model.safetensors is no readable"):
        plait.from_pretrained(tmp_path)
