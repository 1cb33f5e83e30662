"""Layers that no file has as they compute are written to new files to be streamed from: the tokens are those of the model in memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import InputError
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.inference.streamed_model import _save_aligned, load_streamed
from plait.inference.weight_stream import WEIGHT_ALIGNMENT, WeightStream
from tests.unit.inference.models import saved

PROMPTS = [[5, 8, 2, 61, 7], [70, 7]]


def answers(sharded):
    made = [
        (one.token_ids, one.logprobs)
        for one in generate(sharded, PROMPTS, max_new_tokens=8, temperature=1.0, seed=2)
    ]
    sharded.close()
    return made


def streamed(source, scratch, **asked):
    total = sum(p.numel() * p.element_size() for p in source.model(asked.get("dtype")).parameters())
    sharded, planned = load_streamed(
        source, budget_bytes=total - 1, other_bytes=0, scratch=scratch, **asked
    )
    (stream,) = [hook for hook in sharded.hooks.all if isinstance(hook, WeightStream)]
    assert planned.streamed and not list(scratch.iterdir()), "its files have no name any more"
    found = answers(sharded)
    assert stream.bytes_read
    return found


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float64)])
def test_another_dtype(kind, dtype, tmp_path):
    saved(tmp_path / "model", kind, layers=4)
    source, scratch = open_source(tmp_path / "model"), tmp_path / "scratch"
    scratch.mkdir()
    assert streamed(source, scratch, dtype=dtype) == answers(load_model(source, dtype=dtype))


def test_tensors_are_aligned_for_direct_reads(tmp_path):
    """Behind headers of every length; a file is written twice only when it changes."""
    shift, shifts = 0, []
    for length in range(1, 41):
        made = {"x" * length: torch.arange(8.0), "codes": torch.arange(32, dtype=torch.int8)}
        written, shift = _save_aligned(made, tmp_path / "0.safetensors", shift)
        shifts.append(shift)
        assert not any(one.offset % WEIGHT_ALIGNMENT for one in written.values())
        assert all(map(torch.equal, load_file(tmp_path / "0.safetensors").values(), made.values()))
    assert set(shifts) == {0, 8} and sum(map(int.__ne__, shifts, shifts[1:])) < 8


def test_files_of_another_model(tmp_path):
    saved(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(127, 64)
    save_file(tensors, path, metadata={"format": "pt"})
    words = r"model.layers.1.mlp.up_proj.weight has the shape \[127, 64\], but the model needs \[128, 64\]"
    with pytest.raises(InputError, match=words):
        load_streamed(open_source(tmp_path / "model"), budget_bytes=1 << 20, other_bytes=0)
