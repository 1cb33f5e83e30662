"""Weights in folders of Transformers: files that are read, their memory, and refused folders."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import plait
from plait.errors import CheckpointError
from plait.inference.deployment import load_model
from plait.inference.generate import generate
from plait.inference.source import open_source
from plait.inference.streamed_model import tensors_to_stream
from plait.sharded import load_weights as load_weights_module
from plait.sharded.load_weights import load_weights


def small_llama(*, tied=True):
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        vocab_size=11,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def save_tensors(tensors, path):
    save_file(tensors, path, metadata={"format": "pt"})


def mapped_bytes(path):
    """Return the bytes of a file that are mapped and in memory."""
    total = 0
    is_mapping = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_mapping = line.endswith(str(path))
        elif is_mapping and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_file_is_mapped_in_parts(tmp_path, monkeypatch):
    def layers():
        return nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))

    tensor_bytes = 4 << 20
    saved = layers()
    path = tmp_path / "model.safetensors"
    save_file(saved.state_dict(), path)

    def load(limit_bytes):
        """Return the model, and the mapped bytes after each tensor."""
        # The limit in use is larger than this file.
        monkeypatch.setattr(load_weights_module, "_MAPPED_BYTES", limit_bytes)
        model = layers()
        sizes = []
        load_weights(model, tmp_path, filled=lambda _: sizes.append(mapped_bytes(path)))
        return model, sizes

    model, sizes = load(2 * tensor_bytes)
    assert len(sizes) == 8
    assert tensor_bytes // 2 < max(sizes) < 3 * tensor_bytes, sizes
    torch.testing.assert_close(model.state_dict(), saved.state_dict(), rtol=0, atol=0)
    # Without a limit nearly the complete file is mapped.
    _, sizes = load(1 << 40)
    assert max(sizes) > 6 * tensor_bytes


def test_a_broken_file_is_named(tmp_path):
    """`from_pretrained`, which would load the folder with Transformers, raises the same error."""
    small_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = r"model.safetensors is not a readable safetensors file \(.*\); download or save"
    with pytest.raises(CheckpointError, match=message):
        load_weights(nn.Linear(1, 1), tmp_path)
    with (
        pytest.warns(UserWarning, match="loads"),
        pytest.raises(CheckpointError, match=r"model.safetensors is not a readable"),
    ):
        plait.from_pretrained(tmp_path)


@pytest.mark.parametrize("rows", [1, 4, 1 << 20])
def test_tied_parameters_with_two_values(rows, tmp_path, monkeypatch):
    """Transformers does not tie them. Plait refuses, because the last value would win."""
    # The comparison of 11 rows ends within a part, at its end, and in the first part.
    monkeypatch.setattr(load_weights_module, "_COMPARED_ELEMENTS", 8 * rows)
    small_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_tensors(tensors, path)
    model = small_llama()
    load_weights(model, tmp_path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])

    tensors["lm_head.weight"][10, 7] += 1
    save_tensors(tensors, path)
    message = r"lm_head.weight are tied by .* different values .* set \"tie_word_embeddings\""
    with pytest.raises(CheckpointError, match=message):
        load_weights(small_llama(), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_model(open_source(tmp_path))
    with pytest.warns(UserWarning, match="Transformers loads .* different values"):
        loaded = plait.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(loaded.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    model = small_llama(tied=False)
    load_weights(model, tmp_path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_unexpected_tensors(tmp_path):
    """Tensors that Transformers ignores by a rule are ignored. Others are refused.

    The rules name buffers of older releases, and layers that a class does not use.
    """
    small_llama(tied=False).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1),
        "model.mtp.weight": torch.ones(2),
    }
    save_tensors(stored | old, path)
    model = small_llama(tied=False)
    model._keys_to_ignore_on_load_unexpected = {r"^model\.mtp\."}
    load_weights(model, tmp_path)
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    message = r"is not of this model: the files hold tensors .* \(1: model.mtp.weight\); check"
    with pytest.raises(CheckpointError, match=message):
        load_weights(small_llama(tied=False), tmp_path)
    source = open_source(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        tensors_to_stream(source, source.model())


def test_a_folder_of_pickles_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = r"pytorch_model.bin is a pickle, .*: pass a folder written by save"
    with pytest.raises(CheckpointError, match=message):
        load_weights_module.weight_files(tmp_path)


def test_one_file_saved_over_several(tmp_path):
    """The files that Transformers leaves of the first model are not read."""
    small_llama().save_pretrained(tmp_path, max_shard_size=500)
    saved = small_llama()
    saved.save_pretrained(tmp_path)
    # This fails once Transformers removes the index itself.
    assert (tmp_path / load_weights_module.INDEX_FILE).is_file()
    loaded = small_llama()
    load_weights(loaded, tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, saved.model.embed_tokens.weight)


def test_several_files_saved_over_one_are_refused(tmp_path):
    small_llama().save_pretrained(tmp_path)
    saved = small_llama()
    saved.save_pretrained(tmp_path, max_shard_size=500)
    loaded = small_llama()
    message = r"holds two models: model.safetensors, and \d+ files .* remove model.safetensors, or"
    with pytest.raises(CheckpointError, match=message):
        load_weights(loaded, tmp_path)
    # The remedy works.
    (tmp_path / load_weights_module.SINGLE_FILE).unlink()
    load_weights(loaded, tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, saved.model.embed_tokens.weight)


def test_generation_settings_in_config_json(tmp_path):
    """Older folders have the settings in this file, and no generation_config.json."""
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
    """GPT-2 and BLOOM on the hub have names without the prefix. Transformers recognises them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    saved = transformers.AutoModelForCausalLM.from_config(config)
    saved.base_model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith("transformer.") for name in names)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    loaded = load_model(open_source(tmp_path))
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    loaded.close()
    tensors, reason = tensors_to_stream(open_source(tmp_path), open_source(tmp_path).model())
    layer = "dense_4h_to_h" if kind == "bloom" else "c_fc"
    assert tensors[f"transformer.h.1.mlp.{layer}.weight"]
    assert not reason


def test_a_base_model_without_its_head_is_refused(tmp_path):
    """Transformers initialises a new head, whose answers would be random."""
    small_llama(tied=False).model.save_pretrained(tmp_path)
    message = r"the files lack 1 of its tensors \(lm_head.weight\)"
    with pytest.raises(CheckpointError, match=message):
        load_model(open_source(tmp_path))
