"""Every field of TrainingArguments is supported, noted or refused."""

from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import transformers

from plait.cluster.layout import Layout
from plait.errors import ConfigError, InputError
from plait.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments, wrap
from plait.hf.arguments import fsdp_config_of, schedule_of, settings_of
from plait.hf.fields import FIELDS, SEQ2SEQ, examined
from plait.hf.generation import problems_of
from plait.hf.transformers_trainer import recompute_fields
from tests.parity.trainers import arguments, launched_alone, model, samples
from tools.trainer_fields import DOCUMENT, written

NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}
"""Fields that not every supported release of Transformers has."""
RECOMPUTE = recompute_fields(TrainingArguments)[0]


@pytest.fixture(autouse=True)
def _one_process():
    with launched_alone():
        yield


@pytest.fixture
def args(tmp_path):
    """Return a function that makes arguments of the Trainer."""
    return partial(arguments, TrainingArguments, str(tmp_path))


@pytest.fixture
def settings(args):
    """Return a function that resolves a configuration with arguments of the Trainer."""

    def resolve(config, *, world=2, **values):
        return settings_of(config, args(**values), world_size=world, hidden_size=32)[1]

    return resolve


def fsdp_settings(arguments):
    config = fsdp_config_of(arguments)
    return settings_of(config, arguments, world_size=2, hidden_size=32)[1]


def test_every_field_is_known():
    """A release of Transformers with a new field fails here, and not in a user's run."""
    existing = {field.name for field in fields(Seq2SeqTrainingArguments)} - {"plait_config"}
    known = FIELDS.keys() | SEQ2SEQ.keys()
    assert existing <= known
    assert known - existing <= NEWER


def test_the_document_is_current():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == written(text), "run python -m tools.trainer_fields --write"


def test_an_fsdp_file_is_read_as_by_transformers(tmp_path, args):
    file = tmp_path / "fsdp.json"
    file.write_text('{"fsdp_reshard_after_forward": false}')
    with_file = args(fsdp=True, fsdp_config=str(file))
    assert with_file.fsdp is True
    assert with_file.fsdp_config == {"fsdp_reshard_after_forward": False}
    assert fsdp_settings(with_file).data_parallel.stage == 2

    file.write_text("[1]")
    for name, message in (
        ("fsdp.json", "holds a list and not an object"),
        ("none.json", "cannot be read as a JSON file"),
    ):
        with pytest.raises(InputError, match=f"{name}.*{message}"):
            args(fsdp=True, fsdp_config=str(tmp_path / name))


@pytest.mark.parametrize(
    ("fsdp", "section", "message"),
    [
        ("hybrid_shard", {"version": 1}, "set parallel.dp_shard"),
        ("full_shards", {}, "is not an option of fsdp"),
        ("full_shard", {"reshard": True}, "unknown key of fsdp_config"),
        (True, {"activation_checkpointing": True}, RECOMPUTE),
    ],
)
def test_unsupported_fsdp_settings_are_refused(args, fsdp, section, message):
    with pytest.raises(ConfigError, match=message):
        fsdp_settings(args(fsdp=fsdp, fsdp_config=section, **{RECOMPUTE: True}))


def test_transformers_trainer_refuses_fsdp_of_plait(args):
    with pytest.raises((InputError, ValueError), match="plait.hf|distributed training"):
        transformers.Trainer(model=model(), args=args(fsdp=True), train_dataset=samples())


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


def test_refused_fields_are_reported_together(args):
    for name, value in REFUSED.items():
        problems, _ = examined(args(**{name: value}), Layout())
        assert [problem.field for problem in problems] == [f"TrainingArguments.{name}"]
        assert problems[0].rule and problems[0].remedy
    with pytest.raises(ConfigError) as error:
        Trainer(model(), args(use_liger_kernel=True, save_on_each_node=True))
    assert "use_liger_kernel" in str(error.value) and "save_on_each_node" in str(error.value)


def test_checkpoints_of_parameters_in_files_are_refused(tmp_path, args):
    """The refusal comes before the first step, because the end of the training is too late."""
    saves = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    trainer = Trainer(model(), args(**saves), plait_config=config, eval_dataset=samples())
    with pytest.raises(ConfigError, match="save_strategy.*keeps the parameters in files"):
        trainer.train()
    assert trainer.engine is None


def test_streams_of_trl_are_supported(args):
    """TRL's DPOTrainer sets dispatch_batches=False for an iterable data set."""
    Trainer(model(), args(accelerator_config={"dispatch_batches": False}))
    with pytest.raises(ConfigError, match="accelerator_config"):
        Trainer(model(), args(accelerator_config={"dispatch_batches": True}))


def test_plain_arguments_are_supported(tmp_path, args):
    assert examined(args(), Layout()) == ([], [])
    assert examined(arguments(Seq2SeqTrainingArguments, str(tmp_path)), Layout(tp=2)) == ([], [])


def test_fields_that_only_ranks_with_one_batch_refuse(args):
    values = {"neftune_noise_alpha": 5.0, "train_sampling_strategy": "batch_rebalance"}
    problems, _ = examined(args(**values), Layout(tp=2))
    assert {problem.field.rpartition(".")[2] for problem in problems} == set(values)
    (problem,) = examined(args(**values), Layout(dp_shard=2))[0]
    assert problem.value == "batch_rebalance" and problem.remedy == 'use "group_by_length"'


def test_a_field_with_another_name_is_noted(args):
    [note] = examined(args(ddp_bucket_cap_mb=5), Layout())[1]
    assert "parallel.bucket_mib" in note


def test_auto_and_missing_keys_follow_transformers(settings):
    """The data-parallel ranks take the place of all processes."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rates = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config = {
        **dict.fromkeys((*sizes, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "parallel": {"tp": 2},
        "optimizer": {"type": "AdamW", "params": rates},
    }
    resolved = settings(config, world=4, bf16=True, adam_beta2=0.95)
    batch = resolved.batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation) == (8, 2, 2)
    assert resolved.gradient_clipping == 0.5 and resolved.precision.compute is not None
    expected = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert resolved.optimizer.params == expected

    resolved = settings({}, bf16=True)
    assert resolved.batch.train_batch_size == 8
    assert (resolved.gradient_clipping, resolved.seed) == (0.5, 42)
    assert resolved.precision.compute is not None
    assert settings({}, torch_compile=True).compile.enabled


@pytest.mark.parametrize("name", recompute_fields(TrainingArguments))
def test_recompute_has_two_names(settings, name):
    recompute = settings({}, **{name: True, f"{name}_kwargs": {"every_n_layers": 2}}).recompute
    assert (recompute.mode, recompute.every) == ("full", 2)


@pytest.mark.parametrize(
    ("config", "world", "expected"),
    [
        (
            {"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": True}},
            2,
            {"train_micro_batch_size_per_gpu", "bf16.enabled"},
        ),
        # The loss is the model's, which reads full sequences and has none of these terms.
        ({"parallel": {"cp": 2}}, 2, {"parallel.cp"}),
        (
            {"experts": {"z_loss": 0.001, "balance": "global"}, "parallel": {"ep": 2, "tp": 2}},
            4,
            {"parallel.ep", "experts.z_loss", "experts.balance"},
        ),
    ],
)
def test_contradictions_are_reported_together(settings, config, world, expected):
    with pytest.raises(ConfigError) as error:
        settings(config, world=world)
    assert {problem.field for problem in error.value.problems} == expected


def test_an_optimizer_in_the_backward_is_refused(settings):
    config = {"parallel": {"optimizer_in_backward": True}}
    with pytest.raises(ConfigError, match=r"parallel.optimizer_in_backward"):
        settings(config, gradient_accumulation_steps=1, max_grad_norm=0)


def test_auto_values_of_a_schedule(args):
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    scheduler = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    warmup = args(warmup_steps=3)
    config, _ = settings_of({"scheduler": scheduler}, warmup, world_size=2, hidden_size=32)
    schedule = schedule_of(config, warmup, world_size=2, max_steps=17)
    assert schedule.params == dict(zip(names, (0.0, 1e-2, 3, 17), strict=True))


def test_deepspeed_arguments_are_left_to_plait(tmp_path):
    """DeepSpeed need not be installed, and the field survives a copy of the arguments."""
    config = {"zero_optimization": {"stage": 1}}
    args = arguments(transformers.TrainingArguments, str(tmp_path), deepspeed=config)
    assert args.deepspeed_plugin is None and args.to_dict()["deepspeed"] == config
    with pytest.raises(InputError, match=r"plait.hf.Trainer"):
        transformers.Trainer(model(), args)
    with pytest.raises(ConfigError, match="pass one of them"):
        Trainer(model(), args, plait_config={"zero_optimization": {"stage": 2}})


def test_wrap_makes_a_trainer_of_a_subclass():
    class CustomTrainer(transformers.Trainer):
        pass

    wrapped = wrap(CustomTrainer)
    assert wrapped.__name__ == "CustomTrainer" and issubclass(wrapped, CustomTrainer)
    assert wrap(wrapped) is wrapped and wrap(Trainer) is Trainer
    assert issubclass(Seq2SeqTrainer, transformers.Seq2SeqTrainer)
    with pytest.raises(InputError, match="a subclass of transformers.Trainer"):
        wrap(dict)


def test_unsupported_generation_is_refused_before_training(tmp_path, settings):
    generating = partial(arguments, Seq2SeqTrainingArguments, str(tmp_path))
    with pytest.raises(ConfigError, match=r"generation_num_beams.*without beams"):
        Seq2SeqTrainer(model(), generating(predict_with_generate=True, generation_num_beams=4))
    args = generating(predict_with_generate=True)
    encoder = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    for kind, config, is_supported in (
        (model(), {"parallel": {"tp": 2, "pp": 2}}, True),
        (model(), {"parallel": {"ep": 2}}, False),
        (encoder, {}, True),
        (encoder, {"zero_optimization": {"stage": 1}}, True),
        (encoder, {"parallel": {"tp": 2}}, False),
    ):
        problems = problems_of(kind, args, settings(config, world=4))
        expected = [] if is_supported else ["TrainingArguments.predict_with_generate"]
        assert [problem.field for problem in problems] == expected
