import json
from dataclasses import replace

import numpy as np
import pytest

from plait.errors import ConfigError, InputError
from plait.planner import hardware, models
from plait.planner.built import COUNTED_BY_FORMULA
from plait.planner.models import find_model, from_config, named, to_config


@pytest.mark.parametrize(
    ("name", "billions"),
    # what the papers and model cards print
    [
        ("gpt3-175b", 174.6), ("llama-3-8b", 8.0303), ("llama-3-70b", 70.554), ("llama-3-405b", 405.85), ("llama-2-7b", 6.738),
        ("mixtral-8x7b", 46.70), ("qwen2.5-72b", 72.7), ("megatron-1t", 1008), ("deepseek-v3", 671),
    ],
)  # fmt: skip
def test_published_parameter_counts(name, billions):
    found = named(name)
    assert float(found.parameters) / 1e9 == pytest.approx(billions, rel=0.002)


def test_active_parameters_of_experts():
    # Published figures count the embedding.
    active = float(named("mixtral-8x7b").active_matrix_parameters) + 32000 * 4096
    assert active / 1e9 == pytest.approx(12.88, rel=0.003)


def test_flops_of_a_token_use_half_the_attention():
    found = named("llama-3-8b")  # 45.0 + 6.4 GFLOP at 8k tokens
    assert float(found.model_flops(8192)) == pytest.approx(51.5e9, rel=0.01)


def on_meta(config):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )


def parameter_count(config):
    return sum(p.numel() for p in on_meta(config).parameters())


@pytest.mark.parametrize(
    "name", ["gpt2", "tinyllama-1.1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "mixtral-8x7b"]
)
def test_counts_are_those_of_transformers(name):
    found = replace(named(name), layers=2)
    positions = 1024 if name == "gpt2" else 0
    config = to_config(found, positions=128)
    assert parameter_count(config) == replace(found, positions=positions).parameters


LATENT = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8,
    "num_hidden_layers": 2, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"first_k_dense_replace": 1}])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_has_the_parameters_of_transformers(kind, changes):
    """Without q_lora_rank queries are not compressed. If it is left out, Transformers' default applies."""
    config = {"model_type": kind, **LATENT, **changes}
    assert parameter_count(config) == from_config(config).parameters


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}])
def test_flops_of_latent_attention_are_those_that_torch_counts(changes):
    """Scores are computed from keys and outputs from values, which are narrower. torch counts the full square, model FLOPs half of it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config, tokens = {"model_type": "deepseek_v3", **LATENT, **changes}, 96
    library_config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(library_config)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    found = from_config(config)
    products = 6 * found.active_matrix_parameters
    attention = found.model_flops(tokens) - products
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.aten.bmm] == tokens * 2 * attention
    assert counts[torch.ops.aten.mm] == pytest.approx(tokens * float(products), rel=0.01)


SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 1000}
"""All sizes that are written. The others are Transformers' defaults for the family."""
OTHER_SIZES = {
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "nemotron": {"num_key_value_heads": 2},
    "glm4_moe": {"head_dim": 32},
    "helium": {"head_dim": 32},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(models._GATED | models._TWO_MATRICES))
def test_sizes_that_are_left_out_are_those_that_training_takes(kind):
    config = {"model_type": kind, **SIZES, "pad_token_id": 0, **OTHER_SIZES.get(kind, {})}
    found = from_config(config)
    # By formula to 1 %, and exactly where they are counted of the model itself.
    error = 0.01 if kind in COUNTED_BY_FORMULA else 0.0
    assert float(found.parameters) == pytest.approx(parameter_count(config), rel=error)
    assert models.unknown_layers(found) is None


@pytest.mark.parametrize("name", models.names())
def test_a_table_entry_and_its_configuration_are_the_same_model(name):
    found = named(name)
    if name in ("gpt-oss-120b", "bloom-176b"):
        pytest.skip("written for another family than its own")
    again = from_config(to_config(found, positions=found.positions or 2048))
    for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated", "tied", "experts", "active", "attention_parameters"):  # fmt: skip
        assert getattr(again, field) == getattr(found, field), field
    if not found.positions:
        assert again.parameters == found.parameters


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
    """LLaVA 1.5's file states of the language model only what differs from Llama's."""
    pytest.importorskip("transformers")
    inner = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064}  # fmt: skip
    found = from_config({"model_type": "llava", name: inner, "image_token_index": 32000})
    assert (found.layers, found.hidden, found.heads, found.ffn) == (32, 4096, 32, 11008)
    assert (found.vocab, found.model_type) == (32064, "llama")
    assert float(found.parameters) == pytest.approx(6.74e9, rel=0.01)


def test_names_are_read_as_people_write_them():
    names = ("meta-llama/Llama-3.1-8B", "Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "llama3-8b")
    assert {named(text).name for text in names} == {"llama-3-8b"}
    assert named("no-such-model") is None


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(InputError, match="did you mean llama-3-8b"):
        find_model("llama-3-8bb")


def test_a_folder_and_a_file(tmp_path):
    others = {"architectures": ["X"], "torch_dtype": "bfloat16", "transformers_version": "5"}
    fields = to_config(named("tinyllama-1.1b"), positions=512) | others
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = find_model(str(tmp_path))
    assert model.architecture.parameters == named("tinyllama-1.1b").parameters
    assert model.section["config"]["model_type"] == "llama"
    assert not others.keys() & model.section["config"].keys()
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_model(str(tmp_path)).section == {"path": str(tmp_path)}


WRONG = [
    ({"hidden_size": 100, "num_attention_heads": 7}, "num_attention_heads is 7 and 100 % 7 = 2"),
    ({"model_type": "stranger", "vocab_size": None}, "vocab_size: is missing, and Transformers has no default for stranger"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes': must be true or false"),
    ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 8}, "each token is routed to 8 experts, but a layer has 4"),
    ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 0}, "num_experts_per_tok = 0: a layer has 4 experts, but a"),
    ({"model_type": "gemma3"}, "hidden_size = 64: Transformers takes it from text_config, where it is 2304; write it there"),
    ({"hidden_size": 2**31 - 1, "num_attention_heads": 1, "num_hidden_layers": 2**31 - 1}, "the largest supported number"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_wrong_configurations_say_what_is_wrong(changes, words):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = {"model_type": "llama", **sizes, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        from_config(config)


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(InputError, match="not a decoder-only transformer"):
        from_config({"model_type": "t5", "hidden_size": 64})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        find_model(str(tmp_path / "config.json"))
    with pytest.raises(InputError, match="No such file"):
        find_model(str(tmp_path / "other.json"))


def test_too_many_leading_dense_layers_are_all_layers():
    found = from_config({"model_type": "deepseek_v3", **SIZES, "first_k_dense_replace": 5})
    assert found.dense_layers == SIZES["num_hidden_layers"] and found.expert_layers == 0


def test_stacked_architectures_count_each_their_own():
    pair = [named("llama-3-8b"), named("mixtral-8x7b")]
    expected = [float(model.parameters) for model in pair]
    assert np.allclose(hardware.stack(pair).parameters, expected)
