"""`explain` has a row per key of the file, and the source of every resolved value."""

import pytest

from plait.config.dialects.keys import schema_fields
from plait.config.resolving.explain import explain, values_of
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import (
    BATCH,
    load,
    parse_rows,
    parse_settings,
    parse_tree,
    resolve_tree,
)


def explained_values(explanation):
    """Return (value, source) of every resolved value, by name."""
    return {value.name: (value.value, value.source) for value in explanation.values}


def test_rows_are_in_the_order_of_the_file():
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


STATUSES = """
    ZERO.reduce_bucket_size=1000 -> supported
    ZERO.reduce_bucket_size=1000 ZERO.stage=1 -> ignored
    ZERO.reduce_bucket_size=1000 bf16.enabled=true -> ignored
    parallel.bucket_mib=10 ZERO.stage=3 -> ignored
    fp16.hysteresis=3 fp16.enabled=true -> supported
    fp16.hysteresis=3 fp16.enabled=false -> ignored
    fp16.hysteresis=3 fp16.enabled=true fp16.loss_scale=128 -> ignored
    fp16.loss_scale=128 fp16.enabled=true fp16.hysteresis=3 -> supported
    parallel.all_reduce=ring parallel.dp_replicate=2 -> supported
    parallel.all_reduce=ring parallel.dp_replicate=2 parallel.compress_gradients=int8 -> ignored
    parallel.all_reduce=ring parallel.dp_shard=2 ZERO.stage=1 -> ignored
    parallel.transport=torch parallel.all_reduce=ring parallel.dp_replicate=2 -> ignored
    parallel.compress_weights=int8 parallel.dp_replicate=2 -> ignored
    parallel.compress_gradients=int8 parallel.dp_replicate=2 -> supported
    parallel.compress_gradients=int8 parallel.dp_replicate=1 -> ignored
    parallel.powersgd_rank=2 parallel.dp_replicate=2 -> ignored
    parallel.error_feedback=true parallel.compress_gradients=powersgd -> ignored
    parallel.secondary_partition=2 parallel.dp_shard=2 ZERO.stage=3 -> ignored
    parallel.secondary_partition=2 parallel.dp_shard=4 ZERO.stage=3 -> supported
    ZERO.zero_quantized_weights=true ZERO.stage=3 parallel.dp_shard=2 -> renamed
    parallel.transport=torch parallel.compress_gradients=int8 parallel.dp_replicate=2 -> ignored
    parallel.transport=torch parallel.dp_shard=2 ZERO.stage=1 -> supported
    parallel.transport=torch parallel.dp_shard=1 -> ignored
    parallel.transport=torch parallel.dp_replicate=2 -> supported
    parallel.transport=torch parallel.dp_replicate=2 bf16.enabled=true -> ignored
    bf16.check_grad_overflow=false -> ignored
    bfloat16.check_overflow=false -> ignored
    bf16.check_grad_overflow=false bf16.enabled=true -> supported
    parallel.sequence_parallel=true -> ignored
    parallel.sequence_parallel=true parallel.tp=2 -> supported
    parallel.plan.x=colwise -> ignored
    parallel.recompute.every=2 parallel.recompute.mode=full -> supported
    parallel.recompute.every=2 -> ignored
    parallel.recompute.keep=["matmul"] parallel.recompute.mode=full -> ignored
    parallel.recompute.sequence_length=8 parallel.recompute.mode=full -> ignored
    activation_checkpointing.partition_activations=true parallel.recompute.mode=full -> ignored
    parallel.activation_offload.path=a -> ignored
    parallel.activation_offload.path=a parallel.activation_offload.fraction=1 -> ignored
    parallel.activation_offload.path=a parallel.activation_offload.fraction=1 \
        parallel.activation_offload.device=disk -> supported
    OPT.buffer_size=9 -> ignored
    OPT.buffer_size=9 ZERO.stage=1 OPT.device=nvme OPT.nvme_path=a -> supported
    PARAM.buffer_size=9 ZERO.stage=3 -> ignored
    PARAM.buffer_size=9 ZERO.stage=3 PARAM.device=nvme PARAM.nvme_path=a -> supported
    compile.backend=inductor -> ignored
    compile.backend=inductor compile.enabled=true -> supported
    optimizer.params.set_grad_none=true optimizer.type=AdamW optimizer.params.lr=0.001 -> ignored
"""
"""Statuses of the first key of each row."""


def check_status(row):
    text, status = row
    key = next(iter(parse_settings(text)))
    rows = explain({**BATCH, **parse_tree(text)}).keys
    assert {row.key: str(row.status) for row in rows}[key] == status


def test_a_setting_that_is_not_read_is_ignored():
    check_rows(parse_rows(STATUSES), check_status)


def test_every_resolved_value_has_a_source():
    text = """
        train_batch_size=32 gradient_accumulation_steps=2 tensor_parallel.tp_size=2
        bf16.enabled=true optimizer.type=AdamW optimizer.params.lr=auto ZERO.stage=3
    """
    values = explained_values(explain(parse_tree(text), ["gradient_clipping=0.5"], world_size=8))
    for name, expected in {
        "train_batch_size": (32, "file"),
        "train_micro_batch_size_per_gpu": (4, "derived: train 32 / (accumulation 2 x dp 4)"),
        "parallel.tp": (2, "file: tensor_parallel.tp_size"),
        "parallel.dp_shard": (4, "derived: 8 processes / (pp 1 x cp 1 x tp 2), ZeRO stage 3"),
        "gradient_clipping": (0.5, "override"),
        "optimizer.params.lr": (5e-5, "auto: Transformers' default"),
        "precision.compute": ("bfloat16", "file: bf16.enabled"),
        "precision.reduce": ("bfloat16", "default, DeepSpeed's: the dtype of the computation"),
        "run.steps": (1000, "default"),
    }.items():
        assert values[name] == expected


def test_every_value_is_shown():
    sections = {"model": {"config": {"model_type": "llama"}}, "data": {}, "run": {}}
    text = "fp16.enabled=true scheduler.type=WarmupLR scheduler.params.warmup_num_steps=3"
    resolved = resolve_tree({**sections, **parse_tree(text)})
    shown = {value.name for value in values_of(dict(resolved), resolved.sources)}
    assert {path for path in schema_fields() if path.split(".")[0] in sections} <= shown
    names = """
        fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis
        fp16.min_loss_scale scheduler.type scheduler.params.warmup_num_steps compile.enabled
        parallel.blocks parallel.bucket_mib
    """
    assert set(names.split()) <= shown
    assert shown <= set(resolved.sources) | {"optimizer.type"}


def test_processes_are_those_of_the_file_or_the_fewest():
    assert explain({**BATCH, "parallel": {"tp": 2}, "run": {"processes": 4}}).world_size == 4
    assert explain({**BATCH, "run": {"processes": 4}}, world_size=6).world_size == 6
    assert explain({**BATCH, "parallel": {"tp": 2}}).world_size == 2


def test_a_file_that_cannot_be_resolved_shows_its_keys():
    explanation = explain({"zero_optimization": {"stage": 2, "overlap_comm": True}})
    assert len(explanation.keys) == 2
    assert [problem.field for problem in explanation.problems] == ["train_micro_batch_size_per_gpu"]
    # Values that do not depend on the missing size are shown as well.
    values = explained_values(explanation)
    assert values["zero_optimization.stage"] == (2, "file")
    assert values["optimizer.type"][0] == "AdamW" and "train_batch_size" not in values

    explanation = explain({"zero_optimization": {"stag": 2, "cpu_offload": True}})
    (row,) = explanation.keys
    assert (row.key, str(row.status)) == ("zero_optimization.cpu_offload", "renamed")
    assert len(explanation.problems) == 1
    assert explanation.world_size is None


@pytest.mark.parametrize("compress", ["none", "auto", ["int8", "powersgd"]])
def test_printed_values_of_data_parallelism_can_be_copied(compress):
    values = explained_values(explain({**BATCH, "parallel": {"compress_gradients": compress}}))
    copied = {}
    for name in (
        *("all_reduce", "transport", "compress_gradients", "compress_weights"),
        *("bucket_mib", "unused_parameters", "measure_seconds"),
    ):
        copied[name] = values[f"parallel.{name}"][0]

    values = explained_values(explain({**BATCH, "parallel": copied}))
    for name, value in copied.items():
        assert values[f"parallel.{name}"][0] == value, name


@pytest.mark.parametrize("kind", ["Adafactor", "Rprop"])
def test_optimizers_that_fail_on_shards_are_refused(kind):
    """The file alone shows the mistake, before text is read or a device is used."""
    tree = {"optimizer": {"type": kind}}
    assert resolve_tree(tree).optimizer.type == kind
    for text, reason in (
        ("ZERO.stage=1", "zero_optimization.stage = 1"),
        ("parallel.tp=2", "parallel.tp = 2"),
        ("bf16.enabled=true", "precision.compute = bfloat16"),
    ):
        with pytest.raises(ConfigError, match=f"optimizer.type = '{kind}'.*{reason}.*use AdamW"):
            resolve_tree({**tree, **parse_tree(text)})


def test_refusal_of_nebula_names_plaits_checkpoints():
    with pytest.raises(ConfigError, match="nebula = .*Plait's own files.*run.checkpoints"):
        load({"nebula": {"enabled": True}})
