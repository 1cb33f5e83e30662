"""Fields of a Transformers configuration as a user writes them: what is wrong is said before anything is built."""

import tomllib
from importlib import util
from pathlib import Path

import pytest

from plait.errors import ConfigError, InputError
from plait.importing import MissingExtraError
from plait.model.described import OLDEST_TRANSFORMERS, check_fields, described_config

pytest.importorskip("transformers")


def test_written_fields_win_over_those_that_follow():
    config = described_config(
        {"model_type": "llama", "vocab_size": 7},
        defaults={"vocab_size": 9, "bos_token_id": 3, "no_such_field": 1},
    )
    assert (config.vocab_size, config.bos_token_id) == (7, 3)
    assert not hasattr(config, "no_such_field")


def test_every_problem_is_named():
    with pytest.raises(ConfigError) as caught:
        check_fields({"model_type": "llama", "hiden_size": 4, "dtype": "bfloat16"})
    first, second = caught.value.problems
    assert (first.field, first.remedy) == ("model.config.hiden_size", "use 'hidden_size'")
    assert (second.field, second.remedy) == ("model.config.dtype", "set model.dtype")


def test_older_names_are_read():
    check_fields({"model_type": "llama", "rope_theta": 5e5})


def test_without_transformers_the_extra_is_named(monkeypatch):
    found = util.find_spec
    monkeypatch.setattr(
        "plait.importing.find_spec", lambda name: None if name == "transformers" else found(name)
    )
    words = r"model\.config: .*not installed; run pip install '.*\[hf\]'"
    with pytest.raises(MissingExtraError, match=words):
        check_fields({"model_type": "llama"})


def test_a_transformers_that_is_too_old_is_refused(monkeypatch):
    check_fields({"model_type": "llama"})
    monkeypatch.setattr("plait.model.described.version", lambda name: "5.1.0")
    words = (
        rf"Transformers 5.1.0 is installed.*run pip install 'transformers>={OLDEST_TRANSFORMERS}'"
    )
    with pytest.raises(InputError, match=words):
        check_fields({"model_type": "llama"})


def test_the_declared_bound_is_the_one_that_is_checked():
    project = tomllib.loads(
        (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    declared = project["optional-dependencies"]["hf"]
    assert f"transformers>={OLDEST_TRANSFORMERS},<6" in declared
