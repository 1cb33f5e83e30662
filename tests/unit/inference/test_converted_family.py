"""A family whose files Transformers converts while it loads them (PhiMoE).

Python loads it in full. Commands, whose ranks read slices of the files, refuse it with a remedy.
"""

from contextlib import closing

import pytest
import torch

import plait
from plait.errors import CheckpointError
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from tests.unit.inference.models import saved, transformers_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("phimoe")
    saved(path, "phimoe", layers=2, num_local_experts=4, pad_token_id=0)
    return path


def test_python_loads_it_in_full(folder):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    warning = "in full in every process, because it converts or adds weights"
    with pytest.warns(UserWarning, match=warning):
        model = plait.from_pretrained(folder).eval()
    for name, expected in reference.named_parameters():
        assert torch.equal(model.get_parameter(name), expected), name

    prompt = [5, 6, 7]
    expected = transformers_tokens(reference, prompt, 5)
    with closing(plait.parallelize(model, {"train_micro_batch_size_per_gpu": 1})) as sharded:
        (answer,) = generate(sharded, [prompt], max_new_tokens=5, temperature=0)
    assert answer.token_ids == expected


def test_the_refusal_says_how_to_load_it(folder):
    remedy = 'check "model_type" .*; if Transformers converts .* with plait.from_pretrained'
    with pytest.raises(CheckpointError, match=remedy):
        load_model(open_source(folder))
