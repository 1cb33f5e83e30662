"""Megatron-LM's flags are converted to settings with Megatron-LM's defaults."""

import pytest

from plait.config.convert.conversion import load_foreign
from plait.config.convert.megatron import DISTRIBUTED, FLAGS, LAYERS_PER_STAGE
from plait.config.dialects.deepspeed import TABLE
from plait.config.dialects.keys import schema_fields
from plait.config.resolving.resolve import load, resolve
from plait.config.schema.config import Status
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import check_refusals

COMBINED = {"optimizer.params.beta1", "optimizer.params.beta2", DISTRIBUTED, LAYERS_PER_STAGE}
"""Targets that the conversion combines with other flags."""


def convert(line, *overrides):
    """Return the configuration of a command line."""
    return load_foreign(line.split(), overrides)


def test_flags_and_their_names_in_a_file_mean_the_same():
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "num_layers": 48}
    line = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 48"
    config = convert(line)
    for same in (config, load(sizes)):
        assert (same.parallel.tp, same.parallel.pp, same.num_layers) == (4, 2, 48)
    assert config.origin("parallel.tp") == "flag: --tensor-model-parallel-size"


def test_load_names_the_command_that_converts():
    with pytest.raises(ConfigError, match="run: plait config convert -- --bf16 --lr 1e-4"):
        load(["--bf16", "--lr", "1e-4"])


TRAINING = """
    --tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --bf16 --overlap-grad-reduce --micro-batch-size 1
    --global-batch-size 16 --lr 3e-4 --weight-decay=0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --adam-eps 1e-8 --clip-grad 0.5 --train-iters 100 --seed 1234 --save runs/a --load runs/a
    --save-interval 10 --num-layers 32 --hidden-size 4096 --swiglu
    --data-path 0.5 corpus_a 0.5 corpus_b --tokenizer-type GPT2BPETokenizer
    --lr-decay-style constant
"""


def test_a_training_command():
    config = convert(TRAINING)
    resolved = resolve(config, world_size=16)
    layout = resolved.layout
    assert (layout.tp, layout.cp, layout.dp_shard) == (2, 2, 4)
    assert resolved.data_parallel.stage == 1
    assert resolved.tensor_parallel.sequence_parallel
    assert resolved.batch.accumulation == 4
    assert (resolved.gradient_clipping, resolved.seed) == (0.5, 1234)
    optimizer = {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    assert resolved.optimizer.params == optimizer
    assert resolved.scheduler.params == {"decay_style": "constant", "total_num_steps": 100}
    assert (resolved.precision.compute, resolved.precision.reduce) == ("bfloat16", "float32")
    run = resolved.run
    assert (run.folder, run.steps, run.checkpoint_every) == ("runs/a", 100, 10)
    assert resolved.sources["optimizer.params.lr"] == "flags"
    assert resolved.sources["run.seed"] == "flag: --seed"

    flags = [word.partition("=")[0] for word in TRAINING.split() if word.startswith("--")]
    assert [row.key for row in config.provenance.rows] == flags
    statuses = {row.key: str(row.status) for row in config.provenance.rows}
    assert statuses["--hidden-size"] == "ignored"


def test_sharding_strategies_are_stages():
    for stage, strategy in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params")):
        line = f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
        assert convert(line).zero_optimization.stage == stage
    # The strategy decides if both flags are set.
    line = f"{line} --use-distributed-optimizer"
    assert convert(line).zero_optimization.stage == 3
    assert convert("--use-distributed-optimizer").zero_optimization.stage == 1


def test_one_beta_keeps_the_default_of_the_other():
    params = convert("--lr 1e-3 --adam-beta2 0.95").optimizer.params
    assert params == {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01, "eps": 1e-8}
    params = convert("--lr 1e-3 --adam-beta1 0.8").optimizer.params
    assert params["betas"] == (0.8, 0.999)


def test_what_flags_leave_out_is_megatrons():
    config = convert("--micro-batch-size 1 --lr 1e-4 --train-iters 50 --fp16")
    resolved = resolve(config, world_size=2)
    assert resolved.scheduler.type == "MegatronLR"
    assert resolved.scheduler.params["decay_style"] == "linear"
    assert resolved.optimizer.params["weight_decay"] == 0.01
    assert (resolved.seed, resolved.run.validate_every) == (1234, 1000)
    assert resolved.precision.reduce == "float16"
    assert resolved.precision.loss_scale.initial_scale_power == 32
    for path in (
        "scheduler.params.decay_style",
        "optimizer.params.weight_decay",
        "run.seed",
        "fp16.initial_scale_power",
    ):
        assert resolved.sources[path] == "Megatron's default", path


@pytest.mark.parametrize(
    ("flags", "dtype"), [("--bf16", "float32"), ("--bf16 --grad-reduce-in-bf16", "bfloat16")]
)
def test_gradients_of_bf16_are_reduced_as_in_megatron(flags, dtype):
    resolved = resolve(convert(f"--micro-batch-size 1 {flags}"), world_size=2)
    assert (resolved.precision.reduce, resolved.scheduler) == (dtype, None)


def test_overrides_win_over_flags_and_megatrons_defaults():
    config = convert("--tensor-model-parallel-size 4", "parallel.tp=2")
    assert (config.parallel.tp, config.origin("parallel.tp")) == (2, "override")
    overrides = ["optimizer.params.weight_decay=0.3", "run.seed=3"]
    resolved = resolve(convert("--micro-batch-size 1 --lr 1", *overrides), world_size=1)
    assert (resolved.optimizer.params["weight_decay"], resolved.seed) == (0.3, 3)
    assert resolved.sources["run.seed"] == "override"


def test_a_schedule_has_all_values_of_the_flags():
    line = """
        --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters 90
        --train-iters 100
    """
    scheduler = convert(line).scheduler
    assert scheduler.type == "MegatronLR"
    lengths = {"warmup_num_steps": 10, "total_num_steps": 90}
    assert scheduler.params == {"min_lr": 1e-5, "decay_style": "cosine", **lengths}


def test_layers_per_virtual_stage_give_the_stages():
    line = "--num-layers 24 --pipeline-model-parallel-size 4"
    config = convert(f"{line} --num-layers-per-virtual-pipeline-stage 3")
    assert config.parallel.pipeline.stages_per_rank == 2


def test_selective_recomputes_what_megatron_does():
    """Megatron-LM recomputes attention, which Plait's default keeps."""
    config = convert("--recompute-granularity selective --recompute-modules core_attn")
    recompute = config.parallel.recompute
    assert (recompute.mode, recompute.keep) == ("selective", ("matmul",))


def test_loss_scale_flags():
    fp16 = convert("""
        --fp16 --initial-loss-scale 65536 --loss-scale-window 500 --min-loss-scale 2 --hysteresis 3
    """).fp16
    assert (fp16.initial_scale_power, fp16.loss_scale_window) == (16, 500)
    assert (fp16.min_loss_scale, fp16.hysteresis) == (2, 3)


REFUSALS = """
    --tensor-model-paralel-size 4 -> --tensor-model-paralel-size: unknown flag; \
        did you mean --tensor-model-parallel-size?
    --micro-batch-size -> --micro-batch-size: takes one value, but 0 are given; write one after it
    --micro-batch-size four -> --micro-batch-size = 'four': must be a whole number
    --data-parallel-sharding-strategy all \
        -> --data-parallel-sharding-strategy = 'all': is none of no_shard, optim,
    --num-layers-per-virtual-pipeline-stage 2 \
        -> --num-layers-per-virtual-pipeline-stage = 2: the stages of a rank are --num-layers /
    --num-layers 24 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 \
        -> 24 % 20 = 4
    --recompute-num-layers 2 -> --recompute-num-layers = 2: blocks are recomputed one by one
    --lr-decay-style wavy -> --lr-decay-style = 'wavy': is none of constant, linear, cosine,
    --save a --load b \
        -> --load = 'b': --save says 'a'; both set run.folder and disagree; keep one of them
    --fp16 --bf16 --use-torch-fsdp2 --use-distributed-optimizer \
        -> both set zero_optimization.stage and disagree
    8 --bf16 -> the command line = '8': begins with a value and not with a flag
"""


def test_refusals():
    check_refusals(REFUSALS, convert)


def test_refused_flags_are_accepted_if_they_request_nothing():
    line = "--expert-model-parallel-size 1 --weight-decay-incr-style constant"
    assert convert(line).model_dump() == convert("").model_dump()


def test_every_flag_has_a_target_or_a_reason():
    settings = set(schema_fields())
    targets = {*settings, *TABLE, *COMBINED}
    for name, flag in FLAGS.items():
        assert "-" not in name
        if flag.status is Status.SUPPORTED:
            assert flag.target in targets or flag.target.rpartition(".")[0] in settings, name
        else:
            assert flag.why, name
            assert (flag.status is Status.REFUSED) == bool(flag.remedy), name


def check_ignored(name):
    """Check that a flag changes nothing, and that its meaning is explained."""
    values = {"switch": "", "value": "1", "values": "1 x"}[FLAGS[name].takes]
    config = convert(f"--{name.replace('_', '-')} {values}")
    assert config.model_dump() == convert("").model_dump()
    assert config.provenance.rows[0].meaning == FLAGS[name].why


def test_ignored_flags_change_nothing():
    ignored = [name for name, flag in FLAGS.items() if flag.status is Status.IGNORED]
    check_rows({name: name for name in ignored}, check_ignored)
