"""Transformers' names and precedence, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from plait.errors import InputError
from plait.inference.settings import NAMES, NEW_TOKENS, Settings, settings_of


class Model(nn.Module):
    def __init__(self, **generation_config: Any) -> None:
        super().__init__()
        self.generation_config = generation_config


def test_the_call_comes_first_then_the_argument_then_the_model() -> None:
    model = Model(temperature=0.7, top_k=9, do_sample=True, max_new_tokens=5, eos_token_id=[1, 2])
    assert settings_of(model, {}) == Settings(5, temperature=0.7, top_k=9, do_sample=True, eos_token_id=(1, 2), pad_token_id=1)
    found = settings_of(model, {"top_k": 3}, {"top_k": 4, "temperature": 0.2})
    assert (found.top_k, found.temperature, found.max_new_tokens) == (3, 0.2, 5)
    assert settings_of(model, {}, pad=8).pad_token_id == 8


def test_a_length_replaces_a_number_of_tokens_that_came_before_it() -> None:
    model = Model(max_new_tokens=5)
    assert settings_of(model, {"max_length": 12}).new_tokens(prompt=4) == 8
    assert settings_of(model, {}, {"max_length": 12}).new_tokens(prompt=4) == 8
    assert settings_of(model, {"max_length": 12, "max_new_tokens": 3}).new_tokens(prompt=4) == 3
    assert settings_of(Model(), {}).new_tokens(prompt=4) == NEW_TOKENS


def test_when_tokens_are_drawn() -> None:
    assert not settings_of(Model(), {}).do_sample
    assert settings_of(Model(), {"top_p": 0.9}).do_sample
    assert not settings_of(Model(), {"top_p": 0.9, "do_sample": False}).do_sample
    assert not settings_of(Model(do_sample=True, temperature=0.5), {"temperature": 0}).do_sample
    assert not settings_of(Model(temperature=0.5), {}).do_sample  # as in Transformers: the model's file has to say do_sample


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temprature": 1}, "no setting `temprature`; it has max_new_tokens"),
        ({"temperature": -1.0}, "temperature = -1.0 must be 0"),
        ({"top_p": 1.5}, "top_p = 1.5 must be above 0, at most 1"),
        ({"top_k": -3}, "top_k = -3 must be 0"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
        ({"max_new_tokens": "5"}, "max_new_tokens = '5' must be a whole number"),
        ({"temperature": True}, "temperature = True must be a number"),
        ({"do_sample": 1}, "do_sample = 1 must be True or False"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id: '</s>' is no token id"),
        ({"stop_strings": ""}, "stop_strings: '' is no text"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0 must be above 0"),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        settings_of(Model(), arguments)


def test_what_would_change_tokens_and_is_not_supported() -> None:
    with pytest.raises(InputError, match="the model's generation_config: num_beams = 4 is not supported"):
        settings_of(Model(num_beams=4), {})
    with pytest.raises(InputError, match="generation_config: guidance_scale = 2.0"):
        settings_of(Model(), {}, {"guidance_scale": 2.0})
    settings_of(Model(num_beams=1, early_stopping=True, forced_eos_token_id=None, use_mtp=False), {})


def test_all_of_transformers_defaults_are_known() -> None:
    """A setting that Transformers gives a model by itself is not refused."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig()
    values = {**config.to_dict(), **config._get_default_generation_params()}
    settings_of(Model(**values), {})
    assert {"temperature", "top_k", "eos_token_id"} <= set(NAMES)
