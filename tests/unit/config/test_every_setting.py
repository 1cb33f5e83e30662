"""No setting is a silent no-op: changing any field of the schema changes what is resolved, or is refused.

A new field of which other values or other settings are needed has a row in `CHANGES`.
"""

from contextlib import suppress
from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from plait.config.dialects import keys
from plait.config.schema.config import Config
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import load, resolved, tree_of, written

SCRATCH = {"model.config": {"model_type": "llama"}}
SCHEDULE = {"scheduler.type": "WarmupLR"}
DISK = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_optimizer.nvme_path": "a",
}
SHARDS = {
    "zero_optimization.stage": 3,
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.offload_param.nvme_path": "a",
}
CHAT = {"data.source": "jsonl", "data.paths": ["x"], "data.format": "chat"}
LABELLED = {"data.source": "datasets", "data.paths": ["x"]}

CHANGES = {
    # path: (other settings of the file, one value, another value). Further rows follow from the schema, see `change_of`.
    "train_batch_size": ({"train_micro_batch_size_per_gpu": None}, 8, 16),
    "communication_data_type": ({}, "fp32", "bf16"),
    "data_parallel_size": ({}, 4, 2),
    "num_layers": ({"parallel.pp": 4}, 4, 2),
    "zero_optimization.offload_optimizer.device": ({"zero_optimization.stage": 2, "zero_optimization.offload_optimizer.nvme_path": "a"}, "none", "nvme"),
    "zero_optimization.offload_optimizer.pin_memory": ({"zero_optimization.stage": 2, "zero_optimization.offload_optimizer.device": "cpu"}, True, False),
    "zero_optimization.offload_param.device": ({"zero_optimization.stage": 3, "zero_optimization.offload_param.nvme_path": "a"}, "none", "nvme"),
    "zero_optimization.offload_param.nvme_path": (SHARDS, "a", "b"),
    "zero_optimization.offload_param.buffer_count": (SHARDS, 4, 5),
    "zero_optimization.offload_param.buffer_size": (SHARDS, 1000, 2000),
    "zero_optimization.offload_optimizer.ratio": (DISK, 1, 0.5),
    "zero_optimization.offload_optimizer.nvme_path": (DISK, "a", "b"),
    "zero_optimization.offload_optimizer.buffer_count": (DISK, 4, 5),
    "zero_optimization.offload_optimizer.buffer_size": (DISK, 1000, 2000),
    "data_types.grad_accum_dtype": ({"bf16.enabled": True}, "bf16", "fp32"),
    "data_types.keep_in_fp32_modules": ({"bf16.enabled": True}, ["a"], ["b"]),
    "optimizer.type": ({}, "AdamW", "SGD"),
    "optimizer.params": ({}, {"lr": 1e-3}, {"lr": 1e-4}),
    "scheduler.type": ({}, "WarmupLR", "WarmupDecayLR"),
    "scheduler.params": (SCHEDULE, {"warmup_num_steps": 3}, {"warmup_num_steps": 4}),
    "activation_checkpointing.partition_activations": ({"parallel.recompute.mode": "full", "parallel.tp": 2}, False, True),
    "activation_checkpointing.cpu_checkpointing": ({"parallel.recompute.mode": "full"}, False, True),
    "parallel.activation_offload.device": ({"parallel.activation_offload.fraction": 1, "parallel.activation_offload.path": "a"}, "cpu", "disk"),
    "parallel.activation_offload.path": ({"parallel.activation_offload.fraction": 1, "parallel.activation_offload.device": "disk"}, "a", "b"),
    "parallel.recompute.every": ({"parallel.recompute.mode": "full"}, 1, 2),
    "parallel.recompute.keep": ({"parallel.recompute.mode": "selective"}, ["attention"], ["matmul"]),
    "parallel.recompute.budget_gib": ({"parallel.recompute.sequence_length": 8}, 1, 2),
    "parallel.recompute.sequence_length": ({"parallel.recompute.budget_gib": 1}, 8, 16),
    "parallel.pipeline.schedule": ({"parallel.pp": 2}, "1f1b", "zbv"),
    "parallel.pipeline.stages_per_rank": ({"parallel.pp": 2}, 1, 2),
    "parallel.pipeline.blocks_per_stage": ({"parallel.pp": 2}, [3, 5], [4, 4]),
    "parallel.dp_replicate": ({"zero_optimization.stage": 2}, 1, 2),
    "parallel.dp_shard": ({"zero_optimization.stage": 2}, 4, 2),
    "parallel.context": ({"parallel.cp": 2}, "ring", "ulysses"),
    "parallel.sequence_parallel": ({"parallel.tp": 2}, False, True),
    "parallel.tensor_overlap": ({"parallel.tp": 2}, 0, 4),
    "parallel.loss_parallel": ({"parallel.tp": 2}, True, False),
    "parallel.plan": ({"parallel.tp": 2}, {"a": "colwise"}, {"a": "rowwise"}),
    "parallel.bucket_mib": ({}, "auto", 25),
    "parallel.compress_gradients": ({}, "int8", "int4"),
    "parallel.compress_weights": ({"zero_optimization.stage": 1}, "none", "int8"),
    "parallel.error_feedback": ({"parallel.compress_gradients": "int4"}, True, False),
    "parallel.powersgd_rank": ({"parallel.compress_gradients": "powersgd"}, 4, 8),
    "parallel.optimizer_in_backward": ({"zero_optimization.stage": 2, "parallel.unused_parameters": False}, False, True),
    "parallel.secondary_partition": ({"zero_optimization.stage": 3}, 0, 2),
    "model.config": ({}, {"model_type": "llama"}, {"model_type": "gpt2"}),
    "model.dtype": (SCRATCH, "float32", "bfloat16"),
    "data.source": ({"data.paths": ["x"]}, "files", "jsonl"),
    "data.paths": ({"data.source": "files"}, ["a"], ["b"]),
    "data.field": ({"data.source": "jsonl", "data.paths": ["x"]}, "text", "body"),
    "data.format": ({"data.source": "jsonl", "data.paths": ["x"]}, "text", "chat"),
    "data.ignored_columns": (CHAT, ["id"], ["tag"]),
    "data.append_end_of_text": (CHAT, False, True),
    "data.packing": ({}, "documents", None),
    "data.subset": (LABELLED, "a", "b"),
    "data.split": (LABELLED, "train", "test"),
    "data.streaming": (LABELLED, False, True),
    "data.buffer_sequences": ({**LABELLED, "data.streaming": True}, 1024, 64),
    "data.vocab_size": ({}, 8192, 4096),
    "data.sequence_length": ({}, 256, 128),
    "run.checkpoints": ({}, "a", "s3://b/c"),
}  # fmt: skip


def fields_of(kind, path=""):
    """Every field of a schema, with those of its sections."""
    for name, field in kind.model_fields.items():
        yield f"{path}{name}", field
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields_of(part, f"{path}{name}.")


FIELDS = dict(fields_of(Config))


def adapter_of(field):
    annotation = field.annotation
    return TypeAdapter(Annotated[annotation, *field.metadata] if field.metadata else annotation)


def change_of(path):
    """Settings that a field needs, and two values of it."""
    if path in CHANGES:
        return CHANGES[path]
    switch = f"{path.rpartition('.')[0]}.enabled"
    others = {switch: True} if switch in FIELDS and switch != path else {}
    annotation = FIELDS[path].annotation
    literals = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
    pairs = [get_args(part)[:2] for part in literals if len(get_args(part)) > 1]
    adapter = adapter_of(FIELDS[path])
    for pair in (*pairs, (False, True), ("a", "b"), (["a"], ["b"]), (1, 2), (0.1, 0.2)):
        with suppress(ValidationError):
            for value in pair:
                adapter.validate_python(value)
            return others, *pair
    raise AssertionError(f"{path} needs a row in CHANGES")


def outcome(settings):
    try:
        return resolved(tree_of(settings)).model_dump(exclude={"sources"})
    except ConfigError as error:
        return str(error)


PATHS = {path: path for path in sorted(keys.schema_fields())}


def test_rows_are_of_settings():
    assert CHANGES.keys() <= PATHS.keys()


def check_changed(path):
    """Check that two values of a setting resolve differently."""
    others, first, second = change_of(path)
    one, two = outcome({**others, path: first}), outcome({**others, path: second})
    assert isinstance(one, dict), one
    assert one != two


def test_changing_a_setting_changes_what_is_resolved():
    check_rows(PATHS, check_changed)


def check_origin(path):
    """Check that the source of a setting of the file is the file."""
    others, first, _ = change_of(path)
    assert load(tree_of({**others, path: first})).origin(path) == "file"
    made = resolved(tree_of({**others, path: first}))
    if path in made.sources:
        assert made.sources[path].startswith("file")


def test_a_setting_of_the_file_says_that_it_is_from_the_file():
    check_rows(PATHS, check_origin)


def test_every_source_is_the_default_for_an_empty_file():
    config = Config()
    assert {config.origin(path) for path in keys.schema_fields()} == {"default"}


def test_truth_values_are_true_and_false_alone():
    """pydantic takes "yes" and 1 for true, where DeepSpeed takes "no" for it."""
    tolerant, count = [], 0
    for path, field in FIELDS.items():
        reads = adapter_of(field)
        try:
            reads.validate_python(True)
            reads.validate_python(False)
        except ValidationError:
            continue
        count += 1
        for value in ("yes", "no", "true", "off", 1, 0):
            with suppress(ValidationError):
                if isinstance(reads.validate_python(value), bool):
                    tolerant.append(f"{path} = {value!r}")
    assert count > 10 and not tolerant, tolerant


def test_a_url_for_a_folder():
    """Without the refusal, a local folder `s3:` would be created."""
    for text in (
        "run.folder=s3://bucket/run",
        "data.cache=gs://bucket/cache",
        "zero_optimization.stage=2 zero_optimization.offload_optimizer.device=nvme zero_optimization.offload_optimizer.nvme_path=s3://bucket",
        "parallel.activation_offload.device=disk parallel.activation_offload.path=s3:/bucket",
    ):
        with pytest.raises(ConfigError, match=r"not a URL; .*run.checkpoints"):
            load(written(text))
    assert load({"run": {"checkpoints": "s3://bucket/run"}}).run.checkpoints == "s3://bucket/run"
