"""Layers that are computed in a dtype of no file are written to new files to be streamed from."""

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


def answers_of(sharded):
    answers = generate(sharded, PROMPTS, max_new_tokens=8, temperature=1.0, seed=2)
    sharded.close()
    return [(answer.token_ids, answer.logprobs) for answer in answers]


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float64)])
def test_streamed_layers_of_another_dtype(kind, dtype, tmp_path):
    saved(tmp_path / "model", kind, layers=4)
    source = open_source(tmp_path / "model")
    expected = answers_of(load_model(source, dtype=dtype))

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    total_bytes = sum(parameter.nbytes for parameter in source.model(dtype).parameters())
    limits = {"budget_bytes": total_bytes - 1, "other_bytes": 0}
    sharded, plan = load_streamed(source, scratch=scratch, dtype=dtype, **limits)
    (stream,) = [hook for hook in sharded.hooks.all if isinstance(hook, WeightStream)]
    assert plan.streamed and not list(scratch.iterdir()), "open files must have no name"
    assert answers_of(sharded) == expected
    assert stream.bytes_read


# A public call would need a model for each length of a header.
def test_tensors_are_aligned_for_direct_reads(tmp_path):
    """A file is written a second time only if the length of its header has changed."""
    file = tmp_path / "0.safetensors"
    shift = 0
    shifts = []
    for length in range(1, 41):
        tensors = {"x" * length: torch.arange(8.0), "codes": torch.arange(32, dtype=torch.int8)}
        written, shift = _save_aligned(tensors, file, shift)
        shifts.append(shift)
        for tensor in written.values():
            assert tensor.offset % WEIGHT_ALIGNMENT == 0
        assert all(map(torch.equal, load_file(file).values(), tensors.values()))
    assert set(shifts) == {0, 8} and sum(map(int.__ne__, shifts, shifts[1:])) < 8


def test_files_of_another_model_are_refused(tmp_path):
    saved(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(127, 64)
    save_file(tensors, path, metadata={"format": "pt"})
    message = (
        r"layers.1.mlp.up_proj.weight has the shape \[127, 64\], but the model needs \[128, 64"
    )
    with pytest.raises(InputError, match=message):
        load_streamed(open_source(tmp_path / "model"), budget_bytes=1 << 20, other_bytes=0)
