"""A folder's model has the dtypes with which Transformers loads it."""

import json
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import CheckpointError
from plait.inference.deployment import load_model
from plait.inference.source import open_source
from tests.unit.inference.models import built, saved

transformers = pytest.importorskip("transformers")


def dtypes_of(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def plait_dtypes(folder, dtype=None):
    return dtypes_of(open_source(folder).model(dtype))


def transformers_dtypes(folder, dtype):
    return dtypes_of(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_the_files_decide_without_a_configured_dtype(stored, tmp_path):
    """The dtype of the first tensor is used."""
    built(layers=1).to(stored).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(plait_dtypes(tmp_path).values()) == {stored}
    assert set(plait_dtypes(tmp_path, torch.float64).values()) == {torch.float64}

    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].double()
    save_file(tensors, weights)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype
    assert set(plait_dtypes(tmp_path).values()) == {expected}


def test_parameters_that_stay_in_float32(tmp_path):
    """A float16 GPT-OSS keeps norms, and GLM 4 MoE a router's correction, also in bfloat16."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    saved(tmp_path / "norms", "gpt_oss", layers=1, head_dim=16, **experts)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        expected = transformers_dtypes(tmp_path / "norms", dtype)
        assert plait_dtypes(tmp_path / "norms", dtype) == expected
        assert (torch.float32 in expected.values()) == (dtype != torch.bfloat16)

    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    saved(tmp_path / "router", "glm4_moe", layers=2, first_k_dense_replace=1, **experts)
    for dtype in (torch.float16, torch.bfloat16):
        expected = transformers_dtypes(tmp_path / "router", dtype)
        assert plait_dtypes(tmp_path / "router", dtype) == expected
        assert torch.float32 in expected.values()


def test_a_family_that_cannot_be_built_without_values(tmp_path):
    saved(tmp_path, "diffllama", layers=1)
    message = r"DiffLlamaForCausalLM creates model\.layers\.0.* load it with Transformers in Python"
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path).model()


def test_a_converted_family_is_read_under_the_models_names(tmp_path):
    """`save_original_format=False` is the advice of docs/how-to/generation.md."""
    model = built("gpt_neox", layers=1)
    model.save_pretrained(tmp_path, save_original_format=False)
    with closing(load_model(open_source(tmp_path))) as sharded:
        loaded = sharded.model.state_dict()
        for name, expected in model.state_dict().items():
            assert torch.equal(loaded[name], expected), name
