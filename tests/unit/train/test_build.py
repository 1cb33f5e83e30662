"""Models from their section: on meta, fit for the tokenizer; everything Transformers would swallow silently is refused."""

import json

import pytest
import torch

from plait.config.schema.sections import ModelSection
from plait.errors import ConfigError, InputError
from plait.train.language_model import build_model

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


def _section(kind="llama", **changes):
    return ModelSection(config={"model_type": kind, **SMALL, **changes})


def test_a_model_has_shapes_and_no_memory(tokenizer):
    built = build_model(_section(), tokenizer, positions=64)
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}
    assert built.weights is None
    assert built.model.training
    assert built.identity["model.hidden_size"] == 32


def test_the_vocabulary_and_the_end_mark_follow_the_tokenizer(tokenizer):
    config = build_model(_section(), tokenizer, positions=64).model.config
    assert config.vocab_size == 300
    assert config.eos_token_id == tokenizer.eos_token_id == 0


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_dtype_is_the_parameters(tokenizer, name):
    section = _section().model_copy(update={"dtype": name})
    model = build_model(section, tokenizer, positions=64).model
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, name)}


def test_older_names_of_an_architecture_are_known(tokenizer):
    fields = {"hidden_size": 32, "n_layer": 2, "num_attention_heads": 2, "n_positions": 64}
    section = ModelSection(config={"model_type": "gpt2", **fields})
    config = build_model(section, tokenizer, positions=64).model.config
    assert (config.n_embd, config.n_head, config.n_positions) == (32, 2, 64)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (_section(hiden_act="gelu"), r"model\.config\.hiden_act = 'gelu': a 'llama' configuration has no such field; use 'hidden_act'"),
        (_section(num_layers=3, rope=1), r"(?s)model\.config\.num_layers.*model\.config\.rope"),
        (_section("lama"), r"model\.config\.model_type = 'lama'.*use 'llama'"),
        (_section(dtype="bfloat16"), r"set model\.dtype"),
        (_section(hidden_size=33), r"33.*not a multiple"),
        (_section(hidden_size="wide"), r"hidden_size|int"),
        (_section(vocab_size=299), r"model vocab_size = 299: the tokenizer has 300 tokens and the model's embedding 299 rows"),
        (_section(max_position_embeddings=63), r"has 63 positions and the run needs 64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tokenizer, section, words):
    with pytest.raises(ConfigError, match=words):
        build_model(section, tokenizer, positions=64)


def test_an_architecture_without_a_language_model_is_refused(tokenizer):
    section = ModelSection(config={"model_type": "vit"})
    with pytest.raises(InputError, match="not a causal language model"):
        build_model(section, tokenizer, positions=64)


BERT = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        BERT,
        {"model_type": "xlm", "emb_dim": 32, "n_layers": 1, "n_heads": 2},
        {"model_type": "gemma", "hidden_size": 32, "head_dim": 16, "num_hidden_layers": 1, "use_bidirectional_attention": True},
    ],
)  # fmt: skip
def test_a_bidirectional_model_is_refused(tokenizer, fields):
    words = "lets tokens attend to the later tokens.*plait.hf.Trainer"
    with pytest.raises(ConfigError, match=words):
        build_model(ModelSection(config=fields), tokenizer, positions=64)


def test_causal_models_are_built(tokenizer):
    """One is the remedy of the refusal, the other a type whose `is_decoder` says nothing."""
    neox = {"model_type": "gpt_neox_japanese", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
    for fields in ({**BERT, "is_decoder": True}, neox):
        built = build_model(ModelSection(config=fields), tokenizer, positions=64)
        assert built.kind == fields["model_type"]


def test_weights_come_with_their_configuration(tokenizer, tmp_path):
    saved = build_model(_section(), tokenizer, positions=64).model.to_empty(device="cpu")
    saved.save_pretrained(tmp_path / "saved")
    built = build_model(ModelSection(path=str(tmp_path / "saved")), tokenizer, positions=64)
    assert built.weights == tmp_path / "saved"
    assert built.model.config.hidden_size == 32
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}


@pytest.mark.parametrize("method", ["bitnet", "fp8", "gptq"])
def test_quantised_weights_are_refused(tokenizer, tmp_path, method):
    """Transformers would build plain layers of such a configuration."""
    saved = build_model(_section(), tokenizer, positions=64).model.to_empty(device="cpu")
    saved.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"model.path: .* are quantised \({method}\)"):
        build_model(ModelSection(path=str(tmp_path)), tokenizer, positions=64)


def test_a_folder_without_weights_is_refused(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"needs config\.json and \*\.safetensors"):
        build_model(ModelSection(path=str(tmp_path)), tokenizer, positions=64)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"config\.json is not a Transformers configuration"):
        build_model(ModelSection(path=str(tmp_path)), tokenizer, positions=64)
    with pytest.raises(InputError, match="there is no such folder"):
        build_model(ModelSection(path=str(tmp_path / "missing")), tokenizer, positions=64)
