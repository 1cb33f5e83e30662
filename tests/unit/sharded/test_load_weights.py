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
    """Bytes of a file that are mapped and in memory."""
    total, is_mapping = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_mapping = line.endswith(str(path))
        elif is_mapping and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


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
    """The message also comes from `from_pretrained`, which would then load the folder with Transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    words = r"model.safetensors is not a readable safetensors file \(.*\); download or save"
    with pytest.raises(CheckpointError, match=words):
        load_weights(nn.Linear(1, 1), tmp_path)
    with (
        pytest.warns(UserWarning, match="loads"),
        pytest.raises(CheckpointError, match=r"model.safetensors is not a readable"),
    ):
        plait.from_pretrained(tmp_path)


def small_llama(*, tied=True):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 11}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": tied}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers))


@pytest.mark.parametrize("rows", [1, 4, 1 << 20])
def test_tied_parameters_with_two_values(rows, tmp_path, monkeypatch):
    """Transformers does not tie them. Without the check, both would have the value that was read last."""
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
    words = r"lm_head.weight .*are one parameter .*two values .*\"tie_word_embeddings\": false"
    for build in (
        lambda: load_weights(small_llama(), tmp_path),
        lambda: load_model(open_source(tmp_path)),
    ):
        with pytest.raises(CheckpointError, match=words):
            build()
    with pytest.warns(UserWarning, match="Transformers loads .* two values"):
        loaded = plait.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(loaded.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    load_weights(model := small_llama(tied=False), tmp_path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_tensors_that_the_model_does_not_have(tmp_path):
    """Tensors that Transformers leaves out by a rule are left out: buffers of older releases, and layers that a class does not use.

    Others are refused, in memory and streamed.
    """
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
    words = r"model.safetensors is there; pytorch_model.bin is a pickle, .*: pass a folder written by save"
    with pytest.raises(CheckpointError, match=words):
        module.weight_files(tmp_path)


def test_a_folder_that_two_models_were_saved_to(tmp_path):
    """The models are in one file or several. What Transformers leaves of the first is not read for the second."""
    first, second = small_llama(), small_llama()
    first.save_pretrained(tmp_path / "several", max_shard_size=500)
    second.save_pretrained(tmp_path / "several")
    # This fails once Transformers removes the index itself.
    assert (tmp_path / "several" / module.INDEX_FILE).is_file()
    load_weights(loaded := small_llama(), tmp_path / "several")
    assert torch.equal(loaded.model.embed_tokens.weight, second.model.embed_tokens.weight)
    second.save_pretrained(tmp_path / "one")
    first.save_pretrained(tmp_path / "one", max_shard_size=500)
    words = (
        r"holds two models: model.safetensors, and \d+ files that .* remove model.safetensors, or"
    )
    with pytest.raises(CheckpointError, match=words):
        load_weights(loaded, tmp_path / "one")
    (tmp_path / "one" / module.SINGLE_FILE).unlink()
    load_weights(loaded, tmp_path / "one")
    assert torch.equal(loaded.model.embed_tokens.weight, first.model.embed_tokens.weight)


def test_generation_settings_in_config_json(tmp_path):
    """Older folders have the settings there, without a generation_config.json."""
    transformers = pytest.importorskip("transformers")
    small_llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"repetition_penalty": 1.9, "bad_words_ids": [[3], [4, 5]], "eos_token_id": [7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    settings = expected.generation_config.to_diff_dict()
    assert settings["repetition_penalty"] == 1.9
    for model in (open_source(tmp_path).model(), plait.from_pretrained(tmp_path)):
        assert model.generation_config.to_diff_dict() == settings
    ids = torch.tensor([[1, 2, 6]])
    sharded = load_model(open_source(tmp_path))
    [answer] = generate(sharded, ids.tolist(), max_new_tokens=6, temperature=0)
    sharded.close()
    tokens = expected.generate(ids, max_new_tokens=6, do_sample=False)[0, 3:]
    assert answer.token_ids == tokens.tolist()


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_a_base_model_that_was_saved_alone(tmp_path, kind):
    """GPT-2 and BLOOM on the hub have names without the prefix. Transformers goes by the names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, hidden_size=32, n_layer=2, n_head=2, vocab_size=64)
    saved = AutoModelForCausalLM.from_config(config)
    saved.base_model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith("transformer.") for name in names)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    loaded = load_model(open_source(tmp_path))
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    loaded.close()
    stored, why = tensors_to_stream(open_source(tmp_path), open_source(tmp_path).model())
    layer = "dense_4h_to_h" if kind == "bloom" else "c_fc"
    assert stored[f"transformer.h.1.mlp.{layer}.weight"] and not why


def test_a_base_model_without_its_head(tmp_path):
    """Transformers draws a new head, from which neither an answer nor a resumed run would follow."""
    from transformers import AutoModel

    AutoModel.from_config(small_llama(tied=False).config).save_pretrained(tmp_path)
    words = r"the files lack 1 of its tensors \(lm_head.weight\)"
    with pytest.raises(CheckpointError, match=words):
        load_model(open_source(tmp_path))
