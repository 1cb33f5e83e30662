"""Rows about keys and about resolved values."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config.dialects.keys import schema_fields
from plait.config.resolving.explain import Explanation, explain, values_of
from plait.errors import ConfigError
from tests.unit.config.cases import BATCH, load, resolved


def statuses(tree: dict[str, Any]) -> dict[str, str]:
    return {row.key: str(row.status) for row in explain({**BATCH, **tree}).keys}


def values(explanation: Explanation) -> dict[str, tuple[Any, str]]:
    return {value.name: (value.value, value.source) for value in explanation.values}


def test_one_row_a_key_in_the_order_of_the_file() -> None:
    tree = {
        "tensor_parallel": {"tp_size": 2},
        "_comment": "x",
        "zero_optimization": {"overlap_comm": True, "stage": 1},
        **BATCH,
    }
    explanation = explain(tree)
    assert [(row.key, str(row.status)) for row in explanation.keys] == [
        ("tensor_parallel.tp_size", "renamed"),
        ("_comment", "comment"),
        ("zero_optimization.overlap_comm", "ignored"),
        ("zero_optimization.stage", "supported"),
        ("train_micro_batch_size_per_gpu", "supported"),
    ]
    assert explanation.world_size == 2
    assert not explanation.problems


@pytest.mark.parametrize(
    ("tree", "key", "status"),
    [
        (
            {"zero_optimization": {"reduce_bucket_size": 1000}},
            "zero_optimization.reduce_bucket_size",
            "supported",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 1000, "stage": 1}},
            "zero_optimization.reduce_bucket_size",
            "ignored",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 1000}, "bf16": {"enabled": True}},
            "zero_optimization.reduce_bucket_size",
            "ignored",
        ),
        (
            {"parallel": {"bucket_mib": 10}, "zero_optimization": {"stage": 3}},
            "parallel.bucket_mib",
            "ignored",
        ),
        ({"fp16": {"enabled": True, "hysteresis": 3}}, "fp16.hysteresis", "supported"),
        ({"fp16": {"enabled": False, "hysteresis": 3}}, "fp16.hysteresis", "ignored"),
        (
            {"fp16": {"enabled": True, "hysteresis": 3, "loss_scale": 128}},
            "fp16.hysteresis",
            "ignored",
        ),
        (
            {"fp16": {"enabled": True, "hysteresis": 3, "loss_scale": 128}},
            "fp16.loss_scale",
            "supported",
        ),
        (
            {"parallel": {"all_reduce": "ring", "dp_replicate": 2}},
            "parallel.all_reduce",
            "supported",
        ),
        (
            {"parallel": {"all_reduce": "ring", "dp_replicate": 2, "compress_gradients": "int8"}},
            "parallel.all_reduce",
            "ignored",
        ),
        (
            {"parallel": {"all_reduce": "ring", "dp_shard": 2}, "zero_optimization": {"stage": 1}},
            "parallel.all_reduce",
            "ignored",
        ),
        (
            {"parallel": {"all_reduce": "ring", "dp_replicate": 2, "transport": "torch"}},
            "parallel.transport",
            "ignored",
        ),
        (
            {"parallel": {"compress_weights": "int8", "dp_replicate": 2}},
            "parallel.compress_weights",
            "ignored",
        ),
        (
            {"parallel": {"compress_gradients": "int8", "dp_replicate": 2}},
            "parallel.compress_gradients",
            "supported",
        ),
        (
            {"parallel": {"compress_gradients": "int8", "dp_replicate": 1}},
            "parallel.compress_gradients",
            "ignored",
        ),
        (
            {"parallel": {"powersgd_rank": 2, "dp_replicate": 2}},
            "parallel.powersgd_rank",
            "ignored",
        ),
        (
            {"parallel": {"error_feedback": True, "compress_gradients": "powersgd"}},
            "parallel.error_feedback",
            "ignored",
        ),
        (
            {
                "parallel": {"secondary_partition": 2, "dp_shard": 2},
                "zero_optimization": {"stage": 3},
            },
            "parallel.secondary_partition",
            "ignored",
        ),
        (
            {
                "parallel": {"secondary_partition": 2, "dp_shard": 4},
                "zero_optimization": {"stage": 3},
            },
            "parallel.secondary_partition",
            "supported",
        ),
        (
            {
                "zero_optimization": {"zero_quantized_weights": True, "stage": 3},
                "parallel": {"dp_shard": 2},
            },
            "zero_optimization.zero_quantized_weights",
            "renamed",
        ),
        (
            {"parallel": {"transport": "torch", "compress_gradients": "int8", "dp_replicate": 2}},
            "parallel.transport",
            "ignored",
        ),
        (
            {"parallel": {"transport": "torch", "dp_shard": 2}, "zero_optimization": {"stage": 1}},
            "parallel.transport",
            "supported",
        ),
        ({"parallel": {"transport": "torch", "dp_shard": 1}}, "parallel.transport", "ignored"),
        (
            {"parallel": {"transport": "torch", "dp_replicate": 2}},
            "parallel.transport",
            "supported",
        ),
        (
            {"parallel": {"transport": "torch", "dp_replicate": 2}, "bf16": {"enabled": True}},
            "parallel.transport",
            "ignored",
        ),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow", "ignored"),
        ({"bfloat16": {"check_overflow": False}}, "bfloat16.check_overflow", "ignored"),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}},
            "bf16.check_grad_overflow",
            "supported",
        ),
        ({"parallel": {"sequence_parallel": True}}, "parallel.sequence_parallel", "ignored"),
        (
            {"parallel": {"sequence_parallel": True, "tp": 2}},
            "parallel.sequence_parallel",
            "supported",
        ),
        ({"parallel": {"plan": {"x": "colwise"}}}, "parallel.plan.x", "ignored"),
        (
            {"parallel": {"recompute": {"mode": "full", "every": 2}}},
            "parallel.recompute.every",
            "supported",
        ),
        ({"parallel": {"recompute": {"every": 2}}}, "parallel.recompute.every", "ignored"),
        (
            {"parallel": {"recompute": {"mode": "full", "keep": ["matmul"]}}},
            "parallel.recompute.keep",
            "ignored",
        ),
        (
            {"parallel": {"recompute": {"mode": "full", "sequence_length": 8}}},
            "parallel.recompute.sequence_length",
            "ignored",
        ),
        (
            {
                "parallel": {"recompute": {"mode": "full"}},
                "activation_checkpointing": {"partition_activations": True},
            },
            "activation_checkpointing.partition_activations",
            "ignored",
        ),
        (
            {"parallel": {"activation_offload": {"path": "a"}}},
            "parallel.activation_offload.path",
            "ignored",
        ),
        (
            {"parallel": {"activation_offload": {"path": "a", "fraction": 1}}},
            "parallel.activation_offload.path",
            "ignored",
        ),
        (
            {"parallel": {"activation_offload": {"path": "a", "fraction": 1, "device": "disk"}}},
            "parallel.activation_offload.path",
            "supported",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"buffer_size": 9}}},
            "zero_optimization.offload_optimizer.buffer_size",
            "ignored",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 1,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "a", "buffer_size": 9},
                }
            },
            "zero_optimization.offload_optimizer.buffer_size",
            "supported",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"buffer_size": 9}}},
            "zero_optimization.offload_param.buffer_size",
            "ignored",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "a", "buffer_size": 9},
                }
            },
            "zero_optimization.offload_param.buffer_size",
            "supported",
        ),
        ({"compile": {"backend": "inductor"}}, "compile.backend", "ignored"),
        ({"compile": {"backend": "inductor", "enabled": True}}, "compile.backend", "supported"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "set_grad_none": True}}},
            "optimizer.params.set_grad_none",
            "ignored",
        ),
    ],
)
def test_a_setting_that_is_not_read_is_meaningless(
    tree: dict[str, Any], key: str, status: str
) -> None:
    assert statuses(tree)[key] == status


def test_every_resolved_value_has_a_source() -> None:
    explanation = explain(
        {
            "train_batch_size": 32,
            "gradient_accumulation_steps": 2,
            "tensor_parallel": {"tp_size": 2},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "zero_optimization": {"stage": 3},
        },
        ["gradient_clipping=0.5"],
        world_size=8,
    )
    found = values(explanation)
    assert found["train_batch_size"] == (32, "file")
    assert found["train_micro_batch_size_per_gpu"] == (
        4,
        "derived: train 32 / (accumulation 2 x dp 4)",
    )
    assert found["parallel.tp"] == (2, "file: tensor_parallel.tp_size")
    assert found["parallel.dp_shard"] == (
        4,
        "derived: 8 processes / (pp 1 x cp 1 x tp 2), ZeRO stage 3",
    )
    assert found["gradient_clipping"] == (0.5, "override")
    assert found["optimizer.params.lr"] == (5e-5, "auto: Transformers' default")
    assert found["precision.compute"] == ("bfloat16", "file: bf16.enabled")
    assert found["precision.reduce"] == (
        "bfloat16",
        "default, DeepSpeed's: the dtype of the computation",
    )
    assert found["run.steps"] == (1000, "default")


def test_all_of_a_resolved_configuration_is_shown() -> None:
    sections = {"model": {"config": {"model_type": "llama"}}, "data": {}, "run": {}}
    made = resolved(
        {
            **sections,
            "fp16": {"enabled": True},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        }
    )
    shown = {value.name for value in values_of(made)}
    assert {path for path in schema_fields() if path.split(".")[0] in sections} <= shown
    assert {
        f"fp16.{name}"
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "min_loss_scale",
        )
    } <= shown
    assert {
        "scheduler.type",
        "scheduler.params.warmup_num_steps",
        "compile.enabled",
        "parallel.blocks",
        "parallel.bucket_mib",
    } <= shown
    assert set(shown) <= set(made.sources) | {"optimizer.type"}


def test_the_number_of_processes_is_the_files_or_the_least() -> None:
    assert explain({**BATCH, "parallel": {"tp": 2}}).world_size == 2
    assert explain({**BATCH, "parallel": {"tp": 2}, "run": {"processes": 4}}).world_size == 4
    assert explain({**BATCH, "run": {"processes": 4}}, world_size=6).world_size == 6


def test_what_cannot_be_resolved_still_shows_its_keys() -> None:
    explanation = explain({"zero_optimization": {"stage": 2, "overlap_comm": True}})
    assert len(explanation.keys) == 2
    # E4: what can be resolved is told beside what cannot.
    found = values(explanation)
    assert (
        found["zero_optimization.stage"] == (2, "file")
        and found["optimizer.type"][0] == "AdamW"
        and "train_batch_size" not in found
    )
    assert [problem.field for problem in explanation.problems] == ["train_micro_batch_size_per_gpu"]
    explanation = explain({"zero_optimization": {"stag": 2, "cpu_offload": True}})
    assert [(row.key, str(row.status)) for row in explanation.keys] == [
        ("zero_optimization.cpu_offload", "renamed")
    ]
    assert len(explanation.problems) == 1
    assert explanation.world_size is None


@pytest.mark.parametrize("compress", ["none", "auto", ["int8", "powersgd"]])
def test_what_is_printed_of_data_parallelism_can_be_written(compress: Any) -> None:
    """A user copies the resolved values into a file."""
    found = explain({**BATCH, "parallel": {"compress_gradients": compress}})
    parallel = {
        name.removeprefix("parallel."): value
        for name, (value, _) in values(found).items()
        if name.startswith("parallel.")
    }
    names = (
        "all_reduce",
        "transport",
        "compress_gradients",
        "compress_weights",
        "bucket_mib",
        "unused_parameters",
        "measure_seconds",
    )
    written = {name: parallel[name] for name in names}
    again = explain({**BATCH, "parallel": written})
    assert all(values(again)[f"parallel.{name}"][0] == value for name, value in written.items())


@pytest.mark.parametrize("kind", ["Adafactor", "Rprop"])
@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage = 1"),
        ({"parallel": {"tp": 2}}, "parallel.tp = 2"),
        ({"bf16": {"enabled": True}}, "precision.compute = bfloat16"),
        ({}, ""),
    ],
)
def test_optimizers_that_fail_on_shards(kind: str, tree: dict[str, Any], said: str) -> None:
    """Refused with the file, before any text is read or device is found."""
    tree = {"optimizer": {"type": kind}, **tree}
    if not said:
        assert resolved(tree).optimizer.type == kind
        return
    with pytest.raises(ConfigError, match=f"optimizer.type = '{kind}'.*{said}.*use AdamW"):
        resolved(tree)


def test_reasons_about_checkpoints() -> None:
    """Plait writes its own format."""
    with pytest.raises(ConfigError, match="nebula = .*Plait's own files.*run.checkpoints"):
        load({"nebula": {"enabled": True}})
