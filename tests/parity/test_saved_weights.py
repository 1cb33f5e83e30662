"""Saved weights of a sharded model are complete, or saving is refused with the right call."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import plait
from plait.checkpoint import states
from plait.errors import CheckpointError, InputError
from plait.hf.checkpoints import refuse_empty_files
from tests.parity import adapted, refusals, trainers
from tests.parity.full_tensors import assert_equal, shapes_of
from tests.parity.trainers import zero

message_of = partial(refusals.message_of, error=InputError)

SETTINGS = {"learning_rate": 3e-2, "max_steps": 2}
TP2 = {"parallel": {"tp": 2}}
PP2 = {"parallel": {"pp": 2}}


def saved_in(folder):
    """Return the tensors of the files in a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def train_and_merge(rank, world, config, folder):
    """Train adapters, merge them, and save. Runs on every rank."""
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(folder, config, {"model": adapted.model()}, **SETTINGS)
        trainer.train()
        trainer.model = trainer.model.merge_and_unload()
        trainer.save_model(f"{folder}/merged")
        trainer.engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_merged_adapters(pool, tmp_path, stage):
    """The folder has the merged weights of one process, and no adapter file."""
    pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        arguments = trainers.arguments(
            TrainingArguments, str(tmp_path), gradient_accumulation_steps=4, **SETTINGS
        )
        native = Trainer(model=adapted.model(), args=arguments, train_dataset=trainers.samples())
        native.train()
        expected = native.model.merge_and_unload().state_dict()

    pool.run(2, train_and_merge, zero(stage), str(tmp_path))
    actual = saved_in(tmp_path / "merged")
    assert actual.keys() == expected.keys() and not list(tmp_path.glob("merged/adapter*"))
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def train_two_adapters(rank, world, config, folder):
    """Save before and after the second adapter becomes the active one. Runs on every rank."""
    from peft import LoraConfig

    with trainers.launched(rank, world):
        model = adapted.model()
        other = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model.add_adapter("other", other)
        trainer = trainers.trainer_of(folder, config, {"model": model}, **SETTINGS)
        trainer.train()
        trainer.save_model(f"{folder}/before")
        trainer.model.set_adapter("other")
        trainer.save_model(f"{folder}/after")
        trainer.engine.close()


@pytest.mark.parametrize("config", [zero(3), PP2], ids=["zero3", "pp2"])
def test_every_adapter_is_saved(pool, tmp_path, config):
    """Each adapter has its own folder, as in PEFT, whichever of them is active."""
    pytest.importorskip("peft")
    pool.run(2, train_two_adapters, config, str(tmp_path))
    for subfolder, count in (("", 2 * 2 * len(adapted.TARGETS)), ("other", 2 * 2)):
        before = saved_in(tmp_path / "before" / subfolder)
        assert len(before) == count
        assert_equal(saved_in(tmp_path / "after" / subfolder), before)


class QuantisedLinear(nn.Linear):
    """A layer whose state dict has facts of its weight, as those of bitsandbytes."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if getattr(self.weight, "quant_state", None) is not None:
            destination[f"{prefix}weight.quant_state"] = self.weight.quant_state
        super()._save_to_state_dict(destination, prefix, keep_vars)


def save_adapters_of_quantised_layers(rank, world, folder):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        model = adapted.model()
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = QuantisedLinear
        trainer = trainers.trainer_of(folder, PP2, {"model": model}, **SETTINGS)
        trainer.train()
        trainer.save_model(f"{folder}/saved")
        trainer.engine.close()


def test_adapters_of_quantised_layers_are_saved_in_a_pipeline(pool, tmp_path):
    """A rank has only placeholders for the quantised weights of other stages."""
    pytest.importorskip("peft")
    pool.run(2, save_adapters_of_quantised_layers, str(tmp_path))
    assert len(saved_in(tmp_path / "saved")) == 2 * 2 * len(adapted.TARGETS)


def save_as_scripts_do(rank, world, config, folder):
    """Try the ways in which scripts save a Trainer's model. Runs on every rank.

    Returns the messages, and the result of the call that they name.
    """
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(folder, config, max_steps=1)
        trainer.train()
        model = trainer.model
        file = f"{folder}/{rank}.pt"

        messages = [message_of(lambda: torch.save(model.state_dict(), file))]
        if config != PP2:
            shards = {name: p.detach().cpu() for name, p in model.named_parameters()}
            messages += [
                message_of(torch.save, shards, file),
                message_of(trainer._save, f"{folder}/alpaca", state_dict=shards),
                message_of(model.save_pretrained, f"{folder}/pretrained", state_dict=shards),
            ]

        saving = message_of(model.save_pretrained, f"{folder}/own")
        assert "call trainer.save_model(folder) on every process" in saving
        resizing = message_of(model.resize_token_embeddings, 70)
        assert "resize_token_embeddings(70)" in resizing
        assert "load the model, resize it, and then train it" in resizing

        full = trainer.accelerator.get_state_dict(model)
        trainer.engine.close()
        return messages, full


@pytest.mark.parametrize("config", [zero(3), TP2, PP2], ids=["zero3", "tp2", "pp2"])
def test_scripts_cannot_save_shards_as_weights(pool, tmp_path, config):
    """The named call returns all weights as plain tensors in the first process."""
    results = pool.run(2, save_as_scripts_do, config, str(tmp_path))
    for messages, _ in results:
        assert "call trainer.save_model(folder)" in messages[0]
        for message in messages:
            assert "holds a part" in message or "shards of other processes" in message
            assert "get_state_dict(model)" in message

    for path in tmp_path.rglob("*"):
        assert path.suffix not in (".pt", ".safetensors") or path.stat().st_size <= 2000, path

    full = results[0][1]
    assert shapes_of(full) == shapes_of(trainers.model().state_dict())
    assert set(map(type, full.values())) == {torch.Tensor}
    assert results[1][1] == {}


def save_engine_model(rank, world, axis, folder):
    """Return the messages of `torch.save`, and the weights from the call that they name.

    Runs on every rank.
    """
    config = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "parallel": {axis: 2},
    }
    engine = plait.initialize(trainers.model(), config, loss_fn=plait.causal_lm_loss)
    file = f"{folder}/{rank}.pt"
    messages = [message_of(torch.save, engine.model, file)]
    if axis == "pp":
        messages.append(message_of(lambda: torch.save(engine.model.state_dict(), file)))
    weights = {}
    for bucket in plait.iterate_weights(engine.sharded):
        weights |= {name: tensor.clone() for name, tensor in bucket.items()}
    engine.close()
    return messages, weights


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_saving_the_model_of_an_engine_is_refused(pool, tmp_path, axis):
    expected = trainers.model().state_dict()
    for messages, weights in pool.run(2, save_engine_model, axis, str(tmp_path)):
        for message in messages:
            assert "plait.iterate_weights(engine.sharded)" in message
        of_the_model, *of_the_state_dict = messages
        assert of_the_model.startswith("LlamaForCausalLM cannot be pickled (by torch.save(model)")
        for message in of_the_state_dict:
            assert "each process holds a part" in message
        assert_equal(weights, dict(expected))


def merge_on_tensor_ranks(rank, world, folder):
    """Try to merge adapters that are split over ranks, then save them. Runs on every rank."""
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(folder, TP2, {"model": adapted.model()}, **SETTINGS)
        trainer.train()
        messages = [
            message_of(trainer.model.merge_and_unload),
            message_of(trainer.model.merge_adapter),
        ]
        trainer.save_model(f"{folder}/adapter")
        trainer.engine.close()
        return messages


def test_merging_adapters_that_are_split_is_refused(pool, tmp_path):
    """The remedy merges them in one process."""
    peft = pytest.importorskip("peft")
    remedy = "merge it in one process: PeftModel.from_pretrained(model, folder)"
    for for_unload, for_merge in pool.run(2, merge_on_tensor_ranks, str(tmp_path)):
        assert remedy in for_unload and remedy in for_merge

    model = peft.PeftModel.from_pretrained(trainers.model(), str(tmp_path / "adapter"))
    merged = model.merge_and_unload().state_dict()
    before = trainers.model().state_dict()
    assert merged.keys() == before.keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], before[name])


def image_model(kind):
    """Return a tiny model whose parameters have other names in files."""
    import transformers

    torch.manual_seed(3)
    if kind == "llava":
        vision = transformers.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            projection_dim=8,
        )
        text = transformers.LlamaConfig(**trainers.SHAPE)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text)
        return transformers.LlavaForConditionalGeneration(config)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    config = transformers.Qwen2VLConfig(
        text_config={**trainers.SHAPE, "rope_parameters": rope},
        vision_config={**vision, "mlp_ratio": 1, "patch_size": 4},
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def save_image_model(rank, world, kind, folder):
    """Save before and after the model is sharded. Runs on every rank."""
    with trainers.launched(rank, world):
        model = image_model(kind)
        if rank == 0:
            model.save_pretrained(f"{folder}/native")
        trainer = trainers.trainer_of(folder, zero(3), {"model": model})
        classes = list(map(type, trainer.begin().model.modules()))
        trainer.save_model(f"{folder}/ours")
        assert list(map(type, model.modules())) == classes
        trainer.engine.close()


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_names_of_image_models_are_those_of_save_pretrained(pool, tmp_path, kind):
    """`save_pretrained` renames by the class of the model, which sharding changes."""
    pool.run(2, save_image_model, kind, str(tmp_path))
    assert_equal(saved_in(tmp_path / "ours"), saved_in(tmp_path / "native"))


class TwoLayers(nn.Module):
    """A model without a library."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def save_shards(rank, world, call, folder):
    """Return the message of `torch.save`, and whether its remedy gives the full weights.

    Runs on every rank.
    """
    torch.manual_seed(1)
    model = TwoLayers()
    expected = copy.deepcopy(model.state_dict())
    config = {"train_micro_batch_size_per_gpu": 2, **zero(3)}
    sharded: Any = getattr(plait, call)(model, config)
    file = f"{folder}/{rank}.pt"
    for message in (
        message_of(torch.save, model, file),
        message_of(pickle.dumps, {"model": model}),
    ):
        assert "cannot be pickled (by torch.save(model)" in message
        assert "it was split or wrapped" in message

    message = message_of(lambda: torch.save(model.state_dict(), file))
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), file)
    sharded.close()
    assert_equal(torch.load(file), expected)
    return message


@pytest.mark.parametrize("call", ["initialize", "parallelize"])
def test_torch_save_of_shards_is_refused(pool, tmp_path, call):
    for message in pool.run(2, save_shards, call, str(tmp_path)):
        assert "this process has only its own shard" in message
        assert "full_state_dict=True" in message


def test_a_file_without_tensors_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "other").mkdir()
    save_file({}, tmp_path / "other" / "adapter_model.safetensors")
    refuse_empty_files(tmp_path)
    message = "other/adapter_model.safetensors contained no tensors and was removed"
    with pytest.raises(CheckpointError, match=message):
        refuse_empty_files(tmp_path, ["other"])
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["model.safetensors"]


def test_parameters_that_were_unfrozen_are_in_checkpoints():
    """The optimizer has them, although the model's checkpoints leave out what was frozen."""
    model = TwoLayers()
    model.layers[1].requires_grad_(False)
    states.save_trained_only(model)
    assert len(states.model_content(model)[0]) == 2
    model.layers[1].requires_grad_(True)
    assert len(states.model_content(model, trained=set(model.parameters()))[0]) == 4
