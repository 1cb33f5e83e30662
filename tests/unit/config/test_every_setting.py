"""Every setting has an effect: a change of any field changes the result, or is refused.

A new field that depends on other settings, or takes unusual values, needs a row in `CHANGES`.
"""

from contextlib import suppress
from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from plait.config.dialects import keys
from plait.config.schema.config import Config
from plait.config.source import scalar
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import (
    ABBREVIATIONS,
    load,
    parse_settings,
    parse_tree,
    resolve_tree,
    tree_of,
)

NEEDS = {
    "LLAMA": 'model.config={"model_type":"llama"}',
    "SCHEDULE": "scheduler.type=WarmupLR",
    "STATES_ON_DISK": "ZERO.stage=2 OPT.device=nvme OPT.nvme_path=a",
    "SHARDS_ON_DISK": "ZERO.stage=3 PARAM.device=nvme PARAM.nvme_path=a",
    "CHAT": 'data.source=jsonl data.paths=["x"] data.format=chat',
    "DATASET": 'data.source=datasets data.paths=["x"]',
}
"""Settings that several rows of `CHANGES` need."""

CHANGES = """
    train_batch_size 8 16 train_micro_batch_size_per_gpu=null
    communication_data_type fp32 bf16
    data_parallel_size 4 2
    num_layers 4 2 parallel.pp=4
    OPT.device none nvme ZERO.stage=2 OPT.nvme_path=a
    OPT.pin_memory true false ZERO.stage=2 OPT.device=cpu
    OPT.ratio 1 0.5 STATES_ON_DISK
    OPT.nvme_path a b STATES_ON_DISK
    OPT.buffer_count 4 5 STATES_ON_DISK
    OPT.buffer_size 1000 2000 STATES_ON_DISK
    PARAM.device none nvme ZERO.stage=3 PARAM.nvme_path=a
    PARAM.nvme_path a b SHARDS_ON_DISK
    PARAM.buffer_count 4 5 SHARDS_ON_DISK
    PARAM.buffer_size 1000 2000 SHARDS_ON_DISK
    data_types.grad_accum_dtype bf16 fp32 bf16.enabled=true
    data_types.keep_in_fp32_modules ["a"] ["b"] bf16.enabled=true
    optimizer.type AdamW SGD
    optimizer.params {"lr":1e-3} {"lr":1e-4}
    scheduler.type WarmupLR WarmupDecayLR
    scheduler.params {"warmup_num_steps":3} {"warmup_num_steps":4} SCHEDULE
    activation_checkpointing.partition_activations false true \
        parallel.recompute.mode=full parallel.tp=2
    activation_checkpointing.cpu_checkpointing false true parallel.recompute.mode=full
    parallel.activation_offload.device cpu disk \
        parallel.activation_offload.fraction=1 parallel.activation_offload.path=a
    parallel.activation_offload.path a b \
        parallel.activation_offload.fraction=1 parallel.activation_offload.device=disk
    parallel.recompute.every 1 2 parallel.recompute.mode=full
    parallel.recompute.keep ["attention"] ["matmul"] parallel.recompute.mode=selective
    parallel.recompute.budget_gib 1 2 parallel.recompute.sequence_length=8
    parallel.recompute.sequence_length 8 16 parallel.recompute.budget_gib=1
    parallel.pipeline.schedule 1f1b zbv parallel.pp=2
    parallel.pipeline.stages_per_rank 1 2 parallel.pp=2
    parallel.pipeline.blocks_per_stage [3,5] [4,4] parallel.pp=2
    parallel.dp_replicate 1 2 ZERO.stage=2
    parallel.dp_shard 4 2 ZERO.stage=2
    parallel.context ring ulysses parallel.cp=2
    parallel.sequence_parallel false true parallel.tp=2
    parallel.tensor_overlap 0 4 parallel.tp=2
    parallel.loss_parallel true false parallel.tp=2
    parallel.plan {"a":"colwise"} {"a":"rowwise"} parallel.tp=2
    parallel.bucket_mib auto 25
    parallel.compress_gradients int8 int4
    parallel.compress_weights none int8 ZERO.stage=1
    parallel.error_feedback true false parallel.compress_gradients=int4
    parallel.powersgd_rank 4 8 parallel.compress_gradients=powersgd
    parallel.optimizer_in_backward false true ZERO.stage=2 parallel.unused_parameters=false
    parallel.secondary_partition 0 2 ZERO.stage=3
    model.config {"model_type":"llama"} {"model_type":"gpt2"}
    model.dtype float32 bfloat16 LLAMA
    data.source files jsonl data.paths=["x"]
    data.paths ["a"] ["b"] data.source=files
    data.field text body data.source=jsonl data.paths=["x"]
    data.format text chat data.source=jsonl data.paths=["x"]
    data.ignored_columns ["id"] ["tag"] CHAT
    data.append_end_of_text false true CHAT
    data.packing documents null
    data.subset a b DATASET
    data.split train test DATASET
    data.streaming false true DATASET
    data.buffer_sequences 1024 64 DATASET data.streaming=true
    data.vocab_size 8192 4096
    data.sequence_length 256 128
    run.checkpoints a s3://b/c
"""
"""Lines of a path, two values of it, and the other settings that it needs."""


def parse_changes(text):
    """Return the rows of `CHANGES` by path: other settings, and two values."""
    for short, full in {**NEEDS, **ABBREVIATIONS}.items():
        text = text.replace(short, full)
    changes = {}
    for line in text.strip().splitlines():
        path, first, second, *others = line.split()
        changes[path] = (parse_settings(" ".join(others)), scalar(first), scalar(second))
    return changes


def fields_of(schema, prefix=""):
    """Yield path and field of every setting of a schema and of its sections."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}", field
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from fields_of(option, f"{prefix}{name}.")


FIELDS = dict(fields_of(Config))
PATHS = {path: path for path in sorted(keys.schema_fields())}
ROWS = parse_changes(CHANGES)


def adapter_of(field):
    """Return pydantic's validator of a field."""
    if not field.metadata:
        return TypeAdapter(field.annotation)
    return TypeAdapter(Annotated[field.annotation, *field.metadata])


def change_of(path):
    """Return the other settings that a field needs, and two values of it."""
    if path in ROWS:
        return ROWS[path]

    others = {}
    switch = f"{path.rpartition('.')[0]}.enabled"
    if switch in FIELDS and switch != path:
        others[switch] = True

    annotation = FIELDS[path].annotation
    pairs = []
    for option in (annotation, *get_args(annotation)):
        if get_origin(option) is Literal and len(get_args(option)) > 1:
            pairs.append(get_args(option)[:2])
    adapter = adapter_of(FIELDS[path])
    for pair in (*pairs, (False, True), ("a", "b"), (["a"], ["b"]), (1, 2), (0.1, 0.2)):
        with suppress(ValidationError):
            for value in pair:
                adapter.validate_python(value)
            return others, *pair
    raise AssertionError(f"{path} needs a row in CHANGES")


def test_every_row_of_changes_is_a_setting():
    assert ROWS.keys() <= PATHS.keys()


def check_change(path):
    """Check that the first value is accepted, and that the second one resolves differently."""
    others, first, second = change_of(path)
    resolved = resolve_tree(tree_of({**others, path: first})).model_dump(exclude={"sources"})
    # A refusal of the second value is a difference too.
    with suppress(ConfigError):
        changed = resolve_tree(tree_of({**others, path: second}))
        assert resolved != changed.model_dump(exclude={"sources"})


def test_changing_a_setting_changes_what_is_resolved():
    check_rows(PATHS, check_change)


def check_origin(path):
    """Check that the source of a setting of the file is the file."""
    others, first, _ = change_of(path)
    tree = tree_of({**others, path: first})
    assert load(tree).origin(path) == "file"
    assert resolve_tree(tree).sources.get(path, "file").startswith("file")


def test_a_setting_of_the_file_has_the_file_as_source():
    check_rows(PATHS, check_origin)


def test_every_source_of_an_empty_file_is_the_default():
    config = Config()
    assert {config.origin(path) for path in PATHS} == {"default"}


def test_only_true_and_false_are_truth_values():
    """Pydantic reads "yes" and 1 as true, where DeepSpeed reads "no" as true as well."""
    switches = 0
    for path, field in FIELDS.items():
        adapter = adapter_of(field)
        try:
            adapter.validate_python(True)
            adapter.validate_python(False)
        except ValidationError:
            continue
        switches += 1
        for value in ("yes", "no", "true", "off", 1, 0):
            # Some fields take a text or a number as well as a truth value.
            with suppress(ValidationError):
                assert not isinstance(adapter.validate_python(value), bool), (path, value)
    assert switches > 10


def check_url(text):
    with pytest.raises(ConfigError, match=r"not a URL; .*run.checkpoints"):
        load(parse_tree(text))


def test_a_url_is_refused_where_a_folder_is_needed():
    """A local folder `s3:` would be created otherwise."""
    texts = (
        "run.folder=s3://bucket/run",
        "data.cache=gs://bucket/cache",
        "ZERO.stage=2 OPT.device=nvme OPT.nvme_path=s3://bucket",
        "parallel.activation_offload.device=disk parallel.activation_offload.path=s3:/bucket",
    )
    check_rows({text: text for text in texts}, check_url)
    assert load({"run": {"checkpoints": "s3://bucket/run"}}).run.checkpoints == "s3://bucket/run"
