"""Models are built from their section on meta, and fit the tokenizer.

Fields that Transformers would ignore are refused.
"""

import json

import pytest
import torch

from plait.config.schema.sections import ModelSection
from plait.errors import ConfigError, InputError
from plait.train.language_model import build_model

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
BERT = {**SIZES, "model_type": "bert"}


def section_of(kind="llama", **changes):
    return ModelSection(config={"model_type": kind, **SMALL, **changes})


def save_model(tokenizer, folder):
    model = build_model(section_of(), tokenizer, positions=64).model
    model.to_empty(device="cpu").save_pretrained(folder)


def test_a_model_has_the_vocabulary_of_the_tokenizer(tokenizer):
    built = build_model(section_of(), tokenizer, positions=64)
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}
    assert built.weights is None and built.model.training
    assert built.identity["model.hidden_size"] == 32
    assert built.model.config.vocab_size == 300
    assert built.model.config.eos_token_id == tokenizer.eos_token_id == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_the_dtype_of_the_section(tokenizer, dtype):
    section = section_of().model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    model = build_model(section, tokenizer, positions=64).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_older_names_of_fields_are_accepted(tokenizer):
    fields = {"hidden_size": 32, "n_layer": 2, "num_attention_heads": 2, "n_positions": 64}
    section = ModelSection(config={"model_type": "gpt2", **fields})
    config = build_model(section, tokenizer, positions=64).model.config
    assert (config.n_embd, config.n_head, config.n_positions) == (32, 2, 64)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (section_of(num_layers=3, rope=1), r"(?s)model\.config\.num_layers.*model\.config\.rope"),
        (section_of(dtype="bfloat16"), r"set model\.dtype"),
        (section_of(hidden_size=33), r"33.*not a multiple"),
        (section_of(hidden_size="wide"), r"hidden_size|int"),
        (
            section_of(vocab_size=299),
            r"vocab_size = 299: the tokenizer has 300 tokens .* 299 rows; use 300 or more,",
        ),
        (section_of(max_position_embeddings=63), r"has 63 positions and the run needs 64"),
    ],
)
def test_fields_that_do_not_fit_are_refused(tokenizer, section, message):
    with pytest.raises(ConfigError, match=message):
        build_model(section, tokenizer, positions=64)


def test_an_architecture_without_a_language_model_is_refused(tokenizer):
    section = ModelSection(config={"model_type": "vit"})
    with pytest.raises(InputError, match="not a causal language model"):
        build_model(section, tokenizer, positions=64)


@pytest.mark.parametrize(
    "fields",
    [
        BERT,
        {"model_type": "xlm", "emb_dim": 32, "n_layers": 1, "n_heads": 2},
        {**SMALL, "model_type": "gemma", "head_dim": 16, "use_bidirectional_attention": True},
    ],
)
def test_a_bidirectional_model_is_refused(tokenizer, fields):
    message = "lets tokens attend to the later tokens.*plait.hf.Trainer"
    with pytest.raises(ConfigError, match=message):
        build_model(ModelSection(config=fields), tokenizer, positions=64)


@pytest.mark.parametrize(
    "fields", [{**BERT, "is_decoder": True}, {**SIZES, "model_type": "gpt_neox_japanese"}]
)
def test_causal_models_are_built(tokenizer, fields):
    """The first is the remedy of the refusal. `is_decoder` means nothing for the second."""
    built = build_model(ModelSection(config=fields), tokenizer, positions=64)
    assert built.kind == fields["model_type"]


def test_weights_come_with_their_configuration(tokenizer, tmp_path):
    save_model(tokenizer, tmp_path / "saved")
    built = build_model(ModelSection(path=str(tmp_path / "saved")), tokenizer, positions=64)
    assert built.weights == tmp_path / "saved"
    assert built.model.config.hidden_size == 32
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}


@pytest.mark.parametrize("method", ["bitnet", "fp8", "gptq"])
def test_quantised_weights_are_refused(tokenizer, tmp_path, method):
    """Transformers would build plain layers of such a configuration."""
    save_model(tokenizer, tmp_path)
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
