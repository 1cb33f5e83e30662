"""Generation settings have Transformers' names and precedence; unsupported values are refused."""

import pytest
from torch import nn

from plait.errors import InputError
from plait.inference.generation_settings import NAMES, NEW_TOKENS, GenerationSettings, settings_of


class Model(nn.Module):
    """A model with 50 tokens and the given generation settings."""

    def __init__(self, **generation_config):
        super().__init__()
        self.generation_config = generation_config

    def get_input_embeddings(self):
        return nn.Embedding(50, 2)


def test_arguments_precede_generation_config_and_the_model():
    model = Model(temperature=0.7, top_k=9, do_sample=True, max_new_tokens=5, eos_token_id=[1, 2])
    tokens = {"eos_token_id": (1, 2), "pad_token_id": 1}
    expected = GenerationSettings(5, temperature=0.7, top_k=9, do_sample=True, **tokens)
    assert settings_of(model, {}) == expected
    settings = settings_of(model, {"top_k": 3}, {"top_k": 4, "temperature": 0.2})
    assert (settings.top_k, settings.temperature, settings.max_new_tokens) == (3, 0.2, 5)
    assert settings_of(model, {}, pad=8).pad_token_id == 8


def test_max_length_replaces_a_number_of_less_precedence():
    model = Model(max_new_tokens=5)
    assert settings_of(model, {"max_length": 12}).new_tokens(prompt=4) == 8
    assert settings_of(model, {}, {"max_length": 12}).new_tokens(prompt=4) == 8
    assert settings_of(model, {"max_length": 12, "max_new_tokens": 3}).new_tokens(prompt=4) == 3
    assert settings_of(Model(), {}).new_tokens(prompt=4) == NEW_TOKENS


def test_when_tokens_are_sampled():
    assert not settings_of(Model(), {}).do_sample
    assert settings_of(Model(), {"top_p": 0.9}).do_sample
    assert not settings_of(Model(), {"top_p": 0.9, "do_sample": False}).do_sample
    assert not settings_of(Model(do_sample=True, temperature=0.5), {"temperature": 0}).do_sample
    # As in Transformers, the model's file has to contain do_sample.
    assert not settings_of(Model(temperature=0.5), {}).do_sample


def test_values_out_of_range_are_refused():
    for name, value, message in (
        ("temprature", 1, "no setting `temprature`; it has max_new_tokens"),
        ("temperature", -1.0, "temperature = -1.0 must be 0"),
        ("temperature", True, "temperature = True must be a number"),
        ("temperature", 1e-300, "temperature = 1e-300 must be 0 .greedy., or at least 1e-30"),
        ("temperature", float("inf"), "temperature = inf must be a number"),
        ("top_p", 1.5, "top_p = 1.5 must be above 0, at most 1"),
        ("top_k", -3, "top_k = -3 must be 0"),
        ("max_new_tokens", 0, "max_new_tokens = 0 must be at least 1"),
        ("max_new_tokens", "5", "max_new_tokens = '5' must be a whole number"),
        ("min_length", -1, "min_length = -1 must be 0 or more"),
        ("do_sample", 1, "do_sample = 1 must be True or False"),
        ("eos_token_id", ["</s>"], "eos_token_id: '</s>' is not a token id"),
        ("eos_token_id", True, "eos_token_id: True is not a token id"),
        ("stop_strings", "", "stop_strings: '' must be a string that is not empty"),
        ("repetition_penalty", 0, "repetition_penalty = 0 must be from 1e-30 to 1e[+]30"),
        ("encoder_repetition_penalty", -1, "encoder_repetition_penalty = -1 must be from 1e-30"),
        ("suppress_tokens", ["a"], "suppress_tokens: 'a' is not a token id"),
        ("suppress_tokens", [3, 50], "suppress_tokens has token 50, but .* tokens are 0 to 49"),
        ("suppress_tokens", -1, "suppress_tokens has token -1"),
        ("begin_suppress_tokens", [-1], "begin_suppress_tokens has token -1"),
        ("bad_words_ids", [[3], [50]], "bad_words_ids has token 50"),
        ("bad_words_ids", [[3], []], r"bad_words_ids: \[\] is not a list of .*; pass one list"),
        ("bad_words_ids", [["a"]], r"bad_words_ids: \['a'\] is not a list"),
        ("pad_token_id", -1, "pad_token_id has token -1, but the model's tokens are 0 to 49"),
        ("pad_token_id", 50, "pad_token_id has token 50"),
    ):
        with pytest.raises(InputError, match=message):
            settings_of(Model(), {name: value})


def test_padding_is_a_token_of_the_model():
    """The padding token of a file or tokenizer need not be one, because the mask leaves it out."""
    assert settings_of(Model(pad_token_id=-1, eos_token_id=[-1, 7]), {}, pad=50).pad_token_id == 7
    # Token 0 is a token.
    assert settings_of(Model(pad_token_id=-1), {}, pad=0).pad_token_id == 0
    assert settings_of(Model(), {}).pad_token_id == 0
    assert settings_of(Model(pad_token_id=0, eos_token_id=0), {}, pad=8).pad_token_id == 0
    assert settings_of(Model(eos_token_id=0), {}).eos_token_id == (0,)


def test_a_single_token_stands_for_a_list():
    arguments = {"begin_suppress_tokens": 0, "bad_words_ids": [[0], [1, 2]]}
    settings = settings_of(Model(suppress_tokens=0), arguments)
    assert settings.suppress_tokens == settings.begin_suppress_tokens == (0,)
    assert settings.bad_words_ids == ((0,), (1, 2))


def test_min_new_tokens_replaces_min_length():
    """Transformers does so too, whatever their precedence."""
    assert settings_of(Model(min_length=9), {}).min_length == 9
    assert settings_of(Model(min_new_tokens=2), {"min_length": 9}).min_length == 0


def test_unsupported_settings_are_refused_unless_neutral():
    with pytest.raises(InputError, match="generation_config: guidance_scale = 2.0"):
        settings_of(Model(), {}, {"guidance_scale": 2.0})
    for name in ("forced_eos_token_id", "forced_bos_token_id", "max_time"):
        with pytest.raises(InputError, match=f"{name} = 0 is not supported"):
            settings_of(Model(**{name: 0}), {})

    beams = Model(num_beams=4, num_return_sequences=2)
    neutral = {"num_beams": 1, "num_return_sequences": 1}
    assert settings_of(beams, neutral) == settings_of(Model(), {})
    without_effect = {"early_stopping": True, "forced_eos_token_id": None, "use_mtp": False}
    settings_of(Model(num_beams=1, **without_effect), {})


def test_defaults_of_transformers_are_not_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig()
    defaults = config.to_dict() | config._get_default_generation_params()
    settings_of(Model(**defaults), {})
    assert {"temperature", "top_k", "eos_token_id"} <= set(NAMES)
