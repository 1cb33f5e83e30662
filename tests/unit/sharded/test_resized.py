"""Models that a script resizes or builds without weights, and remedies of refusals."""

import importlib
import sys

import pytest
import torch
from torch import nn

import plait
import plait.compat.deepspeed as deepspeed
from plait.compat.deepspeed import hf_config
from plait.config.schema.sections import ModelSection
from plait.errors import ConfigError, InputError, ModelError
from plait.train.language_model import build_model

transformers = pytest.importorskip("transformers")

CONFIG = {
    "train_batch_size": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 0},
}


def model(*, rows=64):
    torch.manual_seed(0)
    sizes = {"vocab_size": rows, "hidden_size": 32, "intermediate_size": 48}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers))


def initialized(model):
    return plait.initialize(model, CONFIG, loss_fn=plait.causal_lm_loss)


def save_with_more_rows(folder, target):
    """Resize a saved model, as the messages advise, and save it."""
    resized = transformers.AutoModelForCausalLM.from_pretrained(folder)
    resized.resize_token_embeddings(70)
    resized.save_pretrained(target)


def loss_of_a_step(engine, token):
    tokens = torch.full((1, 8), token)
    return float(engine.train_batch({"input_ids": tokens, "labels": tokens}).loss)


def test_resizing_after_training_is_refused():
    """The optimizer's states keep the former size, and an update would write past their end."""
    engine = initialized(model())
    loss_of_a_step(engine, 3)
    engine.model.resize_token_embeddings(70)
    message = r"embed_tokens.weight` has shape \(70, 32\), and had \(64, 32\)"
    with pytest.raises(InputError, match=message):
        loss_of_a_step(engine, 68)
    engine.close()
    # The remedy is to pass the resized model to plait.initialize.
    again = initialized(engine.model)
    assert loss_of_a_step(again, 68) > 0
    again.close()


def test_resizing_before_the_weights_are_loaded_is_refused(tmp_path):
    model().save_pretrained(tmp_path / "small")
    pretrained = plait.from_pretrained(tmp_path / "small")
    assert pretrained.resize_token_embeddings().num_embeddings == 64
    with pytest.raises(InputError, match="resize and save it once") as error:
        pretrained.resize_token_embeddings(70)
    assert "from_pretrained" in str(error.value)
    assert "resize_token_embeddings(70)" in str(error.value)
    save_with_more_rows(tmp_path / "small", tmp_path / "large")
    engine = initialized(plait.from_pretrained(tmp_path / "large"))
    assert engine.model.get_input_embeddings().weight.shape == (70, 32)
    assert loss_of_a_step(engine, 68) > 0
    engine.close()


def test_the_model_of_a_closed_engine_can_be_resized(tmp_path):
    model().save_pretrained(tmp_path)
    pretrained = plait.from_pretrained(tmp_path)
    initialized(pretrained).close()
    assert pretrained.resize_token_embeddings(70).num_embeddings == 70


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    model().save_pretrained(tmp_path / "small")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"t{number}": number for number in range(70)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0")
    with pytest.raises(ConfigError, match=r"model.resize_token_embeddings\(70\)") as error:
        build_model(ModelSection(path=str(tmp_path / "small")), tokenizer, positions=8)
    assert "set model.path to that folder" in str(error.value)
    assert "or more" not in str(error.value)
    save_with_more_rows(tmp_path / "small", tmp_path / "large")
    built = build_model(ModelSection(path=str(tmp_path / "large")), tokenizer, positions=8)
    assert built.model.config.vocab_size == 70


def test_from_pretrained_of_transformers_in_zero_init_is_refused(tmp_path):
    model().save_pretrained(tmp_path)
    with (
        pytest.raises(InputError, match=r"call plait.from_pretrained\(name\) without zero.Init"),
        deepspeed.zero.Init(),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    # zero.Init does not hide other errors.
    with pytest.raises(ZeroDivisionError), deepspeed.zero.Init():
        _ = 1 / 0
    engine = deepspeed.initialize(model=plait.from_pretrained(tmp_path), config=CONFIG)[0]
    assert torch.equal(engine.module.lm_head.weight, model().lm_head.weight)
    engine.destroy()


def test_hf_deepspeed_config_is_refused(tmp_path):
    model().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"delete the line.* plait.from_pretrained\(name\)"):
        _ = transformers.integrations.HfDeepSpeedConfig(CONFIG)
    assert not transformers.integrations.is_deepspeed_zero3_enabled()
    # The remedy works.
    engine = deepspeed.initialize(model=plait.from_pretrained(tmp_path), config=CONFIG)[0]
    assert torch.equal(engine.module.lm_head.weight, model().lm_head.weight)
    engine.destroy()


@pytest.mark.parametrize("is_first", [True, False])
def test_hf_deepspeed_config_is_patched_in_either_order(is_first, monkeypatch, tmp_path):
    """Transformers or Plait may be imported first. A stand-in for Transformers can be either."""
    lines = (
        "from importlib.metadata import version",
        "unset_hf_deepspeed_config = int",
        "class HfDeepSpeedConfig:",
        "    def __init__(self, config):",
        "        version('no-such-distribution')",
    )
    (tmp_path / "stand_in.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    # Transformers itself is imported already.
    monkeypatch.setattr(hf_config, "_MODULE", "stand_in")
    monkeypatch.delitem(sys.modules, "stand_in", raising=False)
    if is_first:
        importlib.import_module("stand_in")
    hf_config.patch_hf_deepspeed_config()
    with pytest.raises(InputError, match=r"plait.from_pretrained\(name\)"):
        importlib.import_module("stand_in").HfDeepSpeedConfig(CONFIG)
    monkeypatch.delitem(sys.modules, "stand_in")


def test_parameters_partitioned_by_deepspeed_are_refused():
    partitioned = nn.Linear(2, 2)
    partitioned.weight.ds_id = 0
    with pytest.raises(ModelError, match=r"build the model with plait.from_pretrained\(name\)"):
        plait.initialize(partitioned, CONFIG)


def test_adapters_on_a_model_without_weights_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    model().save_pretrained(tmp_path)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(InputError, match="build it with LlamaForCausalLM.from_pretrained"):
        plait.initialize(peft.get_peft_model(plait.from_pretrained(tmp_path), lora), CONFIG)
    # The remedy works.
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    engine = initialized(peft.get_peft_model(loaded, lora))
    assert loss_of_a_step(engine, 3) > 0
    engine.close()
