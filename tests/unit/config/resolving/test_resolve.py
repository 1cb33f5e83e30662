"""What is left open is decided by DeepSpeed's and Hugging Face's rules, and every value says where it came from."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config.resolving.resolve import Config, Resolved, load, resolve
from plait.errors import ConfigError
from tests.unit.config.cases import BATCH, resolved

MIB = 2**20


def problems(tree: dict[str, Any], **context: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resolve(load(tree), **{"world_size": 4, **context})
    return [str(problem) for problem in error.value.problems]


def test_gradients_are_reduced_in_the_compute_dtype() -> None:
    """A24: a default depends on no key that has nothing to do with it."""
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        for more in (
            {},
            {"parallel": {}},
            {"run": {}},
            {"data": {}},
            {"model": {"config": {"model_type": "llama"}}},
            {"_comment": "x"},
        ):
            made = resolved({name: {"enabled": True}, **more})
            assert (made.precision.compute, made.precision.reduce) == (dtype, dtype)
            assert (
                made.sources["precision.reduce"]
                == "default, DeepSpeed's: the dtype of the computation"
            )
    for section in ({}, {"run": {}}):
        precision = resolved(section).precision
        assert (
            precision.compute,
            precision.reduce,
            precision.loss_scale,
            precision.check_overflow,
        ) == (None, None, None, False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", "float32"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("float32", "float32"),
    ],
)
def test_communication_data_type_is_the_dtype_of_the_reduction(name: str, dtype: str) -> None:
    for tree in ({}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": True}, "parallel": {}}):
        made = resolved({**tree, "communication_data_type": name})
        assert made.precision.reduce == dtype
        assert made.sources["precision.reduce"] == "file: communication_data_type"


def test_overflow_is_checked_as_deepspeed_does() -> None:
    assert resolved({"bf16": {"enabled": True}}).precision.check_overflow is True
    assert (
        resolved({"bf16": {"enabled": True, "check_grad_overflow": False}}).precision.check_overflow
        is False
    )
    assert (
        resolved({"bf16": {"enabled": True, "check_overflow": False}}).precision.check_overflow
        is False
    )
    assert (
        resolved(
            {"fp16": {"enabled": True}, "bf16": {"check_grad_overflow": False}}
        ).precision.check_overflow
        is True
    )


def test_the_loss_scale_has_deepspeeds_names_and_defaults() -> None:
    scale = resolved({"fp16": {"enabled": True}}).precision.loss_scale
    assert scale is not None
    assert scale.model_dump() == {
        "static": 0.0,
        "initial_scale_power": 16,
        "window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "minimum": 1.0,
    }
    given = {
        "loss_scale": 128,
        "initial_scale_power": 8,
        "loss_scale_window": 5,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
    }
    scale = resolved({"fp16": {"enabled": True, **given}}).precision.loss_scale
    assert scale is not None
    assert tuple(scale.model_dump().values()) == tuple(given.values())
    scale = resolved(
        {"fp16": {"enabled": True, **dict.fromkeys(given, "auto")}}
    ).precision.loss_scale
    assert scale == resolved({"fp16": {"enabled": True}}).precision.loss_scale


def test_contradictions_of_precision() -> None:
    assert problems({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}}) == [
        "fp16.enabled and bf16.enabled: are both true, and a model computes in one dtype; set one of them to false"
    ]
    assert problems(
        {**BATCH, "fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}
    ) == [
        "fp16.min_loss_scale = 8.0: the first scale is 2^2 = 4, below it; use at most 4, or raise fp16.initial_scale_power"
    ]
    assert (
        resolved(
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 3,
                    "initial_scale_power": 2,
                    "min_loss_scale": 8,
                }
            }
        ).precision.loss_scale
        is not None
    )


HF_FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def test_auto_is_what_the_caller_says() -> None:
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
    assert made.batch.model_dump() == {
        "train_batch_size": 128,
        "micro_batch_size": 8,
        "accumulation": 4,
    }
    assert (made.gradient_clipping, made.precision.compute) == (0.5, "bfloat16")
    assert made.optimizer.params == {
        "lr": 2e-5,
        "betas": (0.8, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert made.scheduler is not None
    assert made.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 2e-5,
        "warmup_num_steps": 30,
        "total_num_steps": 700,
    }
    assert made.sources["optimizer.params.lr"] == "auto: the caller's"
    assert made.sources["scheduler.params.warmup_max_lr"] == "auto: the optimizer's lr"
    assert made.sources["train_batch_size"] == "derived: micro 8 x accumulation 4 x dp 4"


def test_auto_without_a_caller_follows_the_published_rules() -> None:
    made = resolved({**HF_FILE, **BATCH, "bf16": {"enabled": True}}, total_steps=700)
    assert (made.batch.accumulation, made.gradient_clipping, made.precision.compute) == (
        1,
        1.0,
        "bfloat16",
    )
    assert made.sources["fp16.enabled"] == "auto: off, because bf16 is on"
    assert "optimizer.params.lr = 5e-05" in (made.assumed() or "")
    assert made.optimizer.params == {
        "lr": 5e-5,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert made.sources["gradient_accumulation_steps"] == "auto: 1"
    assert (
        made.sources["gradient_clipping"]
        == "auto: 1.0, the default of DeepSpeed and of Transformers"
    )
    # What `faults.non_finite` does follows from the device, too.
    assert (
        "auto" not in str(made.model_dump(exclude={"sources", "run", "faults"}))
        and made.faults.non_finite == "auto"
    )


def test_auto_that_nothing_decides_names_the_field() -> None:
    found = problems(HF_FILE)
    assert [text.split(":")[0] for text in found] == [
        "train_micro_batch_size_per_gpu = 'auto'",
        "fp16.enabled = 'auto'",
        "bf16.enabled = 'auto'",
        "scheduler.params.total_num_steps = 'auto'",
    ]


def test_half_precision_left_open_is_never_float32_in_silence() -> None:
    """E4: "auto" is a command line's choice. What follows from the other key is taken, what does not is refused by name."""
    for tree, refused in (
        ({"bf16": {"enabled": "auto"}}, ["bf16.enabled"]),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, ["fp16.enabled"]),
    ):
        assert [text.split(" ")[0] for text in problems({**BATCH, **tree})] == refused
    made = resolved({**BATCH, "bf16": {"enabled": "auto"}, "fp16": {"enabled": True}})
    assert (made.precision.compute, made.sources["bf16.enabled"]) == (
        "float16",
        "auto: off, because fp16 is on",
    )
    neither = resolved(
        {**BATCH, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
        auto={"bf16.enabled": False},
    )
    assert (neither.precision.compute, neither.sources["fp16.enabled"]) == (
        None,
        "auto: off, as the caller chose neither",
    )


def test_the_schedules_length_is_the_callers_or_the_runs() -> None:
    tree = {
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "run": {"steps": 30},
    }
    for context, steps, source in (
        ({}, 30, "auto: run.steps"),
        ({"total_steps": 7}, 7, "auto: the caller's"),
    ):
        made = resolved(tree, **context)
        assert made.scheduler is not None
        assert (
            made.scheduler.params["total_num_steps"],
            made.sources["scheduler.params.total_num_steps"],
        ) == (steps, source)


def test_the_highest_rate_of_a_schedule_is_the_optimizers() -> None:
    tree = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    for optimizer, rate in (
        ({}, 1e-3),
        ({"type": "SGD", "params": {"lr": 0.5}}, 0.5),
        ({"type": "Adagrad"}, 1e-2),
        ({"type": "Lion"}, 1e-3),
    ):
        scheduler = resolved({**tree, "optimizer": optimizer}).scheduler
        assert scheduler is not None
        assert scheduler.params["warmup_max_lr"] == rate
    (problem,) = problems({**BATCH, **tree, "optimizer": {"type": "some.module.Optimizer"}})
    assert problem.startswith(
        "scheduler.params.warmup_max_lr = 'auto': is the optimizer's lr, which optimizer.params does not give"
    )


@pytest.mark.parametrize(
    ("tree", "context", "bucket_bytes"),
    [
        ({}, {}, 25 * MIB),
        ({"parallel": {"bucket_mib": 1.5}}, {}, 3 * MIB // 2),
        ({"zero_optimization": {"reduce_bucket_size": 1000}}, {}, 4000),
        (
            {"zero_optimization": {"reduce_bucket_size": 1000}, "communication_data_type": "bf16"},
            {},
            2000,
        ),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, {"hidden_size": 64}, 4 * 64 * 64),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, {}, 25 * MIB),
        (
            {
                "zero_optimization": {"reduce_bucket_size": "auto"},
                "model": {"config": {"model_type": "gpt2", "n_embd": 32}},
            },
            {},
            4 * 32 * 32,
        ),
        ({"zero_optimization": {"reduce_bucket_size": 1000, "stage": 2}}, {}, 25 * MIB),
        (
            {"zero_optimization": {"reduce_bucket_size": 1000}, "bf16": {"enabled": True}},
            {},
            25 * MIB,
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 262144}, "parallel": {"bucket_mib": 1}},
            {},
            MIB,
        ),
    ],
)
def test_bucket(tree: dict[str, Any], context: dict[str, Any], bucket_bytes: int) -> None:
    assert resolved(tree, **context).data_parallel.bucket_bytes == bucket_bytes


def test_the_links_decide_the_bucket_where_nothing_else_does() -> None:
    """DeepSpeed's key wins."""
    assert resolved({}).data_parallel.bucket_by_links
    assert resolved(
        {"zero_optimization": {"reduce_bucket_size": "auto"}}
    ).data_parallel.bucket_by_links
    for tree in (
        {"parallel": {"bucket_mib": 25}},
        {"zero_optimization": {"reduce_bucket_size": 1000}},
    ):
        assert not resolved(tree).data_parallel.bucket_by_links


def test_two_sizes_of_the_bucket_that_disagree() -> None:
    assert problems(
        {**BATCH, "zero_optimization": {"reduce_bucket_size": 1000}, "parallel": {"bucket_mib": 1}}
    ) == [
        "zero_optimization.reduce_bucket_size = 1000 and parallel.bucket_mib = 1: "
        "both set the bucket and disagree: 1000 x 4 bytes = 0.0038147 MiB; keep one of them"
    ]


def test_the_stated_data_parallel_size_is_checked() -> None:
    assert resolved({"data_parallel_size": 4}).layout.dp == 4
    (problem,) = problems({**BATCH, "data_parallel_size": 2, "parallel": {"tp": 1}})
    assert problem.startswith(
        "data_parallel_size = 2: 4 processes (dp_replicate=4) make dp_replicate 4 x dp_shard 1 = 4; leave it out or set it to 4"
    )


def test_a_pipeline_stage_needs_a_layer() -> None:
    (problem,) = problems({**BATCH, "num_layers": 2, "parallel": {"pp": 4}})
    assert (
        problem
        == "parallel.pp = 4: a pipeline stage has at least one layer, and the model has 2; use 2 or fewer"
    )
    (problem,) = problems(
        {
            **BATCH,
            "model": {"config": {"model_type": "llama", "num_hidden_layers": 3}},
            "parallel": {"pp": 4},
        }
    )
    assert "the model has 3" in problem
    (problem,) = problems(
        {**BATCH, "model": {"config": {"model_type": "gpt2", "n_layer": 3}}, "num_layers": 2}
    )
    assert (
        problem
        == "num_layers = 2: the model section describes 3 layers; leave it out or set it to 3"
    )


def test_problems_of_all_parts_are_told_at_once() -> None:
    found = problems(
        {
            "train_batch_size": 30,
            "fp16": {"enabled": True},
            "bf16": {"enabled": True},
            "data_parallel_size": 3,
        }
    )
    assert len(found) == 3


def test_the_callers_batch_size_replaces_a_missing_one() -> None:
    made = resolve(load({}), world_size=2, micro_batch_size=3)
    assert (made.batch.train_batch_size, made.sources["train_micro_batch_size_per_gpu"]) == (
        6,
        "the caller's",
    )
    assert (
        resolve(
            load({"train_batch_size": 8}), world_size=2, micro_batch_size=3
        ).batch.micro_batch_size
        == 4
    )


def test_defaults_are_those_of_deepspeed() -> None:
    made = resolved({})
    assert made.gradient_clipping == 1.0
    assert made.data_parallel.stage == 0
    assert made.data_parallel.unused_parameters is True
    assert made.optimizer.type == "AdamW"
    assert made.scheduler is None
    assert (made.seed, made.compile.enabled) == (0, False)


def test_a_resolved_configuration_survives_its_own_json() -> None:
    made = resolved(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
            "fp16": {"enabled": True},
            "model": {"config": {"model_type": "llama"}},
            "data": {},
            "run": {},
        }
    )
    assert Resolved.model_validate_json(made.model_dump_json()) == made


def test_a_configuration_made_in_python_knows_its_sources() -> None:
    config = Config.model_validate(
        {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"params": {"lr": 1e-3}},
        }
    )
    made = resolve(config, world_size=2)
    assert made.precision.reduce == "bfloat16"
    assert (
        made.sources["train_micro_batch_size_per_gpu"]
        == made.sources["optimizer.params.lr"]
        == "given"
    )
    assert made.sources["gradient_clipping"] == "default"
    assert load(config) is config


@pytest.mark.parametrize("source", [5, None])
def test_what_is_no_configuration_is_an_error_of_the_program(source: Any) -> None:
    with pytest.raises(TypeError, match="a configuration is a path or a mapping, not"):
        load(source)


def test_the_warning_names_the_keys_that_mean_nothing() -> None:
    assert load({"bf16": {"enabled": True}}).provenance.warning() is None
    names = (
        "overlap_comm",
        "contiguous_gradients",
        "sub_group_size",
        "reduce_scatter",
        "allgather_partitions",
    )
    values = {**dict.fromkeys(names, True), "sub_group_size": 1e9}
    assert load({"zero_optimization": values}).provenance.warning() == (
        "the configuration: ignored are zero_optimization.overlap_comm, zero_optimization.contiguous_gradients, "
        "zero_optimization.sub_group_size, zero_optimization.reduce_scatter and 1 more; `plait config explain` has the reasons"
    )


def test_compression() -> None:
    def made(stage: int, **parallel: Any) -> Any:
        return resolved({"zero_optimization": {"stage": stage}, "parallel": parallel}, world_size=4)

    assert made(0, compress_gradients="int8").compression.scheme.model_dump() == {
        "gradient_bits": 8,
        "weight_bits": 0,
        "powersgd_rank": 0,
        "error_feedback": True,
        "revocable": False,
    }
    assert made(
        2, compress_gradients="int4", compress_weights="int8"
    ).compression.scheme.model_dump() == {
        "gradient_bits": 4,
        "weight_bits": 8,
        "powersgd_rank": 0,
        "error_feedback": False,
        "revocable": False,
    }
    assert made(2, compress_gradients="int4", error_feedback=True).compression.scheme.error_feedback
    assert (
        made(0, compress_gradients="powersgd", powersgd_rank=2).compression.scheme.powersgd_rank
        == 2
    )
    assert [
        made(stage, secondary_partition=2).data_parallel.secondary_partition for stage in (2, 3)
    ] == [0, 2]
    assert made(3, secondary_partition=4).data_parallel.secondary_partition == 0, (
        "a copy over all is no second one"
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"zero_optimization": {"stage": 2}, "parallel": {"compress_gradients": "powersgd"}},
            "parallel.compress_gradients = 'powersgd': factors a matrix's full gradient, and ZeRO stage 2 reduces it in shards",
        ),
        (
            {"bf16": {"enabled": True}, "parallel": {"compress_gradients": "int8"}},
            "parallel.compress_gradients = 'int8': at ZeRO stage 0 with bf16 or fp16, torch reduces gradients block by block",
        ),
        (
            {"parallel": {"all_reduce": "ring", "transport": "shared-memory"}},
            "parallel.all_reduce = 'ring': parallel.transport is shared-memory, which has its own all-reduce",
        ),
        (
            {"zero_optimization": {"stage": 3}, "parallel": {"secondary_partition": 3}},
            "parallel.secondary_partition = 3: parallel.dp_shard is 4, which it must divide; use 2, 4",
        ),
    ],
)
def test_compression_that_cannot_be_had(tree: dict[str, Any], message: str) -> None:
    assert any(text.startswith(message) for text in problems(tree)), problems(tree)


def test_partition_of_an_impossible_layout() -> None:
    """Only the layout is reported, and not a partition of the processes that it does not have."""
    tree = {"zero_optimization": {"stage": 3}, "parallel": {"secondary_partition": 2, "tp": 3}}
    (problem,) = problems(tree)
    assert problem.startswith("parallel: pp 1 x cp 1 x tp 3 = 3 and 4 % 3 = 1")
