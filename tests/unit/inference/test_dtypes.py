"""What a folder's model computes in: as Transformers loads it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import CheckpointError
from plait.inference.deployment import load_model
from plait.inference.source import open_source
from tests.unit.inference.models import built, saved


def dtypes(folder, dtype=None):
    return {
        name: tensor.dtype for name, tensor in open_source(folder).model(dtype).state_dict().items()
    }


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_a_configuration_without_a_dtype(stored, tmp_path):
    """The first tensor of the files says it."""
    built(layers=1).to(stored).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(dtypes(tmp_path).values()) == {stored}
    assert set(dtypes(tmp_path, torch.float64).values()) == {torch.float64}
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {
            name: one.to(torch.float64 if "norm" in name else stored)
            for name, one in tensors.items()
        },
        tmp_path / "model.safetensors",
    )
    expected = (
        pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path).dtype
    )
    assert set(dtypes(tmp_path).values()) == {expected}


def test_parameters_that_stay_in_float32(tmp_path):
    """Of GPT-OSS norms, in float16 alone; of GLM 4 MoE a router's correction, in bfloat16 as well."""
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    saved(
        tmp_path / "model",
        "gpt_oss",
        layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        head_dim=16,
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        expected = {
            name: one.dtype
            for name, one in auto.from_pretrained(tmp_path / "model", dtype=dtype)
            .state_dict()
            .items()
        }
        assert dtypes(tmp_path / "model", dtype) == expected
        assert (torch.float32 in expected.values()) == (dtype != torch.bfloat16)
    model = built(
        "glm4_moe",
        layers=2,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
    )
    model.save_pretrained(tmp_path / "routed")
    for dtype in (torch.float16, torch.bfloat16):
        expected = {
            name: one.dtype
            for name, one in auto.from_pretrained(tmp_path / "routed", dtype=dtype)
            .state_dict()
            .items()
        }
        assert dtypes(tmp_path / "routed", dtype) == expected and torch.float32 in expected.values()


def test_a_family_that_is_never_without_values(tmp_path):
    saved(tmp_path, "diffllama", layers=1)
    words = r"DiffLlamaForCausalLM creates model\.layers\.0.* load it with Transformers in Python"
    with pytest.raises(CheckpointError, match=words):
        open_source(tmp_path).model()


def test_a_family_whose_names_transformers_converts(tmp_path):
    """Is read from a folder with the model's own names, as docs/how-to/generation.md says."""
    model = built("gpt_neox", layers=1)
    model.save_pretrained(tmp_path, save_original_format=False)
    sharded = load_model(open_source(tmp_path))
    try:
        assert all(
            torch.equal(sharded.model.state_dict()[name], tensor)
            for name, tensor in model.state_dict().items()
        )
    finally:
        sharded.close()
