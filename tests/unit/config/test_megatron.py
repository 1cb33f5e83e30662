"""Megatron's flags as a configuration."""

from __future__ import annotations

import pytest

from plait.config.deepspeed import TABLE, Status
from plait.config.keys import fields
from plait.config.megatron_flags import FLAGS
from plait.config.resolve import load, resolve
from plait.errors import ConfigError

TARGETS = {"optimizer.params.beta1", "optimizer.params.beta2"}  # put together as betas


def problems(*flags: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(list(flags))
    return [str(problem) for problem in error.value.problems]


def words(line: str) -> list[str]:
    return line.split()


def test_the_literal_example() -> None:
    config = load(["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2", "--num-layers", "48"])
    assert (config.parallel.tp, config.parallel.pp, config.num_layers) == (4, 2, 48)
    assert not config.is_deepspeed
    assert config.origin("parallel.tp") == "flag: --tensor-model-parallel-size"
    layout = resolve(config, world_size=32, micro_batch_size=1).layout
    assert (layout.tp, layout.pp, layout.dp_replicate, layout.dp_shard) == (4, 2, 4, 1)


def test_the_same_names_in_a_file() -> None:
    config = load({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "num_layers": 48})
    assert (config.parallel.tp, config.parallel.pp, config.num_layers) == (4, 2, 48)


def test_a_training_command() -> None:
    flags = words(
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 "
        "--overlap-grad-reduce --micro-batch-size 1 --global-batch-size 16 --lr 3e-4 --weight-decay=0.1 --adam-beta1 0.9 "
        "--adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 0.5 --train-iters 100 --seed 1234 --save runs/a --load runs/a "
        "--save-interval 10 --num-layers 32 --hidden-size 4096 --swiglu --data-path 0.5 corpus_a 0.5 corpus_b "
        "--tokenizer-type GPT2BPETokenizer --lr-decay-style constant"
    )
    config = load(flags)
    made = resolve(config, world_size=16)
    assert (made.layout.tp, made.layout.cp, made.layout.dp_shard, made.data_parallel.stage) == (2, 2, 4, 1)
    assert made.tensor_parallel.sequence_parallel
    assert (made.batch.accumulation, made.gradient_clipping, made.seed) == (4, 0.5, 1234)
    assert made.optimizer.params == {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    assert (made.precision.compute, made.precision.reduce) == ("bfloat16", "float32")
    assert (made.run.folder, made.run.steps, made.run.checkpoint_every) == ("runs/a", 100, 10)
    assert (made.sources["optimizer.params.lr"], made.sources["run.seed"]) == ("flags", "flag: --seed")
    assert [row.key for row in config.provenance.rows] == [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    assert {row.key: str(row.status) for row in config.provenance.rows}["--hidden-size"] == "meaningless"


@pytest.mark.parametrize(("strategy", "stage"), [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3)])
def test_sharding_strategies_are_stages(strategy: str, stage: int) -> None:
    assert load(["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]).zero_optimization.stage == stage


def test_one_beta_keeps_the_default_of_the_other() -> None:
    config = load(["--adam-beta2", "0.95"])
    assert config.optimizer is not None
    assert config.optimizer.params == {"betas": (0.9, 0.95)}


def test_loss_scale_flags() -> None:
    fp16 = load(words("--fp16 --initial-loss-scale 65536 --loss-scale-window 500 --min-loss-scale 2 --hysteresis 3")).fp16
    assert (fp16.initial_scale_power, fp16.loss_scale_window, fp16.min_loss_scale, fp16.hysteresis) == (16, 500, 2, 3)
    assert problems("--initial-loss-scale", "1000") == ["--initial-loss-scale = '1000': is not a power of two; use for example 65536"]


def test_overrides_win_over_flags() -> None:
    config = load(["--tensor-model-parallel-size", "4"], ["parallel.tp=2"])
    assert (config.parallel.tp, config.origin("parallel.tp")) == (2, "override")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--tensor-model-paralel-size 4",
            "--tensor-model-paralel-size: is no flag that Plait knows; did you mean --tensor-model-parallel-size?",
        ),
        ("--zzz 4", "--zzz: is no flag that Plait knows; leave it out, or set the key"),
        ("--micro-batch-size", "--micro-batch-size: takes one value and 0 are given; write one after it"),
        ("--micro-batch-size 1 2", "--micro-batch-size = '1 2': takes one value and 2 are given; write one after it"),
        ("--bf16 true", "--bf16 = 'true': takes no value; leave the value out"),
        ("--micro-batch-size four", "--micro-batch-size = 'four': must be a whole number; write a whole number"),
        ("--data-parallel-sharding-strategy all", "--data-parallel-sharding-strategy = 'all': is none of no_shard, optim,"),
        (
            "--num-layers-per-virtual-pipeline-stage 2",
            "--num-layers-per-virtual-pipeline-stage = 2: stages are given by their number",
        ),
        ("--recompute-num-layers 2", "--recompute-num-layers = 2: blocks are recomputed one by one"),
        ("--expert-model-parallel-size 8", "--expert-model-parallel-size = 8: experts are not distributed in this release"),
        (
            "--lr-decay-style cosine",
            "--lr-decay-style = 'cosine': a schedule is described by the `scheduler` section; add for example --set",
        ),
        ("--save a --load b", "--load = 'b': --save says 'a'; both set run.folder and disagree; keep one of them"),
        ("--fp16 --bf16 --use-torch-fsdp2 --use-distributed-optimizer", "both set zero_optimization.stage and disagree"),
        ("8 --bf16", "the command line = '8': begins with a value and not with a flag"),
    ],
)
def test_refusals(flags: str, message: str) -> None:
    found = problems(*flags.split())
    assert any(message in text for text in found), found


def test_refused_flags_are_accepted_where_they_ask_for_nothing() -> None:
    assert load(["--expert-model-parallel-size", "1", "--lr-decay-style", "constant"]).parallel.tp == 1


def test_the_schedule_of_the_remedy_loads() -> None:
    remedy = FLAGS["lr_decay_style"].remedy
    override = remedy.partition("--set '")[2].removesuffix("'")
    config = load(["--lr", "1e-4"], [override])
    assert config.scheduler is not None
    assert config.scheduler.type == "WarmupCosineLR"


def test_every_flag_leads_somewhere_or_says_why_not() -> None:
    for name, flag in FLAGS.items():
        assert "-" not in name
        if flag.status is Status.SUPPORTED:
            known = {*fields(), *TABLE, *TARGETS}
            assert flag.target in known or flag.target.rpartition(".")[0] in fields(), name
        else:
            assert flag.why, name
            assert (flag.status is Status.REFUSED) == bool(flag.remedy), name


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.status is Status.MEANINGLESS])
def test_flags_without_meaning_change_nothing(name: str) -> None:
    value = {"switch": [], "value": ["1"], "values": ["1", "x"]}[FLAGS[name].takes]
    config = load([f"--{name.replace('_', '-')}", *value])
    assert config.model_dump() == load([]).model_dump()
    assert config.provenance.rows[0].meaning == FLAGS[name].why
