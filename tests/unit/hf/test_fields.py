"""What becomes of every field of TrainingArguments."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from plait.cluster.layout import Layout
from plait.errors import ConfigError, InputError
from plait.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments, wrap
from plait.hf.arguments import fsdp_config_of, schedule_of, settings_of
from plait.hf.fields import FIELDS, SEQ2SEQ, examined
from plait.hf.generation import problems_of
from plait.hf.transformers_trainer import recompute_fields
from tests.parity.trainers import arguments, launched_alone, model, samples
from tools.trainer_fields import DOCUMENT, written


@pytest.fixture(autouse=True)
def _alone():
    with launched_alone():
        yield


NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}
"""Fields that not every supported release of Transformers has."""
RECOMPUTE = recompute_fields(TrainingArguments)[0]


def test_every_field_is_known():
    """A release of Transformers with a new field fails here, and not in a user's run."""
    theirs = {field.name for field in fields(Seq2SeqTrainingArguments)} - {"plait_config"}
    ours = FIELDS.keys() | SEQ2SEQ.keys()
    assert theirs <= ours
    assert ours - theirs <= NEWER


def test_document():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == written(text), "run python -m tools.trainer_fields --write"


REFUSED: dict[str, Any] = {
    "optim": "adafactor",
    "bf16_full_eval": True,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "eval_use_gather_object": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "debug": "underflow_overflow",
    "accelerator_config": {"split_batches": True},
    f"{RECOMPUTE}_kwargs": {"preserve_rng_state": False},
    "optim_target_modules": "all-linear",
}


def test_fsdp_in_a_file(tmp_path):
    """As Transformers reads it; what is no such file is refused by name."""
    (tmp_path / "fsdp.json").write_text('{"fsdp_reshard_after_forward": false}')
    args = arguments(
        TrainingArguments, str(tmp_path), fsdp=True, fsdp_config=str(tmp_path / "fsdp.json")
    )
    assert (args.fsdp, args.fsdp_config) == (True, {"fsdp_reshard_after_forward": False})
    assert (
        settings_of(fsdp_config_of(args), args, world_size=2, hidden_size=32)[1].data_parallel.stage
        == 2
    )
    (tmp_path / "fsdp.json").write_text("[1]")
    for name, said in (
        ("fsdp.json", "holds a list and not an object"),
        ("none.json", "cannot be read as a JSON file"),
    ):
        with pytest.raises(InputError, match=f"{name}.*{said}"):
            arguments(TrainingArguments, str(tmp_path), fsdp=True, fsdp_config=str(tmp_path / name))


@pytest.mark.parametrize(
    ("fsdp", "section", "said"),
    [
        ("hybrid_shard", {"version": 1}, "set parallel.dp_shard"),
        ("full_shards", {}, "is not an option of fsdp"),
        ("full_shard", {"reshard": True}, "unknown key of fsdp_config"),
        (True, {"activation_checkpointing": True}, RECOMPUTE),
    ],
)
def test_fsdp_that_cannot_be_honoured(tmp_path, fsdp, section, said):
    args = arguments(
        TrainingArguments, str(tmp_path), fsdp=fsdp, fsdp_config=section, **{RECOMPUTE: True}
    )
    with pytest.raises(ConfigError, match=said):
        settings_of(fsdp_config_of(args), args, world_size=2, hidden_size=32)


def test_fsdp_of_another_trainer(tmp_path):
    import transformers

    args = arguments(TrainingArguments, str(tmp_path), fsdp=True)
    with pytest.raises((InputError, ValueError), match="plait.hf|distributed training"):
        transformers.Trainer(model=model(), args=args, train_dataset=samples())


def test_refused(tmp_path):
    """All at once, each with its reason, before there is a process group."""
    for name, value in REFUSED.items():
        problems, _ = examined(
            arguments(TrainingArguments, str(tmp_path), **{name: value}), Layout()
        )
        assert [problem.field for problem in problems] == [f"TrainingArguments.{name}"]
        assert problems[0].rule and problems[0].remedy
    with pytest.raises(
        ConfigError,
        match=r"use_liger_kernel.*\n?.*save_on_each_node|save_on_each_node.*\n?.*use_liger_kernel",
    ):
        Trainer(
            model(),
            arguments(
                TrainingArguments, str(tmp_path), use_liger_kernel=True, save_on_each_node=True
            ),
        )


def test_checkpoints_that_could_not_be_written_or_read(tmp_path):
    """Before the first step, because the end of the training would be too late."""
    saves = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    best = {**saves, "load_best_model_at_end": True}
    weights = arguments(TrainingArguments, str(tmp_path), **best, save_only_model=True)
    with pytest.raises(ConfigError, match=r"load_best_model_at_end.*save_only_model=False"):
        Trainer(model(), weights, eval_dataset=samples())
    assert examined(arguments(TrainingArguments, str(tmp_path), **best), Layout()) == ([], [])
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    in_files = arguments(TrainingArguments, str(tmp_path), **saves)
    trainer = Trainer(model(), in_files, plait_config=config, eval_dataset=samples())
    with pytest.raises(ConfigError, match="save_strategy.*keeps the parameters in files"):
        trainer.train()
    assert trainer.engine is None


def test_streams_of_trl_are_taken(tmp_path):
    """TRL's DPOTrainer sets dispatch_batches=False for an iterable data set."""
    args = arguments(
        TrainingArguments, str(tmp_path), accelerator_config={"dispatch_batches": False}
    )
    Trainer(model(), args)
    args = arguments(
        TrainingArguments, str(tmp_path), accelerator_config={"dispatch_batches": True}
    )
    with pytest.raises(ConfigError, match="accelerator_config"):
        Trainer(model(), args)


def test_plain_arguments_are_taken(tmp_path):
    assert examined(arguments(TrainingArguments, str(tmp_path)), Layout()) == ([], [])
    assert examined(arguments(Seq2SeqTrainingArguments, str(tmp_path)), Layout(tp=2)) == ([], [])


def test_only_where_processes_share_a_batch(tmp_path):
    given = {"neftune_noise_alpha": 5.0, "train_sampling_strategy": "batch_rebalance"}
    args = arguments(TrainingArguments, str(tmp_path), **given)
    problems, _ = examined(args, Layout(tp=2))
    assert {problem.field.rpartition(".")[2] for problem in problems} == set(given)
    (problem,) = examined(args, Layout(dp_shard=2))[0]
    assert problem.value == "batch_rebalance" and problem.remedy == 'use "group_by_length"'


def test_noted(tmp_path):
    _, notes = examined(arguments(TrainingArguments, str(tmp_path), ddp_bucket_cap_mb=5), Layout())
    assert len(notes) == 1 and "parallel.bucket_mib" in notes[0]


def settings(source, folder, *, world=2, **given):
    return settings_of(
        source, arguments(TrainingArguments, str(folder), **given), world_size=world, hidden_size=32
    )[1]


def test_auto_is_filled(tmp_path):
    """By Transformers' rule, with the data-parallel ranks in place of all processes; what the file leaves out too."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rates = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    text: Any = {
        **dict.fromkeys((*sizes, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "parallel": {"tp": 2},
        "optimizer": {"type": "AdamW", "params": rates},
    }
    found = settings(text, tmp_path, world=4, bf16=True, adam_beta2=0.95)
    batch = found.batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation) == (8, 2, 2)
    assert found.gradient_clipping == 0.5 and found.precision.compute is not None
    expected = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert found.optimizer.params == expected
    bare = settings({}, tmp_path, bf16=True)
    assert (bare.batch.train_batch_size, bare.gradient_clipping, bare.seed) == (8, 0.5, 42)
    assert bare.precision.compute is not None
    for name in recompute_fields(TrainingArguments):
        recompute = settings(
            {}, tmp_path, **{name: True, f"{name}_kwargs": {"every_n_layers": 2}}
        ).recompute
        assert (recompute.mode, recompute.every) == ("full", 2)
        with pytest.raises(
            ConfigError, match=rf"TrainingArguments.{RECOMPUTE} .*parallel.recompute.mode"
        ):
            settings({"parallel": {"recompute": {"mode": "full"}}}, tmp_path, **{name: True})
    assert settings({}, tmp_path, torch_compile=True).compile.enabled


def test_contradictions(tmp_path):
    """All of them at once."""
    text = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    with pytest.raises(ConfigError) as raised:
        settings(text, tmp_path)
    fields = {problem.field for problem in raised.value.problems}
    assert fields == {"train_micro_batch_size_per_gpu", "gradient_clipping", "bf16.enabled"}
    alone = {"gradient_accumulation_steps": 1, "max_grad_norm": 0}
    with pytest.raises(ConfigError, match=r"parallel.optimizer_in_backward"):
        settings({"parallel": {"optimizer_in_backward": True}}, tmp_path, **alone)
    # The Trainer's loss is the model's, which wants whole sequences.
    with pytest.raises(ConfigError, match=r"parallel.cp.*train_batch"):
        settings({"parallel": {"cp": 2}}, tmp_path)


def test_what_the_loss_of_the_model_has_not(tmp_path):
    """It would change nothing."""
    text = {"experts": {"z_loss": 0.001, "balance": "global"}, "parallel": {"ep": 2, "tp": 2}}
    with pytest.raises(ConfigError) as raised:
        settings(text, tmp_path, world=4)
    fields = [problem.field for problem in raised.value.problems]
    assert fields == ["parallel.ep", "experts.z_loss", "experts.balance"]


def test_schedule(tmp_path):
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    text = {"scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}}
    args = arguments(TrainingArguments, str(tmp_path), warmup_steps=3)
    config, _ = settings_of(text, args, world_size=2, hidden_size=32)
    found = schedule_of(config, args, world_size=2, max_steps=17)
    assert found is not None
    assert found.params == dict(zip(names, (0.0, 1e-2, 3, 17), strict=True))


def test_deepspeed_is_left_to_plait(tmp_path):
    """Without DeepSpeed installed; what the field said survives a copy of the arguments; a Trainer that is not Plait's refuses it."""
    import transformers

    args = arguments(
        transformers.TrainingArguments, str(tmp_path), deepspeed={"zero_optimization": {"stage": 1}}
    )
    assert args.deepspeed_plugin is None and args.to_dict()["deepspeed"] == {
        "zero_optimization": {"stage": 1}
    }
    with pytest.raises(InputError, match=r"plait.hf.Trainer"):
        transformers.Trainer(model(), args)
    with pytest.raises(ConfigError, match="pass one of them"):
        Trainer(model(), args, plait_config={"zero_optimization": {"stage": 2}})


def test_wrap():
    import transformers

    class Mine(transformers.Trainer):
        pass

    found = wrap(Mine)
    assert found.__name__ == "Mine" and issubclass(found, Mine)
    assert wrap(found) is found and wrap(Trainer) is Trainer
    assert issubclass(Seq2SeqTrainer, transformers.Seq2SeqTrainer)
    with pytest.raises(InputError, match="a subclass of transformers.Trainer"):
        wrap(dict)


def test_generation_that_no_layout_can_is_refused(tmp_path):
    """Before training."""
    beams = arguments(
        Seq2SeqTrainingArguments, str(tmp_path), predict_with_generate=True, generation_num_beams=4
    )
    with pytest.raises(ConfigError, match=r"generation_num_beams.*without beams"):
        Seq2SeqTrainer(model(), beams)
    args = arguments(Seq2SeqTrainingArguments, str(tmp_path), predict_with_generate=True)
    trainer = Seq2SeqTrainer(model(), args, eval_dataset=samples(2))
    trainer.model.generation_config.num_beams = 4
    with pytest.raises(InputError, match=r"num_beams = 4 is not supported"):
        trainer.evaluate()

    def problems(kind, **config):
        return [
            problem.field
            for problem in problems_of(kind, args, settings(config, tmp_path, world=4))
        ]

    field, encoder = (
        ["TrainingArguments.predict_with_generate"],
        SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True)),
    )
    assert problems(model(), parallel={"tp": 2, "pp": 2}) == problems(encoder) == []
    assert problems(encoder, parallel={"tp": 2}) == field
    assert problems(encoder, zero_optimization={"stage": 1}) == []
    assert problems(model(), parallel={"ep": 2}) == field
