"""What a source says of a model before it is loaded."""

import os
from unittest import mock

import pytest

from plait.errors import InputError
from plait.inference import source
from plait.inference.source import Source, model_of_config, open_source
from tests.unit.inference.kept_models import model_of
from tests.unit.inference.models import saved


def test_a_run_has_the_settings_of_the_model_that_it_began_with(tmp_path, monkeypatch):
    """Beside its tokenizer. Without them they are those that its configuration has."""
    monkeypatch.setattr(source, "build_described_model", lambda *_, **__: model_of("llama", "meta"))
    run = Source(
        tmp_path, mock.Mock(path=tmp_path / "checkpoints" / "step-1"), tmp_path / "tokenizer"
    )
    assert run.model().generation_config.eos_token_id is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "top_k": 7}')
    assert (found := run.model().generation_config).eos_token_id == [3, 4] and found.top_k == 7
    (tmp_path / "generation_config.json").write_text("{")
    words = "generation settings of generation_config.json.* cannot be read"
    with pytest.raises(InputError, match=words):
        run.model()


def test_a_stamp_follows_the_files(tmp_path):
    """Of the model, and not of what else is written into its folder."""
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
    ("kind", "said"),
    [
        ("t5", "t5 has an encoder and a decoder"),
        ("vit", "no causal language model of the type vit"),
    ],
)
def test_a_model_of_another_kind(tmp_path, kind, said):
    """In a sentence, and not with the names of all classes of Transformers."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=said) as raised:
        model_of_config(tmp_path, dtype=None)
    assert len(str(raised.value)) < 200
