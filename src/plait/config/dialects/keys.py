"""Index of all keys that a file may contain: the schema, the DeepSpeed table, and aliases.

The index tells whether a dotted path is a setting or a section, which names a section contains, and
which known names are similar to a misspelt name. Each part of the index is built once.

Aliases are other names of a setting: of DeepSpeed, Megatron and Accelerate, and legacy or misspelt
keys. `examine` moves a value from its alias to the target. It refuses a file in which two names of
one target have different values. A target is a field or section of the schema, or a key of the
DeepSpeed table.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter

from plait.config.dialects.deepspeed import TABLE
from plait.config.schema.config import Config
from plait.policy import Policy


class _Absent:
    """Type of `ABSENT`, the result of `Alias.convert` for a value that leaves the target unset."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def _identity(value: Any) -> Any:
    return value


def _zero_is_off(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        return ABSENT
    return value


def _auto_is_off(value: Any) -> Any:
    return ABSENT if value == "auto" else value


def _flag(on: Any, off: Any = ABSENT) -> Callable[[Any], Any]:
    """Return a function that maps true to `on` and false to `off`. Other values do not change."""

    def convert(value: Any) -> Any:
        # Invalid values stay for the check of the target's type.
        if not isinstance(value, bool):
            return value
        return on if value else off

    return convert


_TO_DEVICE = _flag("cpu", "none")


@dataclass(frozen=True)
class Alias:
    """Another name of a setting or section, and the conversion of its value."""

    target: str
    """Path of the setting or section."""
    note: str
    """Origin of the name, as `plait config explain` shows it."""
    convert: Callable[[Any], Any] = _identity
    """Conversion of the value to the target's."""


_MEGATRON = "Megatron's name"
_ACCELERATE = "accelerate's name"
_AUTOTP = "DeepSpeed's name; 0 leaves tensor parallelism off"
_SPELLING = "misspelt in published files"
_OLD = "an older name"
_FIELD = "the name inside DeepSpeed"
_ULYSSES = (
    "DeepSpeed's Ulysses degree: as many processes share a sequence, here by context parallelism"
)

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"

ALIASES: dict[str, Alias] = {
    # Degrees of parallelism.
    "tensor_parallel.tp_size": Alias("parallel.tp", "DeepSpeed's name"),
    "tensor_parallel.autotp_size": Alias("parallel.tp", _AUTOTP, _zero_is_off),
    "tensor_parallel.tp.tp_size": Alias("parallel.tp", "DeepSpeed's name"),
    "tensor_parallel.tensor_parallel": Alias("tensor_parallel.tp", _FIELD),
    "tensor_model_parallel_size": Alias("parallel.tp", _MEGATRON),
    "model_parallel_size": Alias("parallel.tp", "the older name of Megatron and GPT-NeoX"),
    "tensor_parallel_size": Alias("parallel.tp", "the name of vLLM and others"),
    "mp_size": Alias("parallel.tp", "an older name of DeepSpeed"),
    "pipeline.stages": Alias(
        "parallel.pp", 'DeepSpeed\'s name; "auto" means no pipeline', _auto_is_off
    ),
    "pipeline_parallel.stages": Alias("parallel.pp", "the number of pipeline stages"),
    "pipeline_parallel.size": Alias("parallel.pp", "the number of pipeline stages"),
    "pipeline_parallel.pp_size": Alias("parallel.pp", "the number of pipeline stages"),
    "pipeline_model_parallel_size": Alias("parallel.pp", _MEGATRON),
    "pipeline_parallel_size": Alias("parallel.pp", "a name that DeepSpeed does not read"),
    "pipe_parallel_size": Alias(
        "parallel.pp", "GPT-NeoX's name; 0 leaves pipeline parallelism off", _zero_is_off
    ),
    "context_parallel_size": Alias("parallel.cp", _MEGATRON),
    "expert_model_parallel_size": Alias("parallel.ep", _MEGATRON),
    "sequence_parallel_size": Alias("parallel.cp", _ULYSSES),
    **{
        f"{axis}_size": Alias(f"parallel.{axis}", _ACCELERATE)
        for axis in ("tp", "pp", "cp", "dp_replicate", "dp_shard")
    },
    # Batch sizes of Megatron-LM.
    "micro_batch_size": Alias("train_micro_batch_size_per_gpu", _MEGATRON),
    "global_batch_size": Alias("train_batch_size", _MEGATRON),
    # Older and misspelt names of DeepSpeed, and the names of its attributes.
    "bfloat16": Alias("bf16", _OLD),
    "fp32_allreduce": Alias(
        "communication_data_type", "an older name; false leaves it unset", _flag("fp32")
    ),
    "bf16.check_overflow": Alias("bf16.check_grad_overflow", _OLD),
    "compile.disable": Alias("compile.enabled", "an older name, negated", _flag(False, True)),
    "zero_optimization.ignore_unused_parameters": Alias(
        "parallel.unused_parameters", "DeepSpeed's name"
    ),
    "zero_optimization.zero_quantized_weights": Alias(
        "parallel.compress_weights", "DeepSpeed's name; true is int8", _flag("int8")
    ),
    "zero_optimization.zero_quantized_gradients": Alias(
        "parallel.compress_gradients", "DeepSpeed's name; true is int4", _flag("int4")
    ),
    "zero_optimization.zero_hpz_partition_size": Alias(
        "parallel.secondary_partition", "DeepSpeed's name; 1 is off"
    ),
    "zero_optimization.cpu_offload": Alias(
        "zero_optimization.offload_optimizer.device", _OLD, _TO_DEVICE
    ),
    "zero_optimization.cpu_offload_param": Alias(
        "zero_optimization.offload_param.device", _OLD, _TO_DEVICE
    ),
    "zero_optimization.cpu_offload_params": Alias(
        "zero_optimization.offload_param.device", _OLD, _TO_DEVICE
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Alias(_GATHER, _OLD),
    "zero_optimization.gather_fp16_weights_on_model_save": Alias(_GATHER, _OLD),
    "zero_optimization.gather_16bit_weights_on_model_save": Alias(_GATHER, _FIELD),
    "zero_optimization.prefetch_bucket_size": Alias(
        "zero_optimization.stage3_prefetch_bucket_size", _FIELD
    ),
    "zero_optimization.param_persistence_threshold": Alias(
        "zero_optimization.stage3_param_persistence_threshold", _FIELD
    ),
    "zero_optimization.stage3_param_persitence_threshold": Alias(
        "zero_optimization.stage3_param_persistence_threshold", _SPELLING
    ),
    "zero_optimization.model_persistence_threshold": Alias(
        "zero_optimization.stage3_model_persistence_threshold", _FIELD
    ),
    "zero_optimization.max_live_parameters": Alias(
        "zero_optimization.stage3_max_live_parameters", _FIELD
    ),
    "zero_optimization.max_reuse_distance": Alias(
        "zero_optimization.stage3_max_reuse_distance", _FIELD
    ),
    "zero_optimization.module_granularity_threshold": Alias(
        "zero_optimization.stage3_module_granularity_threshold", _FIELD
    ),
    "zero_optimization.use_all_reduce_for_fetch_params": Alias(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params", _FIELD
    ),
    "zero_optimization.allgather_sequential": Alias(
        "zero_optimization.stage3_allgather_sequential", _FIELD
    ),
    "activation_checkpointing.partitioned_activations": Alias(
        "activation_checkpointing.partition_activations", _SPELLING
    ),
    "aio.thread_count": Alias("aio.intra_op_parallelism", _OLD),
}
"""Aliases by their path. An alias may also rename a section (`bfloat16`)."""


def _expand_zero(value: Any) -> Any:
    """Expand `"zero_optimization": true`, DeepSpeed's original setting, which means stage 1."""
    return {"stage": int(value)} if isinstance(value, bool) else value


def _expand_pipeline(value: Any) -> Any:
    """Expand a number of pipeline stages to the section that sets it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"size": value}
    return value


SHORT_FORMS: dict[str, Callable[[Any], Any]] = {
    "zero_optimization": _expand_zero,
    "pipeline_parallel": _expand_pipeline,
}
"""Sections that may be written as a single value, and their expansion."""


_MAX_NAME_LENGTH = 100
"""Maximum length of a name for which a similar one is searched."""
_MAX_SUGGESTIONS = 5
_MAX_LISTED = 40
"""Maximum number of known names that a message lists."""


@dataclass(frozen=True)
class SchemaField:
    """Path, type and description of a setting of the schema."""

    path: str
    description: str
    free: bool
    """True if the value is an object whose keys the schema does not list (`model.config`,
    `optimizer.params`).
    """
    annotation: Any
    """Type of the value, including all constraints."""


def policy_in(annotation: Any) -> type[Policy] | None:
    """Return the Policy class in a field's type (`RunSection | None`), or None."""
    if isinstance(annotation, type) and issubclass(annotation, Policy):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        for argument in get_args(annotation):
            policy = policy_in(argument)
            if policy is not None:
                return policy
    return None


def _is_free(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_is_free(argument) for argument in get_args(annotation))
    return get_origin(annotation) is dict


def walk_fields(policy: type[Policy], prefix: str = "") -> Iterator[SchemaField]:
    """Yield the settings of a Policy and of its sections, depth first in source order."""
    for name, info in policy.model_fields.items():
        path = f"{prefix}{name}"
        section = policy_in(info.annotation)
        if section is not None:
            yield from walk_fields(section, f"{path}.")
            continue

        annotation: Any = info.annotation
        if info.metadata:
            # pydantic moves constraints out of the annotation.
            annotation = Annotated[(info.annotation, *info.metadata)]
        yield SchemaField(path, info.description or "", _is_free(info.annotation), annotation)


def _parents(path: str) -> Iterator[str]:
    names = path.split(".")
    for length in range(1, len(names)):
        yield ".".join(names[:length])


@cache
def schema_fields() -> dict[str, SchemaField]:
    """Return all settings of the schema, by dotted path."""
    return {field.path: field for field in walk_fields(Config)}


@cache
def value_adapter(path: str) -> TypeAdapter[Any]:
    """Return the adapter that parses a value of the setting `path`."""
    return TypeAdapter(schema_fields()[path].annotation)


@cache
def schema_sections() -> frozenset[str]:
    """Return the paths of the schema that contain settings."""
    return frozenset(parent for path in schema_fields() for parent in _parents(path))


@cache
def sections() -> frozenset[str]:
    """Return all paths that contain known keys: from the schema, the table and the aliases."""
    parents = {parent for path in (*schema_fields(), *TABLE, *ALIASES) for parent in _parents(path)}
    # A free field has known keys in it, but it is a setting.
    return frozenset(parents - set(schema_fields()))


@cache
def known_paths() -> frozenset[str]:
    """Return all paths that a file may contain."""
    return frozenset({*schema_fields(), *TABLE, *ALIASES} | sections())


@cache
def names_in(section: str) -> tuple[str, ...]:
    """Return the known names in a section ("" for the top of the file), sorted."""
    prefix = f"{section}." if section else ""
    paths = [path.removeprefix(prefix) for path in known_paths() if path.startswith(prefix)]
    # The first name below the section is one of its keys or sections.
    return tuple(sorted({path.split(".")[0] for path in paths}))


_REMOVED = {
    "parallel.links": (
        "leave it out; parallel.measure_seconds measures the links at the start of a run"
    ),
    "run.history": (
        "leave it out; `plait calibrate` measures a machine, and `plait plan --calibrate FILE`"
        " takes what it wrote"
    ),
}
"""Settings of earlier versions: remedy by path."""


def remedy_for(section: str, name: str) -> str:
    """Return the remedy for an unknown name in a section.

    The remedy names the most similar names in the section, else sections that contain the name,
    else all names of the section.
    """
    prefix = f"{section}." if section else ""
    if prefix + name in _REMOVED:
        return _REMOVED[prefix + name]

    matches = nearest(name, names_in(section))
    if matches:
        return f"did you mean {' or '.join(prefix + match for match in matches)}?"

    # The name may be right and the section wrong.
    elsewhere = sorted(path for path in known_paths() if path.rpartition(".")[2] == name)
    if elsewhere:
        return f"it belongs elsewhere: {' or '.join(elsewhere[:3])}"

    names = names_in(section)
    if len(names) > _MAX_LISTED:
        return "`plait config schema` lists what is known"
    return f"known here are {', '.join(names)}"


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates with the smallest edit distance from a misspelt name.

    Candidates that differ in more than a third of the letters are left out.
    """
    if len(name) > _MAX_NAME_LENGTH:
        return []
    # Keys are in lower case with underscores, and flags of other programs have dashes.
    written = name.lower().replace("-", "_")
    limit = max(1, len(name) // 3)
    # The difference of the lengths is a lower bound of the distance, and much cheaper.
    plausible = [
        candidate for candidate in candidates if abs(len(candidate) - len(written)) <= limit
    ]
    distances = sorted(
        (edit_distance(written, candidate.lower()), candidate) for candidate in plausible
    )
    if not distances or distances[0][0] > limit:
        return []
    smallest = distances[0][0]
    matches = [candidate for distance, candidate in distances if distance == smallest]
    return matches[:_MAX_SUGGESTIONS]


def edit_distance(a: str, b: str) -> int:
    """Return the optimal string alignment distance of two strings.

    It is the number of letters to insert, remove, replace or swap with their neighbour.
    """
    # Rows of the dynamic programme: row[j] is the distance of a[:i] and b[:j].
    before_last: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            # Remove, insert, or keep or replace a letter.
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            # Swap two neighbours.
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before_last[j - 2] + 1)
            row.append(cost)
        before_last = last
        last = row
    return last[len(b)]
