"""A family whose files Transformers converts while it loads them (PhiMoE): loaded in full by Transformers, and refused where each rank
would read its slices, with words that lead there."""

import pytest
import torch

import plait
from plait.errors import CheckpointError
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.source import open_source

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("phimoe")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **SIZES)).save_pretrained(made)
    return made


def test_python_loads_it(folder):
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with pytest.warns(
        UserWarning, match="in full in every process, because it converts or adds weights"
    ):
        model = plait.from_pretrained(folder).eval()
    assert all(
        torch.equal(model.get_parameter(name), parameter)
        for name, parameter in own.named_parameters()
    )
    ids = torch.tensor([[5, 6, 7]])
    expected = own.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
    )[0, 3:].tolist()
    sharded = plait.parallelize(model, {"train_micro_batch_size_per_gpu": 1})
    try:
        assert (
            generate(sharded, [[5, 6, 7]], max_new_tokens=5, temperature=0)[0].token_ids == expected
        )
    finally:
        sharded.close()


def test_the_command_says_how_to_load_it(folder):
    words = (
        r'check "model_type" in its config.json; if Transformers converts .* plait.from_pretrained'
    )
    with pytest.raises(CheckpointError, match=words):
        load_model(open_source(folder))
