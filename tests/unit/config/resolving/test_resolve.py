"""What is left open is decided by DeepSpeed's and Hugging Face's rules, and every value says where it came from."""

import pytest

from plait.config.resolving.resolve import Config, Resolved, load, resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import BATCH, resolved, rows, written

MIB = 2**20


def problems(tree, **context):
    with pytest.raises(ConfigError) as error:
        resolve(load({**BATCH, **tree}), **{"world_size": 4, **context})
    return [str(problem) for problem in error.value.problems]


def test_gradients_are_reduced_in_the_compute_dtype():
    """A24: a default does not depend on unrelated keys."""
    model = written("model.config.model_type=llama")
    others = ({}, {"parallel": {}}, {"run": {}}, {"data": {}}, model, {"_comment": "x"})
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        for more in others:
            made = resolved({name: {"enabled": True}, **more})
            assert (made.precision.compute, made.precision.reduce) == (dtype, dtype)
            source = made.sources["precision.reduce"]
            assert source == "default, DeepSpeed's: the dtype of the computation"
    for section in ({}, {"run": {}}):
        found = resolved(section).precision
        assert found.compute is found.reduce is found.loss_scale is None
        assert found.check_overflow is False


def test_communication_data_type_is_the_dtype_of_the_reduction():
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "BF16": "bfloat16", "float32": "float32"}  # fmt: skip
    for name, dtype in names.items():
        for tree in ({}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": True}, "parallel": {}}):
            made = resolved({**tree, "communication_data_type": name})
            assert made.precision.reduce == dtype
            assert made.sources["precision.reduce"] == "file: communication_data_type"


def test_overflow_is_checked_as_deepspeed_does():
    for text, checked in {
        "bf16.enabled=true": True,
        "bf16.enabled=true bf16.check_grad_overflow=false": False,
        "bf16.enabled=true bf16.check_overflow=false": False,
        "fp16.enabled=true bf16.check_grad_overflow=false": True,
    }.items():
        assert resolved(written(text)).precision.check_overflow is checked, text


def test_the_loss_scale_has_deepspeeds_names_and_defaults():
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")  # fmt: skip
    default, given = (0.0, 16, 1000, 2, False, 1.0), (128, 8, 5, 3, True, 2)
    for settings, expected in (
        ({}, default),
        (dict(zip(names, given, strict=True)), given),
        (dict.fromkeys(names, "auto"), default),
    ):
        scale = resolved({"fp16": {"enabled": True, **settings}}).precision.loss_scale
        assert scale is not None and tuple(scale.model_dump().values()) == expected


def test_contradictions_of_precision():
    assert problems(written("fp16.enabled=true bf16.enabled=true")) == [
        "fp16.enabled and bf16.enabled: are both true, but a model computes in one dtype; set one of them to false"
    ]
    low = "fp16.enabled=true fp16.initial_scale_power=2 fp16.min_loss_scale=8"
    assert problems(written(low)) == [
        "fp16.min_loss_scale = 8.0: the first scale, 2^2 = 4, is smaller; use at most 4, or raise fp16.initial_scale_power"
    ]
    assert resolved(written(f"{low} fp16.loss_scale=3")).precision.loss_scale is not None


HF_FILE = written("""
    train_batch_size=auto train_micro_batch_size_per_gpu=auto gradient_accumulation_steps=auto gradient_clipping=auto
    fp16.enabled=auto bf16.enabled=auto
    optimizer.type=AdamW optimizer.params.lr=auto optimizer.params.betas=auto optimizer.params.eps=auto optimizer.params.weight_decay=auto
    scheduler.type=WarmupDecayLR scheduler.params.warmup_min_lr=auto scheduler.params.warmup_max_lr=auto
    scheduler.params.warmup_num_steps=auto scheduler.params.total_num_steps=auto
    zero_optimization.stage=3 zero_optimization.reduce_bucket_size=auto zero_optimization.stage3_prefetch_bucket_size=auto
    zero_optimization.stage3_param_persistence_threshold=auto zero_optimization.stage3_gather_16bit_weights_on_model_save=true
""")


def test_auto_is_what_the_caller_says():
    arguments = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16.enabled": True,
        "optimizer.params.lr": 2e-5,
        "optimizer.params.betas": [0.8, 0.99],
        "scheduler.params.warmup_num_steps": 30,
    }
    made = resolved(HF_FILE, total_steps=700, auto=arguments)
    batch = made.batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation) == (128, 8, 4)
    assert (made.gradient_clipping, made.precision.compute) == (0.5, "bfloat16")
    assert made.optimizer.params == {"lr": 2e-5, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.0}  # fmt: skip
    assert made.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 2e-5,
        "warmup_num_steps": 30,
        "total_num_steps": 700,
    }
    assert made.sources["optimizer.params.lr"] == "auto: the caller's"
    assert made.sources["scheduler.params.warmup_max_lr"] == "auto: the optimizer's lr"
    assert made.sources["train_batch_size"] == "derived: micro 8 x accumulation 4 x dp 4"


def test_auto_without_a_caller_follows_the_published_rules():
    made = resolved({**HF_FILE, **BATCH, "bf16": {"enabled": True}}, total_steps=700)
    found = (made.batch.accumulation, made.gradient_clipping, made.precision.compute)
    assert found == (1, 1.0, "bfloat16")
    defaults = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert made.optimizer.params == defaults
    assert "optimizer.params.lr = 5e-05" in (made.assumed() or "")
    for path, source in {
        "fp16.enabled": "auto: off, because bf16 is on",
        "gradient_accumulation_steps": "auto: 1",
        "gradient_clipping": "auto: 1.0, the default of DeepSpeed and of Transformers",
    }.items():
        assert made.sources[path] == source
    # What `faults.non_finite` does follows from the device, too.
    assert "auto" not in str(made.model_dump(exclude={"sources", "run", "faults"}))
    assert made.faults.non_finite == "auto"


def test_auto_that_nothing_decides_names_the_field():
    found = problems({**HF_FILE, "train_micro_batch_size_per_gpu": "auto"})
    assert [text.split(":")[0] for text in found] == [
        "train_micro_batch_size_per_gpu = 'auto'",
        "fp16.enabled = 'auto'",
        "bf16.enabled = 'auto'",
        "scheduler.params.total_num_steps = 'auto'",
    ]


def test_half_precision_left_open_is_never_float32_in_silence():
    """E4: "auto" is a choice of the command line. It is derived from the other key, or refused by name."""
    for text, refused in (
        ("bf16.enabled=auto", "bf16.enabled"),
        ("fp16.enabled=auto bf16.enabled=false", "fp16.enabled"),
    ):
        assert [problem.split(" ")[0] for problem in problems(written(text))] == [refused]
    made = resolved(written("bf16.enabled=auto fp16.enabled=true"))
    assert made.precision.compute == "float16"
    assert made.sources["bf16.enabled"] == "auto: off, because fp16 is on"
    neither = resolved(written("bf16.enabled=auto fp16.enabled=auto"), auto={"bf16.enabled": False})
    assert neither.precision.compute is None
    assert neither.sources["fp16.enabled"] == "auto: off, as the caller chose neither"


def test_the_schedules_length_is_the_callers_or_the_runs():
    text = "scheduler.type=WarmupDecayLR scheduler.params.total_num_steps=auto run.steps=30"
    for context, steps, source in (
        ({}, 30, "auto: run.steps"),
        ({"total_steps": 7}, 7, "auto: the caller's"),
    ):
        made = resolved(written(text), **context)
        assert made.scheduler.params["total_num_steps"] == steps
        assert made.sources["scheduler.params.total_num_steps"] == source


def test_the_highest_rate_of_a_schedule_is_the_optimizers():
    tree = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    for optimizer, rate in (
        ({}, 1e-3),
        ({"type": "SGD", "params": {"lr": 0.5}}, 0.5),
        ({"type": "Adagrad"}, 1e-2),
        ({"type": "Lion"}, 1e-3),
    ):
        assert resolved({**tree, "optimizer": optimizer}).scheduler.params["warmup_max_lr"] == rate
    (problem,) = problems({**tree, "optimizer": {"type": "some.module.Optimizer"}})
    words = "scheduler.params.warmup_max_lr = 'auto': is the optimizer's lr, which optimizer.params does not give"
    assert problem.startswith(words)


def check_bucket(row):
    assert resolved(written(row[0])).data_parallel.bucket_bytes == float(row[1]) * MIB


BUCKETS = """
    parallel.tp=1 -> 25
    parallel.bucket_mib=1.5 -> 1.5
    zero_optimization.reduce_bucket_size=262144 -> 1
    zero_optimization.reduce_bucket_size=262144 communication_data_type=bf16 -> 0.5
    zero_optimization.reduce_bucket_size=auto -> 25
    zero_optimization.reduce_bucket_size=auto model.config.model_type=gpt2 model.config.n_embd=512 -> 1
    zero_optimization.reduce_bucket_size=1000 zero_optimization.stage=2 -> 25
    zero_optimization.reduce_bucket_size=1000 bf16.enabled=true -> 25
    zero_optimization.reduce_bucket_size=262144 parallel.bucket_mib=1 -> 1
"""
"""MiB of a gradient bucket."""


def test_bucket():
    check_rows(rows(BUCKETS), check_bucket)
    automatic = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    assert resolved(automatic, hidden_size=64).data_parallel.bucket_bytes == 4 * 64 * 64


def test_the_links_decide_the_bucket_where_nothing_else_does():
    """DeepSpeed's key wins."""
    for text, by_links in {
        "parallel.tp=1": True,
        "zero_optimization.reduce_bucket_size=auto": True,
        "parallel.bucket_mib=25": False,
        "zero_optimization.reduce_bucket_size=1000": False,
    }.items():
        assert resolved(written(text)).data_parallel.bucket_by_links is by_links, text


WRONG = """
    zero_optimization.reduce_bucket_size=1000 parallel.bucket_mib=1 -> zero_optimization.reduce_bucket_size = 1000 and parallel.bucket_mib = 1: both set the bucket and disagree: 1000 x 4 bytes = 0.0038147 MiB; keep one of them
    data_parallel_size=2 parallel.tp=1 -> data_parallel_size = 2: dp_replicate 4 x dp_shard 1 = 4 with 4 processes (dp_replicate=4); leave it out or set it to 4
    num_layers=2 parallel.pp=4 -> parallel.pp = 4: a pipeline stage has at least one layer, but the model has 2; use 2 or fewer
    model.config.model_type=llama model.config.num_hidden_layers=3 parallel.pp=4 -> parallel.pp = 4: a pipeline stage has at least one layer, but the model has 3;
    model.config.model_type=gpt2 model.config.n_layer=3 num_layers=2 -> num_layers = 2: the model section describes 3 layers; leave it out or set it to 3
"""


def test_sizes_that_contradict_each_other():
    check_rows(rows(WRONG), check_impossible)
    assert resolved({"data_parallel_size": 4}).layout.dp == 4


def test_the_callers_batch_size_replaces_a_missing_one():
    made = resolve(load({}), world_size=2, micro_batch_size=3)
    assert made.batch.train_batch_size == 6
    assert made.sources["train_micro_batch_size_per_gpu"] == "the caller's"
    made = resolve(load({"train_batch_size": 8}), world_size=2, micro_batch_size=3)
    assert made.batch.micro_batch_size == 4


def test_defaults_are_those_of_deepspeed():
    made = resolved({})
    assert made.gradient_clipping == 1.0
    assert made.data_parallel.stage == 0
    assert made.data_parallel.unused_parameters is True
    assert made.optimizer.type == "AdamW"
    assert made.scheduler is None
    assert (made.seed, made.compile.enabled) == (0, False)


def test_a_resolved_configuration_survives_its_own_json():
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    others = written("scheduler.type=WarmupLR scheduler.params.warmup_num_steps=3 fp16.enabled=true model.config.model_type=llama")  # fmt: skip
    made = resolved({"optimizer": optimizer, **others, "data": {}, "run": {}})
    assert Resolved.model_validate_json(made.model_dump_json()) == made


def test_a_configuration_made_in_python_knows_its_sources():
    text = "train_micro_batch_size_per_gpu=2 bf16.enabled=true optimizer.params.lr=1e-3"
    config = Config.model_validate(written(text))
    made = resolve(config, world_size=2)
    assert made.precision.reduce == "bfloat16"
    for path in ("train_micro_batch_size_per_gpu", "optimizer.params.lr"):
        assert made.sources[path] == "given"
    assert made.sources["gradient_clipping"] == "default"
    assert load(config) is config


@pytest.mark.parametrize("source", [5, None])
def test_what_is_no_configuration_is_an_error_of_the_program(source):
    with pytest.raises(TypeError, match="a configuration is a path or a mapping, not"):
        load(source)


def test_the_warning_names_the_keys_that_mean_nothing():
    assert load({"bf16": {"enabled": True}}).provenance.warning() is None
    names = ("overlap_comm", "contiguous_gradients", "sub_group_size", "reduce_scatter", "allgather_partitions")  # fmt: skip
    values = {**dict.fromkeys(names, True), "sub_group_size": 1e9}
    assert load({"zero_optimization": values}).provenance.warning() == (
        "the configuration: ignored are zero_optimization.overlap_comm, zero_optimization.contiguous_gradients, "
        "zero_optimization.sub_group_size, zero_optimization.reduce_scatter and 1 more; `plait config explain` has the reasons"
    )


def test_compression():
    def made(stage, **parallel):
        return resolved({"zero_optimization": {"stage": stage}, "parallel": parallel}, world_size=4)

    def scheme(stage, **parallel):
        """Bits of gradients and of weights, rank, error feedback, and whether it can be revoked."""
        return tuple(made(stage, **parallel).compression.scheme.model_dump().values())

    assert scheme(0, compress_gradients="int8") == (8, 0, 0, True, False)
    assert scheme(2, compress_gradients="int4", compress_weights="int8") == (4, 8, 0, False, False)
    assert scheme(2, compress_gradients="int4", error_feedback=True)[3]
    assert scheme(0, compress_gradients="powersgd", powersgd_rank=2)[2] == 2
    # At stage 2 weights have no second copy, and a copy over all 4 ranks is no second one.
    for stage, size, expected in ((2, 2, 0), (3, 2, 2), (3, 4, 0)):
        assert made(stage, secondary_partition=size).data_parallel.secondary_partition == expected


IMPOSSIBLE = """
    zero_optimization.stage=2 parallel.compress_gradients=powersgd -> parallel.compress_gradients = 'powersgd': factors a matrix's full gradient, and ZeRO stage 2 reduces it in shards
    bf16.enabled=true parallel.compress_gradients=int8 -> parallel.compress_gradients = 'int8': at ZeRO stage 0 with bf16 or fp16, torch reduces gradients block by block
    parallel.all_reduce=ring parallel.transport=shared-memory -> parallel.all_reduce = 'ring': parallel.transport is shared-memory, which has its own all-reduce
    zero_optimization.stage=3 parallel.secondary_partition=3 -> parallel.secondary_partition = 3: does not divide parallel.dp_shard, which is 4; use 2, 4
    zero_optimization.stage=3 parallel.secondary_partition=2 parallel.tp=3 -> parallel: pp 1 x cp 1 x tp 3 = 3 and 4 % 3 = 1
"""
"""The last reports the layout only, and not a partition of the processes that it does not have."""


def check_impossible(row):
    (problem,) = problems(written(row[0]))
    assert problem.startswith(row[1])


def test_compression_that_cannot_be_had():
    check_rows(rows(IMPOSSIBLE), check_impossible)
