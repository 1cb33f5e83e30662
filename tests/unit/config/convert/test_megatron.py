"""Megatron's flags as a configuration."""

import pytest

from plait.config.convert.conversion import load_foreign
from plait.config.convert.megatron import DISTRIBUTED, FLAGS, LAYERS_PER_STAGE
from plait.config.dialects.deepspeed import TABLE
from plait.config.dialects.keys import schema_fields
from plait.config.resolving.resolve import load, resolve
from plait.config.schema.config import Status
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import rows

TARGETS = {"optimizer.params.beta1", "optimizer.params.beta2", DISTRIBUTED, LAYERS_PER_STAGE}
"""What `megatron` puts together with other flags."""


def split(line):
    return line.split()


def problems(*flags):
    with pytest.raises(ConfigError) as error:
        load_foreign(list(flags))
    return [str(problem) for problem in error.value.problems]


def test_flags_and_the_same_names_in_a_file():
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "num_layers": 48}
    text = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 48"
    flags, file = load_foreign(split(text)), load(sizes)
    for config in (flags, file):
        assert (config.parallel.tp, config.parallel.pp, config.num_layers) == (4, 2, 48)
    assert flags.origin("parallel.tp") == "flag: --tensor-model-parallel-size"


def test_load_names_the_command_that_converts():
    with pytest.raises(ConfigError, match="run: plait config convert -- --bf16 --lr 1e-4"):
        load(["--bf16", "--lr", "1e-4"])


def test_a_training_command():
    flags = split(
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 "
        "--overlap-grad-reduce --micro-batch-size 1 --global-batch-size 16 --lr 3e-4 --weight-decay=0.1 --adam-beta1 0.9 "
        "--adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 0.5 --train-iters 100 --seed 1234 --save runs/a --load runs/a "
        "--save-interval 10 --num-layers 32 --hidden-size 4096 --swiglu --data-path 0.5 corpus_a 0.5 corpus_b "
        "--tokenizer-type GPT2BPETokenizer --lr-decay-style constant"
    )
    config = load_foreign(flags)
    made = resolve(config, world_size=16)
    layout = made.layout
    assert (layout.tp, layout.cp, layout.dp_shard, made.data_parallel.stage) == (2, 2, 4, 1)
    assert made.tensor_parallel.sequence_parallel
    assert (made.batch.accumulation, made.gradient_clipping, made.seed) == (4, 0.5, 1234)
    optimizer = {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    assert made.optimizer.params == optimizer
    schedule = {"decay_style": "constant", "total_num_steps": 100}
    assert made.scheduler.params == schedule
    assert (made.precision.compute, made.precision.reduce) == ("bfloat16", "float32")
    assert (made.run.folder, made.run.steps, made.run.checkpoint_every) == ("runs/a", 100, 10)
    sources = (made.sources["optimizer.params.lr"], made.sources["run.seed"])
    assert sources == ("flags", "flag: --seed")
    keys = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    assert [row.key for row in config.provenance.rows] == keys
    statuses = {row.key: str(row.status) for row in config.provenance.rows}
    assert statuses["--hidden-size"] == "ignored"


def test_sharding_strategies_are_stages():
    for stage, strategy in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params")):
        flags = ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
        assert load_foreign(flags).zero_optimization.stage == stage


def test_one_beta_keeps_the_default_of_the_other():
    params = load_foreign(["--lr", "1e-3", "--adam-beta2", "0.95"]).optimizer.params
    assert params == {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01, "eps": 1e-8}
    other = load_foreign(["--lr", "1e-3", "--adam-beta1", "0.8"]).optimizer
    assert other.params["betas"] == (0.8, 0.999)


def test_what_flags_leave_out_is_megatrons():
    """D6: linear decay, weight decay 0.01, fp16 from 2^32, seed 1234, gradients of bf16 reduced in float32; each with its source."""
    flags = "--micro-batch-size 1 --lr 1e-4 --train-iters 50 --fp16"
    made = resolve(load_foreign(split(flags)), world_size=2)
    assert made.scheduler.type == "MegatronLR"
    assert made.scheduler.params["decay_style"] == "linear"
    assert made.optimizer.params["weight_decay"] == 0.01
    assert (made.seed, made.run.validate_every, made.precision.reduce) == (1234, 1000, "float16")
    assert made.precision.loss_scale.initial_scale_power == 32
    for path in ("scheduler.params.decay_style", "optimizer.params.weight_decay", "run.seed", "fp16.initial_scale_power"):  # fmt: skip
        assert made.sources[path] == "Megatron's default", path
    for flags, dtype in (("--bf16", "float32"), ("--bf16 --grad-reduce-in-bf16", "bfloat16")):
        bf16 = resolve(load_foreign(split(f"--micro-batch-size 1 {flags}")), world_size=2)
        assert (bf16.precision.reduce, bf16.scheduler) == (dtype, None)
    overrides = ["optimizer.params.weight_decay=0.3", "run.seed=3"]
    over = resolve(load_foreign(split("--micro-batch-size 1 --lr 1"), overrides), world_size=1)
    assert (over.optimizer.params["weight_decay"], over.seed) == (0.3, 3)
    assert over.sources["run.seed"] == "override"
    message = "--lr: --weight-decay describes an optimizer, and Megatron-LM has no default for its learning rate; pass it"
    assert problems("--weight-decay", "0.1") == [message]


def test_a_schedule_by_flags():
    """E8: the schedule has all values of the flags."""
    flags = "--lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters 90 --train-iters 100"
    scheduler = load_foreign(split(flags)).scheduler
    assert scheduler.type == "MegatronLR"
    lengths = {"warmup_num_steps": 10, "total_num_steps": 90}
    assert scheduler.params == {"min_lr": 1e-5, "decay_style": "cosine", **lengths}


def test_stages_by_their_layers_and_sharding_by_its_strategy():
    flags = "--num-layers 24 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3"  # fmt: skip
    assert load_foreign(split(flags)).parallel.pipeline.stages_per_rank == 2
    assert "24 % 20 = 4" in problems(*split(flags.replace(" 3", " 5")))[0]
    assert "both" not in problems("--num-layers-per-virtual-pipeline-stage", "3")[0]
    fsdp = "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
    assert load_foreign(split(fsdp)).zero_optimization.stage == 3
    assert load_foreign(["--use-distributed-optimizer"]).zero_optimization.stage == 1


def test_selective_recomputes_what_megatron_does():
    """D6: all but the products with weights is recomputed. Plait's default keeps attention, which Megatron-LM computes again."""
    flags = "--recompute-granularity selective --recompute-modules core_attn"
    recompute = load_foreign(split(flags)).parallel.recompute
    assert (recompute.mode, recompute.keep) == ("selective", ("matmul",))
    assert "keeps the products with weights" in problems("--recompute-modules", "mlp")[0]


def test_loss_scale_flags():
    flags = "--fp16 --initial-loss-scale 65536 --loss-scale-window 500 --min-loss-scale 2 --hysteresis 3"
    fp16 = load_foreign(split(flags)).fp16
    assert (fp16.initial_scale_power, fp16.loss_scale_window) == (16, 500)
    assert (fp16.min_loss_scale, fp16.hysteresis) == (2, 3)
    message = "--initial-loss-scale = '1000': is not a power of two; use for example 65536"
    assert problems("--initial-loss-scale", "1000") == [message]


def test_overrides_win_over_flags():
    config = load_foreign(["--tensor-model-parallel-size", "4"], ["parallel.tp=2"])
    assert (config.parallel.tp, config.origin("parallel.tp")) == (2, "override")


REFUSALS = """
    --tensor-model-paralel-size 4 -> --tensor-model-paralel-size: unknown flag; did you mean --tensor-model-parallel-size?
    --zzz 4 -> --zzz: unknown flag; leave it out, or set the key
    --micro-batch-size -> --micro-batch-size: takes one value, but 0 are given; write one after it
    --micro-batch-size 1 2 -> --micro-batch-size = '1 2': takes one value, but 2 are given; write one after it
    --bf16 true -> --bf16 = 'true': takes no value; leave the value out
    --micro-batch-size four -> --micro-batch-size = 'four': must be a whole number; write a whole number
    --data-parallel-sharding-strategy all -> --data-parallel-sharding-strategy = 'all': is none of no_shard, optim,
    --num-layers-per-virtual-pipeline-stage 2 -> --num-layers-per-virtual-pipeline-stage = 2: the stages of a rank are --num-layers /
    --recompute-num-layers 2 -> --recompute-num-layers = 2: blocks are recomputed one by one
    --expert-tensor-parallel-size 8 -> --expert-tensor-parallel-size = 8: experts are distributed
    --lr-decay-style wavy -> --lr-decay-style = 'wavy': is none of constant, linear, cosine, inverse-square-root, WSD
    --save a --load b -> --load = 'b': --save says 'a'; both set run.folder and disagree; keep one of them
    --fp16 --bf16 --use-torch-fsdp2 --use-distributed-optimizer -> both set zero_optimization.stage and disagree
    8 --bf16 -> the command line = '8': begins with a value and not with a flag
"""


def check_refusal(row):
    found = problems(*row[0].split())
    assert any(row[1] in text for text in found), found


def test_refusals():
    check_rows(rows(REFUSALS), check_refusal)


def test_refused_flags_are_accepted_where_they_ask_for_nothing():
    flags = "--expert-model-parallel-size 1 --weight-decay-incr-style constant"
    assert load_foreign(split(flags)).parallel.tp == 1


def test_every_flag_leads_somewhere_or_says_why_not():
    for name, flag in FLAGS.items():
        assert "-" not in name
        if flag.status is Status.SUPPORTED:
            known = {*schema_fields(), *TABLE, *TARGETS}
            assert flag.target in known or flag.target.rpartition(".")[0] in schema_fields(), name
        else:
            assert flag.why, name
            assert (flag.status is Status.REFUSED) == bool(flag.remedy), name


def test_flags_without_meaning_change_nothing():
    ignored = [name for name, flag in FLAGS.items() if flag.status is Status.IGNORED]
    check_rows({name: name for name in ignored}, check_meaningless)


def check_meaningless(name):
    """Check that a flag resolves to what no flag does, and that its meaning is explained."""
    value = {"switch": [], "value": ["1"], "values": ["1", "x"]}[FLAGS[name].takes]
    config = load_foreign([f"--{name.replace('_', '-')}", *value])
    assert config.model_dump() == load_foreign([]).model_dump()
    assert config.provenance.rows[0].meaning == FLAGS[name].why
