"""Open values are decided by the rules of DeepSpeed and Transformers, and name their source."""

import pytest

from plait.config.resolving.resolve import Config, Resolved, load, resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import (
    BATCH,
    check_refusals,
    parse_rows,
    parse_tree,
    resolve_tree,
)

MIB = 2**20
BF16 = {"bf16": {"enabled": True}}


def fields_refused(tree, **context):
    """Return the fields of all problems of a file."""
    with pytest.raises(ConfigError) as error:
        resolve_tree(tree, **context)
    return [problem.field for problem in error.value.problems]


def test_gradients_are_reduced_in_the_compute_dtype():
    model = parse_tree("model.config.model_type=llama")
    # A section about something else changes no dtype.
    for others in ({}, {"parallel": {}}, {"run": {}}, {"data": {}}, model, {"_comment": "x"}):
        for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
            resolved = resolve_tree({name: {"enabled": True}, **others})
            assert (resolved.precision.compute, resolved.precision.reduce) == (dtype, dtype)
            source = resolved.sources["precision.reduce"]
            assert source == "default, DeepSpeed's: the dtype of the computation"
        precision = resolve_tree(others).precision
        assert precision.compute is precision.reduce is precision.loss_scale is None
        assert precision.check_overflow is False


@pytest.mark.parametrize("tree", [{}, BF16, {**BF16, "parallel": {}}])
def test_communication_data_type_is_the_reduction_dtype(tree):
    for name, dtype in (
        ("fp32", "float32"),
        ("fp16", "float16"),
        ("BF16", "bfloat16"),
        ("float32", "float32"),
    ):
        resolved = resolve_tree({**tree, "communication_data_type": name})
        assert resolved.precision.reduce == dtype
        assert resolved.sources["precision.reduce"] == "file: communication_data_type"


def test_overflow_is_checked_as_in_deepspeed():
    for text, checked in {
        "bf16.enabled=true": True,
        "bf16.enabled=true bf16.check_grad_overflow=false": False,
        "bf16.enabled=true bf16.check_overflow=false": False,
        "fp16.enabled=true bf16.check_grad_overflow=false": True,
    }.items():
        assert resolve_tree(parse_tree(text)).precision.check_overflow is checked, text


def test_the_loss_scale_has_deepspeeds_names_and_defaults():
    defaults = {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1.0,
    }
    others = dict(zip(defaults, (128, 8, 5, 3, True, 2), strict=True))
    for settings, expected in (
        ({}, defaults),
        (others, others),
        (dict.fromkeys(defaults, "auto"), defaults),
    ):
        scale = resolve_tree({"fp16": {"enabled": True, **settings}}).precision.loss_scale
        assert tuple(scale.model_dump().values()) == tuple(expected.values())


def test_a_fixed_loss_scale_ignores_the_first_dynamic_one():
    text = "fp16.enabled=true fp16.initial_scale_power=2 fp16.min_loss_scale=8 fp16.loss_scale=3"
    assert resolve_tree(parse_tree(text)).precision.loss_scale is not None


HF_FILE = parse_tree("""
    train_batch_size=auto train_micro_batch_size_per_gpu=auto gradient_accumulation_steps=auto
    gradient_clipping=auto fp16.enabled=auto bf16.enabled=auto
    optimizer.type=AdamW optimizer.params.lr=auto optimizer.params.betas=auto
    optimizer.params.eps=auto optimizer.params.weight_decay=auto
    scheduler.type=WarmupDecayLR
    scheduler.params.warmup_min_lr=auto scheduler.params.warmup_max_lr=auto
    scheduler.params.warmup_num_steps=auto scheduler.params.total_num_steps=auto
    ZERO.stage=3 ZERO.reduce_bucket_size=auto ZERO.stage3_prefetch_bucket_size=auto
    ZERO.stage3_param_persistence_threshold=auto ZERO.stage3_gather_16bit_weights_on_model_save=true
""")


def test_the_caller_decides_auto():
    arguments = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16.enabled": True,
        "optimizer.params.lr": 2e-5,
        "optimizer.params.betas": [0.8, 0.99],
        "scheduler.params.warmup_num_steps": 30,
    }
    resolved = resolve_tree(HF_FILE, total_steps=700, auto=arguments)
    batch = resolved.batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation) == (128, 8, 4)
    assert (resolved.gradient_clipping, resolved.precision.compute) == (0.5, "bfloat16")
    assert resolved.optimizer.params == {
        "lr": 2e-5,
        "betas": (0.8, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert resolved.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 2e-5,
        "warmup_num_steps": 30,
        "total_num_steps": 700,
    }
    assert resolved.sources["optimizer.params.lr"] == "auto: the caller's"
    assert resolved.sources["scheduler.params.warmup_max_lr"] == "auto: the optimizer's lr"
    assert resolved.sources["train_batch_size"] == "derived: micro 8 x accumulation 4 x dp 4"


def test_auto_without_a_caller_follows_the_published_rules():
    resolved = resolve_tree({**HF_FILE, **BATCH, **BF16}, total_steps=700)
    assert (resolved.batch.accumulation, resolved.gradient_clipping) == (1, 1.0)
    defaults = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert resolved.optimizer.params == defaults
    assert "optimizer.params.lr = 5e-05" in (resolved.assumed() or "")
    for path, source in {
        "fp16.enabled": "auto: off, because bf16 is on",
        "gradient_accumulation_steps": "auto: 1",
        "gradient_clipping": "auto: 1.0, the default of DeepSpeed and of Transformers",
    }.items():
        assert resolved.sources[path] == source
    # The device decides `faults.non_finite` later.
    assert "auto" not in str(resolved.model_dump(exclude={"sources", "run", "faults"}))
    assert resolved.faults.non_finite == "auto"


def test_auto_that_nothing_decides_is_refused_by_field():
    assert fields_refused({**HF_FILE, "train_micro_batch_size_per_gpu": "auto"}) == [
        "train_micro_batch_size_per_gpu",
        "fp16.enabled",
        "bf16.enabled",
        "scheduler.params.total_num_steps",
    ]


def test_open_half_precision_never_becomes_float32_silently():
    assert fields_refused(parse_tree("bf16.enabled=auto")) == ["bf16.enabled"]
    text = "fp16.enabled=auto bf16.enabled=false"
    assert fields_refused(parse_tree(text)) == ["fp16.enabled"]

    resolved = resolve_tree(parse_tree("bf16.enabled=auto fp16.enabled=true"))
    assert resolved.precision.compute == "float16"
    assert resolved.sources["bf16.enabled"] == "auto: off, because fp16 is on"

    both = parse_tree("bf16.enabled=auto fp16.enabled=auto")
    neither = resolve_tree(both, auto={"bf16.enabled": False})
    assert neither.precision.compute is None
    assert neither.sources["fp16.enabled"] == "auto: off, as the caller chose neither"


def test_the_schedule_is_as_long_as_the_run():
    text = "scheduler.type=WarmupDecayLR scheduler.params.total_num_steps=auto run.steps=30"
    for context, steps, source in (
        ({}, 30, "auto: run.steps"),
        ({"total_steps": 7}, 7, "auto: the caller's"),
    ):
        resolved = resolve_tree(parse_tree(text), **context)
        assert resolved.scheduler.params["total_num_steps"] == steps
        assert resolved.sources["scheduler.params.total_num_steps"] == source


def test_the_highest_rate_of_a_schedule_is_the_optimizers():
    tree = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    for optimizer, rate in (
        ({}, 1e-3),
        ({"type": "SGD", "params": {"lr": 0.5}}, 0.5),
        ({"type": "Adagrad"}, 1e-2),
    ):
        resolved = resolve_tree({**tree, "optimizer": optimizer})
        assert resolved.scheduler.params["warmup_max_lr"] == rate
    message = "warmup_max_lr = 'auto': is the optimizer's lr, which optimizer.params does not give"
    with pytest.raises(ConfigError, match=message):
        resolve_tree({**tree, "optimizer": {"type": "some.module.Optimizer"}})


BUCKETS = """
    parallel.tp=1 -> 25
    parallel.bucket_mib=1.5 -> 1.5
    ZERO.reduce_bucket_size=262144 -> 1
    ZERO.reduce_bucket_size=262144 communication_data_type=bf16 -> 0.5
    ZERO.reduce_bucket_size=auto -> 25
    ZERO.reduce_bucket_size=auto model.config.model_type=gpt2 model.config.n_embd=512 -> 1
    ZERO.reduce_bucket_size=1000 ZERO.stage=2 -> 25
    ZERO.reduce_bucket_size=1000 bf16.enabled=true -> 25
    ZERO.reduce_bucket_size=262144 parallel.bucket_mib=1 -> 1
"""
"""Sizes of a gradient bucket in MiB."""


def check_bucket(row):
    text, mebibytes = row
    resolved = resolve_tree(parse_tree(text))
    assert resolved.data_parallel.bucket_bytes == float(mebibytes) * MIB


def test_size_of_gradient_buckets():
    check_rows(parse_rows(BUCKETS), check_bucket)
    automatic = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    assert resolve_tree(automatic, hidden_size=64).data_parallel.bucket_bytes == 4 * 64 * 64


def test_links_decide_the_bucket_if_the_file_does_not():
    for text, by_links in {
        "parallel.tp=1": True,
        "ZERO.reduce_bucket_size=auto": True,
        "parallel.bucket_mib=25": False,
        "ZERO.reduce_bucket_size=1000": False,
    }.items():
        assert resolve_tree(parse_tree(text)).data_parallel.bucket_by_links is by_links, text


REFUSALS = """
    ZERO.reduce_bucket_size=1000 parallel.bucket_mib=1 -> zero_optimization.reduce_bucket_size = \
        1000 and parallel.bucket_mib = 1: both set the bucket and disagree: \
        1000 x 4 bytes = 0.0038147 MiB; keep one of them
    data_parallel_size=2 parallel.tp=1 -> data_parallel_size = 2: dp_replicate 4 x dp_shard 1 = 4 \
        with 4 processes (dp_replicate=4); leave it out or set it to 4
    num_layers=2 parallel.pp=4 -> parallel.pp = 4: a pipeline stage has at least one layer, \
        but the model has 2; use 2 or fewer
    model.config.model_type=llama model.config.num_hidden_layers=3 parallel.pp=4 \
        -> parallel.pp = 4: a pipeline stage has at least one layer, but the model has 3;
    model.config.model_type=gpt2 model.config.n_layer=3 num_layers=2 \
        -> num_layers = 2: the model section describes 3 layers; leave it out or set it to 3
"""


def test_contradictions_are_refused():
    def use(text):
        try:
            resolve_tree(parse_tree(text))
        except ConfigError as error:
            assert len(error.problems) == 1
            raise

    check_refusals(REFUSALS, use)
    assert resolve_tree({"data_parallel_size": 4}).layout.dp == 4


def test_a_layout_that_does_not_exist_is_the_only_problem():
    text = "ZERO.stage=3 parallel.secondary_partition=2 parallel.tp=3"
    assert fields_refused(parse_tree(text)) == ["parallel"]


def test_the_callers_batch_size_replaces_a_missing_one():
    resolved = resolve(load({}), world_size=2, micro_batch_size=3)
    assert resolved.batch.train_batch_size == 6
    assert resolved.sources["train_micro_batch_size_per_gpu"] == "the caller's"
    resolved = resolve(load({"train_batch_size": 8}), world_size=2, micro_batch_size=3)
    assert resolved.batch.micro_batch_size == 4


def test_defaults_are_those_of_deepspeed():
    resolved = resolve_tree({})
    assert resolved.gradient_clipping == 1.0
    assert resolved.data_parallel.stage == 0
    assert resolved.data_parallel.unused_parameters is True
    assert resolved.optimizer.type == "AdamW"
    assert resolved.scheduler is None
    assert (resolved.seed, resolved.compile.enabled) == (0, False)


def test_a_resolved_configuration_survives_json():
    text = """
        optimizer.type=AdamW optimizer.params.lr=1e-3 optimizer.params.betas=[0.9,0.95]
        scheduler.type=WarmupLR scheduler.params.warmup_num_steps=3 fp16.enabled=true
        model.config.model_type=llama data={} run={}
    """
    resolved = resolve_tree(parse_tree(text))
    assert Resolved.model_validate_json(resolved.model_dump_json()) == resolved


def test_a_configuration_from_python_knows_its_sources():
    text = "train_micro_batch_size_per_gpu=2 bf16.enabled=true optimizer.params.lr=1e-3"
    config = Config.model_validate(parse_tree(text))
    assert load(config) is config
    resolved = resolve(config, world_size=2)
    assert resolved.precision.reduce == "bfloat16"
    assert resolved.sources["train_micro_batch_size_per_gpu"] == "given"
    assert resolved.sources["optimizer.params.lr"] == "given"
    assert resolved.sources["gradient_clipping"] == "default"


def test_another_type_of_source_is_refused():
    with pytest.raises(TypeError, match="a configuration is a path or a mapping, not"):
        load(5)


def test_the_warning_names_ignored_keys():
    assert load(BF16).provenance.warning() is None
    keys = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_scatter": True,
        "allgather_partitions": True,
    }
    warning = load({"zero_optimization": keys}).provenance.warning()
    names = [f"zero_optimization.{key}" for key in keys]
    assert f"ignored are {', '.join(names[:3])}, {names[3]} and 1 more;" in warning
    assert "`plait config explain` has the reasons" in warning


def test_compression_settings():
    def resolve_stage(stage, **parallel):
        return resolve_tree({"zero_optimization": {"stage": stage}, "parallel": parallel})

    def scheme(stage, **parallel):
        """Return bits of gradients and weights, rank, error feedback, and if it can be revoked."""
        compression = resolve_stage(stage, **parallel).compression
        return tuple(compression.scheme.model_dump().values())

    assert scheme(0, compress_gradients="int8") == (8, 0, 0, True, False)
    assert scheme(2, compress_gradients="int4", compress_weights="int8") == (4, 8, 0, False, False)
    assert scheme(2, compress_gradients="int4", error_feedback=True)[3]
    assert scheme(0, compress_gradients="powersgd", powersgd_rank=2)[2] == 2

    # Stage 2 keeps weights unsharded, and a partition over all 4 ranks is the primary one.
    for stage, size, expected in ((2, 2, 0), (3, 2, 2), (3, 4, 0)):
        resolved = resolve_stage(stage, secondary_partition=size)
        assert resolved.data_parallel.secondary_partition == expected
