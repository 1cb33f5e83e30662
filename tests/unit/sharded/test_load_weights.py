"""Folders of Transformers: which files are read, without staying in memory beside what they hold, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import plait
from plait.errors import CheckpointError
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.inference.streamed_model import tensors_to_stream
from plait.sharded import load_weights as module
from plait.sharded.load_weights import load_weights


def mapped_bytes(path):
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ", 1)[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_a_file_is_mapped_in_parts(tmp_path, monkeypatch):
    tensor = 4 << 20
    source = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
    path = tmp_path / "model.safetensors"
    save_file(source.state_dict(), path)
    model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
    monkeypatch.setattr(module, "_MAPPED_BYTES", 2 * tensor)
    seen = []
    load_weights(model, tmp_path, filled=lambda _: seen.append(mapped_bytes(path)))
    assert len(seen) == 8 and tensor // 2 < max(seen) < 3 * tensor, seen
    assert all(torch.equal(model[at].weight, source[at].weight) for at in range(8))
    monkeypatch.setattr(module, "_MAPPED_BYTES", 1 << 40)
    seen.clear()
    load_weights(model, tmp_path, filled=lambda _: seen.append(mapped_bytes(path)))
    assert max(seen) > 6 * tensor  # what the first part of this test is about


def test_a_broken_file_is_named(tmp_path):
    """Also by what would go on to load the folder with Transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11)
    ).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError,
        match=r"model.safetensors is not a readable safetensors file \(.*\); download or save",
    ):
        load_weights(nn.Linear(1, 1), tmp_path)
    with (
        pytest.warns(UserWarning, match="loads"),
        pytest.raises(CheckpointError, match=r"model.safetensors is not a readable"),
    ):
        plait.from_pretrained(tmp_path)


def small_llama(*, tied=True):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, tie_word_embeddings=tied)
    )


@pytest.mark.parametrize("rows", [1, 4, 1 << 20])
def test_tied_parameters_with_two_values(rows, tmp_path, monkeypatch):
    """Transformers does not tie them; the one that was read last would be both."""
    monkeypatch.setattr(module, "_COMPARED_ELEMENTS", 8 * rows)
    small_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    model = small_llama()
    load_weights(model, tmp_path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    tensors["lm_head.weight"][10, 7] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    for build in (
        lambda: load_weights(small_llama(), tmp_path),
        lambda: load_model(open_source(tmp_path)),
    ):
        with pytest.raises(
            CheckpointError,
            match=r"lm_head.weight .*are one parameter .*two values .*\"tie_word_embeddings\": false",
        ):
            build()
    with pytest.warns(UserWarning, match="Transformers loads .* two values"):
        whole = plait.from_pretrained(tmp_path)
    assert torch.equal(whole.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(whole.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    load_weights(model := small_llama(tied=False), tmp_path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_tensors_that_the_model_does_not_have(tmp_path):
    """Those that Transformers leaves out by a rule are left out: buffers that older releases stored, and layers that a class does not use.
    Others are refused, in memory and streamed."""
    small_llama(tied=False).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1),
        "model.mtp.weight": torch.ones(2),
    }
    save_file(stored | old, path, metadata={"format": "pt"})
    model = small_llama(tied=False)
    model._keys_to_ignore_on_load_unexpected = {r"^model\.mtp\."}
    load_weights(model, tmp_path)
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    words = r"is not of this model: the files hold tensors that it does not have \(1: model.mtp.weight\); check"
    source = open_source(tmp_path)
    for load in (
        lambda: load_weights(small_llama(tied=False), tmp_path),
        lambda: tensors_to_stream(source, source.model()),
    ):
        with pytest.raises(CheckpointError, match=words):
            load()


def test_a_folder_of_pickles(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError,
        match=r"model.safetensors is there; pytorch_model.bin is a pickle, .*: pass a folder written by save",
    ):
        module.weight_files(tmp_path)


def test_a_folder_that_two_models_were_saved_to(tmp_path):
    """In one file, and in several: what Transformers leaves of the first is not read for the second."""
    first, second = small_llama(), small_llama()
    first.save_pretrained(tmp_path / "several", max_shard_size=500)
    second.save_pretrained(tmp_path / "several")
    assert (tmp_path / "several" / module.INDEX_FILE).is_file(), (
        "Transformers removes the index now"
    )
    load_weights(loaded := small_llama(), tmp_path / "several")
    assert torch.equal(loaded.model.embed_tokens.weight, second.model.embed_tokens.weight)
    second.save_pretrained(tmp_path / "one")
    first.save_pretrained(tmp_path / "one", max_shard_size=500)
    with pytest.raises(
        CheckpointError,
        match=r"holds two models: model.safetensors, and \d+ files that .* remove model.safetensors, or",
    ):
        load_weights(loaded, tmp_path / "one")
    (tmp_path / "one" / module.SINGLE_FILE).unlink()
    load_weights(loaded, tmp_path / "one")
    assert torch.equal(loaded.model.embed_tokens.weight, first.model.embed_tokens.weight)


def test_generation_settings_in_config_json(tmp_path):
    """As older folders have them, without a generation_config.json."""
    transformers = pytest.importorskip("transformers")
    small_llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(
            config
            | {"repetition_penalty": 1.9, "bad_words_ids": [[3], [4, 5]], "eos_token_id": [7]}
        )
    )
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = expected.generation_config.to_diff_dict()
    assert settings["repetition_penalty"] == 1.9
    for model in (open_source(tmp_path).model(), plait.from_pretrained(tmp_path)):
        assert model.generation_config.to_diff_dict() == settings
    ids = torch.tensor([[1, 2, 6]])
    sharded = load_model(open_source(tmp_path))
    found = generate(sharded, ids.tolist(), max_new_tokens=6, temperature=0)
    sharded.close()
    assert (
        found[0].token_ids
        == expected.generate(ids, max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    )


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_a_base_model_that_was_saved_alone(tmp_path, kind):
    """The hub's GPT-2 and BLOOM have names without the prefix; Transformers goes by the names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, hidden_size=32, n_layer=2, n_head=2, vocab_size=64)
    saved = AutoModelForCausalLM.from_config(config)
    saved.base_model.save_pretrained(tmp_path)
    assert not any(
        name.startswith("transformer.") for name in load_file(tmp_path / "model.safetensors")
    )
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    loaded = load_model(open_source(tmp_path))
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in loaded.model.state_dict().items()
    )
    loaded.close()
    stored, why = tensors_to_stream(open_source(tmp_path), open_source(tmp_path).model())
    assert (
        stored[
            "transformer.h.1.mlp.dense_4h_to_h.weight"
            if kind == "bloom"
            else "transformer.h.1.mlp.c_fc.weight"
        ]
        and not why
    )


def test_a_base_model_without_its_head(tmp_path):
    """Transformers draws a new head, from which neither an answer nor a resumed run would follow."""
    from transformers import AutoConfig, AutoModel

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    AutoModel.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"the files lack 1 of its tensors \(lm_head.weight\)"
    ):
        load_model(open_source(tmp_path))
