"""Fields of a Transformers configuration are checked before anything is built."""

import tomllib
from importlib import util
from pathlib import Path

import pytest

from plait.errors import InputError
from plait.importing import MissingExtraError
from plait.model.described import OLDEST_TRANSFORMERS, check_fields, described_config

pytest.importorskip("transformers")


def test_written_fields_take_precedence_over_defaults():
    config = described_config(
        {"model_type": "llama", "vocab_size": 7},
        defaults={"vocab_size": 9, "bos_token_id": 3, "no_such_field": 1},
    )
    assert (config.vocab_size, config.bos_token_id) == (7, 3)
    assert not hasattr(config, "no_such_field")


def test_older_names_of_fields_are_accepted():
    check_fields({"model_type": "llama", "rope_theta": 5e5})


def test_without_transformers_the_extra_is_named(monkeypatch):
    find_spec = util.find_spec

    def without_transformers(name):
        return None if name == "transformers" else find_spec(name)

    monkeypatch.setattr("plait.importing.find_spec", without_transformers)
    message = r"model\.config: .*not installed; run pip install '.*\[hf\]'"
    with pytest.raises(MissingExtraError, match=message):
        check_fields({"model_type": "llama"})


def test_an_old_transformers_is_refused_as_declared(monkeypatch):
    check_fields({"model_type": "llama"})
    monkeypatch.setattr("plait.model.described.version", lambda name: "5.1.0")
    message = rf"5.1.0 is installed.*run pip install 'transformers>={OLDEST_TRANSFORMERS}'"
    with pytest.raises(InputError, match=message):
        check_fields({"model_type": "llama"})

    file = Path(__file__).parents[3] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    assert f"transformers>={OLDEST_TRANSFORMERS},<6" in project["optional-dependencies"]["hf"]
