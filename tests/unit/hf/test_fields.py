"""Every field of TrainingArguments is supported, noted or refused."""

from dataclasses import fields
from functools import partial
from types import SimpleNamespace

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


REFUSED = {
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


@pytest.fixture
def args(tmp_path):
    """A function that makes arguments of the Trainer."""
    return partial(arguments, TrainingArguments, str(tmp_path))


def test_fsdp_in_a_file(tmp_path, args):
    """The file is read as by Transformers. What is no such file is refused by name."""
    (tmp_path / "fsdp.json").write_text('{"fsdp_reshard_after_forward": false}')
    made = args(fsdp=True, fsdp_config=str(tmp_path / "fsdp.json"))
    assert (made.fsdp, made.fsdp_config) == (True, {"fsdp_reshard_after_forward": False})
    _, resolved = settings_of(fsdp_config_of(made), made, world_size=2, hidden_size=32)
    assert resolved.data_parallel.stage == 2
    (tmp_path / "fsdp.json").write_text("[1]")
    for name, words in (
        ("fsdp.json", "holds a list and not an object"),
        ("none.json", "cannot be read as a JSON file"),
    ):
        with pytest.raises(InputError, match=f"{name}.*{words}"):
            args(fsdp=True, fsdp_config=str(tmp_path / name))


@pytest.mark.parametrize(
    ("fsdp", "section", "words"),
    [
        ("hybrid_shard", {"version": 1}, "set parallel.dp_shard"),
        ("full_shards", {}, "is not an option of fsdp"),
        ("full_shard", {"reshard": True}, "unknown key of fsdp_config"),
        (True, {"activation_checkpointing": True}, RECOMPUTE),
    ],
)
def test_fsdp_that_cannot_be_honoured(args, fsdp, section, words):
    made = args(fsdp=fsdp, fsdp_config=section, **{RECOMPUTE: True})
    with pytest.raises(ConfigError, match=words):
        settings_of(fsdp_config_of(made), made, world_size=2, hidden_size=32)


def test_fsdp_of_another_trainer(args):
    import transformers

    with pytest.raises((InputError, ValueError), match="plait.hf|distributed training"):
        transformers.Trainer(model=model(), args=args(fsdp=True), train_dataset=samples())


def test_refused(args):
    """All fields are refused at once, each with its reason, before there is a process group."""
    for name, value in REFUSED.items():
        problems, _ = examined(args(**{name: value}), Layout())
        assert [problem.field for problem in problems] == [f"TrainingArguments.{name}"]
        assert problems[0].rule and problems[0].remedy
    words = r"use_liger_kernel.*\n?.*save_on_each_node|save_on_each_node.*\n?.*use_liger_kernel"
    with pytest.raises(ConfigError, match=words):
        Trainer(model(), args(use_liger_kernel=True, save_on_each_node=True))


def test_checkpoints_that_could_not_be_written_or_read(tmp_path, args):
    """They are refused before the first step, because the end of the training would be too late."""
    saves = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    best = {**saves, "load_best_model_at_end": True}
    weights = args(**best, save_only_model=True)
    with pytest.raises(ConfigError, match=r"load_best_model_at_end.*save_only_model=False"):
        Trainer(model(), weights, eval_dataset=samples())
    assert examined(args(**best), Layout()) == ([], [])
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    trainer = Trainer(model(), args(**saves), plait_config=config, eval_dataset=samples())
    with pytest.raises(ConfigError, match="save_strategy.*keeps the parameters in files"):
        trainer.train()
    assert trainer.engine is None


def test_streams_of_trl_are_taken(args):
    """TRL's DPOTrainer sets dispatch_batches=False for an iterable data set."""
    Trainer(model(), args(accelerator_config={"dispatch_batches": False}))
    with pytest.raises(ConfigError, match="accelerator_config"):
        Trainer(model(), args(accelerator_config={"dispatch_batches": True}))


def test_plain_arguments_are_taken(tmp_path, args):
    assert examined(args(), Layout()) == ([], [])
    assert examined(arguments(Seq2SeqTrainingArguments, str(tmp_path)), Layout(tp=2)) == ([], [])


def test_only_where_processes_share_a_batch(args):
    given = {"neftune_noise_alpha": 5.0, "train_sampling_strategy": "batch_rebalance"}
    problems, _ = examined(args(**given), Layout(tp=2))
    assert {problem.field.rpartition(".")[2] for problem in problems} == set(given)
    (problem,) = examined(args(**given), Layout(dp_shard=2))[0]
    assert problem.value == "batch_rebalance" and problem.remedy == 'use "group_by_length"'


def test_noted(args):
    [note] = examined(args(ddp_bucket_cap_mb=5), Layout())[1]
    assert "parallel.bucket_mib" in note


def settings(source, folder, *, world=2, **given):
    made = arguments(TrainingArguments, str(folder), **given)
    return settings_of(source, made, world_size=world, hidden_size=32)[1]


def test_auto_is_filled(tmp_path):
    """Values follow Transformers' rule, also for missing keys, with the data-parallel ranks in place of all processes."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rates = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    text = {
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
        fields = {name: True, f"{name}_kwargs": {"every_n_layers": 2}}
        recompute = settings({}, tmp_path, **fields).recompute
        assert (recompute.mode, recompute.every) == ("full", 2)
        words = rf"TrainingArguments.{RECOMPUTE} .*parallel.recompute.mode"
        with pytest.raises(ConfigError, match=words):
            settings({"parallel": {"recompute": {"mode": "full"}}}, tmp_path, **{name: True})
    assert settings({}, tmp_path, torch_compile=True).compile.enabled


def test_contradictions(tmp_path):
    """All contradictions are reported at once."""
    text = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 1.0, "bf16": {"enabled": True}}  # fmt: skip
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


def test_settings_that_the_models_loss_does_not_have(tmp_path):
    """They would change nothing, so they are refused."""
    text = {"experts": {"z_loss": 0.001, "balance": "global"}, "parallel": {"ep": 2, "tp": 2}}
    with pytest.raises(ConfigError) as raised:
        settings(text, tmp_path, world=4)
    fields = [problem.field for problem in raised.value.problems]
    assert fields == ["parallel.ep", "experts.z_loss", "experts.balance"]


def test_schedule(args):
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    text = {"scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}}
    made = args(warmup_steps=3)
    config, _ = settings_of(text, made, world_size=2, hidden_size=32)
    found = schedule_of(config, made, world_size=2, max_steps=17)
    assert found.params == dict(zip(names, (0.0, 1e-2, 3, 17), strict=True))


def test_deepspeed_is_left_to_plait(tmp_path):
    """It works without DeepSpeed installed. The field survives a copy of the arguments. Transformers' own Trainer refuses it."""
    import transformers

    stage = {"zero_optimization": {"stage": 1}}
    args = arguments(transformers.TrainingArguments, str(tmp_path), deepspeed=stage)
    assert args.deepspeed_plugin is None and args.to_dict()["deepspeed"] == stage
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
    """The refusal comes before training."""
    generating = partial(
        arguments, Seq2SeqTrainingArguments, str(tmp_path), predict_with_generate=True
    )
    with pytest.raises(ConfigError, match=r"generation_num_beams.*without beams"):
        Seq2SeqTrainer(model(), generating(generation_num_beams=4))
    args = generating()
    trainer = Seq2SeqTrainer(model(), args, eval_dataset=samples(2))
    trainer.model.generation_config.num_beams = 4
    with pytest.raises(InputError, match=r"num_beams = 4 is not supported"):
        trainer.evaluate()

    def problems(kind, **config):
        resolved = settings(config, tmp_path, world=4)
        return [problem.field for problem in problems_of(kind, args, resolved)]

    field = ["TrainingArguments.predict_with_generate"]
    encoder = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    assert problems(model(), parallel={"tp": 2, "pp": 2}) == problems(encoder) == []
    assert problems(encoder, parallel={"tp": 2}) == field
    assert problems(encoder, zero_optimization={"stage": 1}) == []
    assert problems(model(), parallel={"ep": 2}) == field
