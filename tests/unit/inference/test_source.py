"""Facts that the source of a model knows before the model is loaded."""

import os
from unittest import mock

import pytest

from plait.errors import InputError
from plait.inference import source
from plait.inference.source import Source, model_of_config, open_source
from tests.unit.inference.cache_models import model_of
from tests.unit.inference.models import saved


def test_a_run_has_the_generation_settings_of_its_model(tmp_path, monkeypatch):
    """They are next to its tokenizer. Without them, its configuration decides."""
    # A run's folder describes its model. Building it is tested elsewhere.
    monkeypatch.setattr(source, "build_described_model", lambda *_, **__: model_of("llama", "meta"))
    checkpoint = mock.Mock(path=tmp_path / "checkpoints" / "step-1")
    run = Source(tmp_path, checkpoint, tmp_path / "tokenizer")
    assert run.model().generation_config.eos_token_id is None

    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": [3, 4], "top_k": 7}')
    settings = run.model().generation_config
    assert settings.eos_token_id == [3, 4] and settings.top_k == 7

    file.write_text("{")
    with pytest.raises(InputError, match="settings of generation_config.json.* cannot be read"):
        run.model()


def test_a_stamp_follows_the_files_of_the_model(tmp_path):
    """Answers that are written into the folder do not change it."""
    folder = tmp_path / "model"
    saved(folder)
    before = open_source(folder).stamp()
    for name in ("answers.jsonl", "answers.jsonl.partial", "answers.jsonl.partial.json"):
        (folder / name).write_text("{}")
    assert open_source(folder).stamp() == before

    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1000))
    assert open_source(folder).stamp() != before


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t5", "t5 has an encoder and a decoder"),
        ("vit", "no causal language model of the type vit"),
    ],
)
def test_other_kinds_of_models_are_refused_briefly(tmp_path, kind, message):
    """Transformers' own message lists all of its classes."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        model_of_config(tmp_path, dtype=None)
    assert len(str(error.value)) < 200
