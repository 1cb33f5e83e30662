"""What a user saves of a sharded model has all of its weights, or is refused by name."""

from __future__ import annotations

import pickle
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
from tests.parity import adapted, trainers
from tests.parity.trainers import zero

SETTINGS = {"learning_rate": 3e-2, "max_steps": 2}


def saved_in(folder):
    """Every tensor of a folder's own files."""
    return {
        name: tensor
        for path in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def merged_on_plait(rank, world, config, folder):
    """Train adapters, merge them, and save. Runs in a worker."""
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(folder, config, {"model": adapted.model()}, **SETTINGS)
        trainer.train()
        trainer.model = trainer.model.merge_and_unload()
        trainer.save_model(f"{folder}/merged")
        trainer.engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_merged_adapters(pool, tmp_path, stage):
    """The weights of one process that merges its adapters, and no adapter file."""
    pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        arguments = trainers.arguments(
            TrainingArguments, str(tmp_path), gradient_accumulation_steps=4, **SETTINGS
        )
        one = Trainer(model=adapted.model(), args=arguments, train_dataset=trainers.samples())
        one.train()
        wanted = one.model.merge_and_unload().state_dict()

    pool.run(2, merged_on_plait, zero(stage), str(tmp_path))
    found = saved_in(tmp_path / "merged")
    assert found.keys() == wanted.keys() and not list(tmp_path.glob("merged/adapter*"))
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def two_adapters(rank, world, config, folder):
    """Save before and after another adapter is made the active one. Runs in a worker."""
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


@pytest.mark.parametrize("config", [zero(3), {"parallel": {"pp": 2}}], ids=["zero3", "pp2"])
def test_every_adapter_is_saved(pool, tmp_path, config):
    """Each in its own folder, as PEFT does, whichever of them is active."""
    pytest.importorskip("peft")
    pool.run(2, two_adapters, config, str(tmp_path))
    for where, count in (("", 2 * 2 * len(adapted.TARGETS)), ("other", 2 * 2)):
        before, after = saved_in(tmp_path / "before" / where), saved_in(tmp_path / "after" / where)
        assert len(before) == len(after) == count
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name


def said(call):
    """The words of a refusal."""
    with pytest.raises(InputError) as raised:
        call()
    return str(raised.value)


def saved_by_scripts(rank, world, config, folder):
    """Ways of scripts to save a Trainer's model. Runs in a worker."""
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(folder, config, max_steps=1)
        trainer.train()
        model, file = trainer.model, f"{folder}/{rank}.pt"
        refusals = [said(lambda: torch.save(model.state_dict(), file))]
        own = said(lambda: model.save_pretrained(f"{folder}/own"))
        assert "call trainer.save_model(folder) on every process" in own
        if config != {"parallel": {"pp": 2}}:
            shards = {
                name: parameter.detach().cpu() for name, parameter in model.named_parameters()
            }
            refusals += [
                said(lambda: torch.save(shards, file)),
                said(lambda: trainer._save(f"{folder}/alpaca", state_dict=shards)),
                said(lambda: model.save_pretrained(f"{folder}/pretrained", state_dict=shards)),
            ]
        resized = said(lambda: model.resize_token_embeddings(70))
        assert (
            "resize_token_embeddings(70)" in resized
            and "load the model, resize it, and then train it" in resized
        )
        full = trainer.accelerator.get_state_dict(model)
        trainer.engine.close()
        return refusals, full


@pytest.mark.parametrize(
    "config",
    [zero(3), {"parallel": {"tp": 2}}, {"parallel": {"pp": 2}}],
    ids=["zero3", "tp2", "pp2"],
)
def test_parts_are_no_weights(pool, tmp_path, config):
    """The advised call returns every weight, in plain tensors, on the first process."""
    found = pool.run(2, saved_by_scripts, config, str(tmp_path))
    for refusals, _ in found:
        assert "call trainer.save_model(folder)" in refusals[0]
        assert all(
            ("holds a part" in text or "shards of other processes" in text)
            and "get_state_dict(model)" in text
            for text in refusals
        ), refusals
    assert [
        path.name
        for path in tmp_path.rglob("*")
        if path.suffix in (".pt", ".safetensors") and path.stat().st_size > 2000
    ] == []
    wanted = trainers.model().state_dict()
    assert {name: tensor.shape for name, tensor in found[0][1].items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    assert (
        all(type(tensor) is torch.Tensor for tensor in found[0][1].values()) and found[1][1] == {}
    )


def part_of_a_model(rank, world, axis, folder):
    """What a script saves of an engine's model, and what the refusal advises. Runs in a worker."""
    config = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "parallel": {axis: 2},
    }
    engine = plait.initialize(trainers.model(), config, loss_fn=plait.causal_lm_loss)
    refusals = [said(lambda: torch.save(engine.model, f"{folder}/{rank}.pt"))]
    if axis == "pp":
        refusals.append(said(lambda: torch.save(engine.model.state_dict(), f"{folder}/{rank}.pt")))
    weights = {}
    for bucket in plait.iterate_weights(engine.sharded):
        weights |= {name: tensor.clone() for name, tensor in bucket.items()}
    engine.close()
    return refusals, weights


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_a_part_is_not_the_model(pool, tmp_path, axis):
    wanted = trainers.model().state_dict()
    for (whole, *others), weights in pool.run(2, part_of_a_model, axis, str(tmp_path)):
        assert whole.startswith("LlamaForCausalLM cannot be pickled (by torch.save(model), for")
        for refusal in others:
            assert "each process holds a part" in refusal
        for refusal in (whole, *others):
            assert "plait.iterate_weights(engine.sharded)" in refusal
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())


def merged_parts(rank, world, folder):
    """Merge adapters of which each rank has a part, and save them as advised. Runs in a worker."""
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(
            folder, {"parallel": {"tp": 2}}, {"model": adapted.model()}, **SETTINGS
        )
        trainer.train()
        refusals = [said(trainer.model.merge_and_unload), said(trainer.model.merge_adapter)]
        trainer.save_model(f"{folder}/adapter")
        trainer.engine.close()
        return refusals


def test_adapters_of_which_ranks_have_parts(pool, tmp_path):
    """The advised way merges them in one process."""
    peft = pytest.importorskip("peft")
    for refusals in pool.run(2, merged_parts, str(tmp_path)):
        assert all(
            "merge it in one process: PeftModel.from_pretrained(model, folder)" in text
            for text in refusals
        )
    before = trainers.model().state_dict()
    merged = (
        peft.PeftModel.from_pretrained(trainers.model(), str(tmp_path / "adapter"))
        .merge_and_unload()
        .state_dict()
    )
    assert merged.keys() == before.keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], before[name])


def with_images(kind):
    """A tiny model whose parameters have other names in files."""
    import transformers

    torch.manual_seed(3)
    if kind == "llava":
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 8}
        parts = {
            "vision_config": transformers.CLIPVisionConfig(**vision),
            "text_config": transformers.LlamaConfig(**trainers.SHAPE),
        }
        config = transformers.LlavaConfig(**parts)
        return transformers.LlavaForConditionalGeneration(config)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 1,
        "patch_size": 4,
    }
    config = transformers.Qwen2VLConfig(
        text_config={**trainers.SHAPE, "rope_parameters": rope}, vision_config=vision
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def saved_with_images(rank, world, kind, folder):
    """Runs in a worker: before and after the model is sharded."""
    with trainers.launched(rank, world):
        model = with_images(kind)
        if rank == 0:
            model.save_pretrained(f"{folder}/native")
        trainer = trainers.trainer_of(folder, zero(3), {"model": model})
        kinds = [type(module) for module in trainer.begin().model.modules()]
        trainer.save_model(f"{folder}/ours")
        assert [type(module) for module in model.modules()] == kinds
        trainer.engine.close()


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_names_of_models_with_images(pool, tmp_path, kind):
    """Those of `save_pretrained`, which follow from the class."""
    pool.run(2, saved_with_images, kind, str(tmp_path))
    wanted, found = saved_in(tmp_path / "native"), saved_in(tmp_path / "ours")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


class Net(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


WHOLE_MODEL = "cannot be pickled (by torch.save(model), for example): it was split or wrapped"


def saved_without_a_trainer(rank, world, which, folder):
    """Runs in a worker: what torch.save says, and whether the advice gives the full weights."""
    torch.manual_seed(1)
    model = Net()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = {"train_micro_batch_size_per_gpu": 2, **zero(3)}
    made: Any = (
        plait.parallelize(model, config)
        if which == "parallelize"
        else plait.initialize(model, config)
    )
    file = f"{folder}/{rank}.pt"
    for call in (lambda: torch.save(model, file), lambda: pickle.dumps({"model": model})):
        assert WHOLE_MODEL in said(call)
    refusal = said(lambda: torch.save(model.state_dict(), file))
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), file)
    found = torch.load(file)
    made.close()
    return refusal, all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("which", ["initialize", "parallelize"])
def test_torch_save_of_shards(pool, tmp_path, which):
    for refusal, is_full in pool.run(2, saved_without_a_trainer, which, str(tmp_path)):
        assert (
            "this process has only its own shard" in refusal and "full_state_dict=True" in refusal
        )
        assert is_full


def test_a_file_without_tensors_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "other").mkdir()
    save_file({}, tmp_path / "other" / "adapter_model.safetensors")
    refuse_empty_files(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"other/adapter_model.safetensors was written without a tensor"
    ):
        refuse_empty_files(tmp_path, ["other"])
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["model.safetensors"]


def test_checkpoints_have_what_the_optimizer_holds():
    """Of a model whose checkpoints leave out what was frozen: also what was unfrozen since."""
    model = Net()
    model.layers[1].requires_grad_(False)
    states.save_trained_only(model)
    assert len(states.model_content(model)[0]) == 2
    model.layers[1].requires_grad_(True)
    assert len(states.model_content(model, trained=set(model.parameters()))[0]) == 4
