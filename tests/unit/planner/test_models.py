"""Architectures from published names, configurations and folders, with their sizes and FLOPs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from plait.errors import InputError
from plait.planner import hardware, models
from plait.planner.built import COUNTED_BY_FORMULA
from plait.planner.models import find_model, from_config, named, to_config
from tests.unit.config.cases import check_refusals


@pytest.mark.parametrize(
    ("name", "billions"),
    # Numbers of papers and model cards.
    [
        ("gpt3-175b", 174.6),
        ("llama-3-8b", 8.0303),
        ("llama-3-405b", 405.85),
        ("llama-2-7b", 6.738),
        ("mixtral-8x7b", 46.70),
        ("qwen2.5-72b", 72.7),
        ("megatron-1t", 1008),
        ("deepseek-v3", 671),
    ],
)
def test_published_parameter_counts(name, billions):
    assert float(named(name).parameters) / 1e9 == pytest.approx(billions, rel=0.002)


def test_active_parameters_of_experts():
    # Published figures count the embedding.
    active = float(named("mixtral-8x7b").active_matrix_parameters) + 32000 * 4096
    assert active / 1e9 == pytest.approx(12.88, rel=0.003)


def test_flops_of_a_token_use_half_the_attention():
    # 45.0 + 6.4 GFLOP at 8,192 tokens.
    assert float(named("llama-3-8b").model_flops(8192)) == pytest.approx(51.5e9, rel=0.01)


def parameter_count(config):
    """Return the number of parameters of the model that Transformers builds."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", ["gpt2", "tinyllama-1.1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "mixtral-8x7b"]
)
def test_counts_are_those_of_transformers(name):
    architecture = replace(named(name), layers=2)
    count = parameter_count(to_config(architecture, positions=128))
    # GPT-2 has a table of positions.
    positions = 1024 if name == "gpt2" else 0
    assert count == replace(architecture, positions=positions).parameters


LATENT = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8,
    "num_hidden_layers": 2,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
"""Sizes of a small model with DeepSeek's latent attention."""


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"first_k_dense_replace": 1}])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_has_the_parameters_of_transformers(kind, changes):
    """Queries are compressed if there is a q_lora_rank."""
    config = {"model_type": kind, **LATENT, **changes}
    assert parameter_count(config) == from_config(config).parameters


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}])
def test_flops_of_latent_attention_are_those_that_torch_counts(changes):
    """Values are narrower than keys. torch counts all scores, and model FLOPs half of them."""
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "deepseek_v3", **LATENT, **changes}
    tokens = 96
    library_config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(library_config)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()

    architecture = from_config(config)
    products = 6 * architecture.active_matrix_parameters
    attention = architecture.model_flops(tokens) - products
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.aten.bmm] == tokens * 2 * attention
    assert counts[torch.ops.aten.mm] == pytest.approx(tokens * float(products), rel=0.01)


SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 1000}
"""Sizes in the configuration. The others are Transformers' defaults for the family."""
OTHER_SIZES = {
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "nemotron": {"num_key_value_heads": 2},
    "glm4_moe": {"head_dim": 32},
    "helium": {"head_dim": 32},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


# Private tables, so that a family that is added is tested too.
@pytest.mark.parametrize("kind", sorted(models._GATED | models._TWO_MATRICES))
def test_missing_sizes_are_transformers_defaults(kind):
    config = {"model_type": kind, **SIZES, "pad_token_id": 0, **OTHER_SIZES.get(kind, {})}
    architecture = from_config(config)
    # Formulas are accurate to 1 %. Other families are counted.
    error = 0.01 if kind in COUNTED_BY_FORMULA else 0.0
    assert float(architecture.parameters) == pytest.approx(parameter_count(config), rel=error)
    assert models.unknown_layers(architecture) is None


# Configurations of these two are written for another family.
@pytest.mark.parametrize("name", sorted(set(models.names()) - {"gpt-oss-120b", "bloom-176b"}))
def test_an_entry_of_the_table_equals_its_configuration(name):
    entry = named(name)
    architecture = from_config(to_config(entry, positions=entry.positions or 2048))
    for field in (
        *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated", "tied"),
        *("experts", "active", "attention_parameters"),
    ):
        assert getattr(architecture, field) == getattr(entry, field), field
    if not entry.positions:
        assert architecture.parameters == entry.parameters


def test_the_vocabulary_has_three_sources():
    pytest.importorskip("transformers")
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    assert from_config({"model_type": "llama", **sizes}).vocab == 32000
    assert from_config({"model_type": "llama", **sizes}, vocab=77).vocab == 77
    assert from_config({"model_type": "llama", **SIZES}, vocab=77).vocab == 1000
    text = {"model_type": "gemma3_text", **sizes}
    config = {"model_type": "gemma3", "vocab_size": 500, "text_config": text}
    assert from_config(config).vocab == 500


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_a_nested_language_model_has_the_default_sizes(name):
    """The file of LLaVA 1.5 contains only the differences from Llama's defaults."""
    pytest.importorskip("transformers")
    inner = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    architecture = from_config({"model_type": "llava", name: inner, "image_token_index": 32000})
    assert (architecture.layers, architecture.hidden, architecture.heads, architecture.ffn) == (
        32,
        4096,
        32,
        11008,
    )
    assert (architecture.vocab, architecture.model_type) == (32064, "llama")
    assert float(architecture.parameters) == pytest.approx(6.74e9, rel=0.01)


def test_spellings_of_a_name():
    names = ("meta-llama/Llama-3.1-8B", "Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "llama3-8b")
    assert {named(text).name for text in names} == {"llama-3-8b"}
    assert named("no-such-model") is None


def test_an_unknown_model_gets_a_similar_name():
    with pytest.raises(InputError, match="did you mean llama-3-8b"):
        find_model("llama-3-8bb")


def test_a_folder_with_a_configuration_or_weights(tmp_path):
    others = {"architectures": ["X"], "torch_dtype": "bfloat16", "transformers_version": "5"}
    fields = to_config(named("tinyllama-1.1b"), positions=512) | others
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = find_model(str(tmp_path))
    assert model.architecture.parameters == named("tinyllama-1.1b").parameters
    assert model.section["config"]["model_type"] == "llama"
    assert not others.keys() & model.section["config"].keys()
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_model(str(tmp_path)).section == {"path": str(tmp_path)}


WRONG = """
    {hidden_size: 100, num_attention_heads: 7} -> num_attention_heads is 7 and 100 % 7 = 2
    {model_type: stranger, vocab_size: null} -> vocab_size: is missing, \
        and Transformers has no default for stranger
    {model_type: [llama]} -> model_type
    {tie_word_embeddings: "yes"} -> tie_word_embeddings = 'yes': must be true or false
    {model_type: mixtral, num_local_experts: 4, num_experts_per_tok: 8} \
        -> each token is routed to 8 experts, but a layer has 4
    {model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 0} \
        -> num_experts_per_tok = 0: a layer has 4 experts, but a
    {model_type: gemma3} -> hidden_size = 64: Transformers takes it from text_config, \
        where it is 2304; write it there
    {hidden_size: 2147483647, num_attention_heads: 1, num_hidden_layers: 2147483647} \
        -> the largest supported number
"""


def test_wrong_configurations_are_refused():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}

    def use(text):
        config = {"model_type": "llama", **sizes, **yaml.safe_load(text)}
        from_config({name: value for name, value in config.items() if value is not None})

    check_refusals(WRONG, use)


def test_other_models_and_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="not a decoder-only transformer"):
        from_config({"model_type": "t5", "hidden_size": 64})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        find_model(str(tmp_path / "config.json"))
    with pytest.raises(InputError, match="No such file"):
        find_model(str(tmp_path / "other.json"))


def test_too_many_leading_dense_layers_are_all_layers():
    architecture = from_config({"model_type": "deepseek_v3", **SIZES, "first_k_dense_replace": 5})
    assert (
        architecture.dense_layers == SIZES["num_hidden_layers"] and architecture.expert_layers == 0
    )


def test_stacked_architectures_count_each_their_own():
    pair = [named("llama-3-8b"), named("mixtral-8x7b")]
    expected = [float(model.parameters) for model in pair]
    assert np.allclose(hardware.stack(pair).parameters, expected)
