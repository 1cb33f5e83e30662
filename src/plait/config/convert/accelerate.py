"""Conversion of a file of `accelerate launch`. `accelerate_keys` lists the settings of each key.

Keys that the file omits have Accelerate's default if it differs from Plait's. As in Accelerate, the
section of another `distributed_type` is not read; each of its keys has a row that says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.config.convert import accelerate_keys
from plait.config.convert.accelerate_keys import PREFIXES, REPLICATED, SECTIONS, is_on
from plait.config.convert.fsdp_sharding import (
    SHARD,
    SHARDING_KEYS,
    STAGE,
    ShardingKeys,
    read_sharding,
)
from plait.config.convert.translated import TranslatedDocument, Translation, problems_in
from plait.config.dialects.keys import known_paths, nearest
from plait.config.reading.source import Document, read_named
from plait.config.schema.provenance import KeyReport, Status
from plait.errors import ConfigError, Problem
from plait.units import is_count

_TYPES = (*REPLICATED, "DEEPSPEED", "FSDP")
_TYPE_OF_SECTION = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
"""Value of `distributed_type` with which Accelerate reads a section."""
_FLAGS = "give Megatron-LM's flags: plait config convert -- --tensor-model-parallel-size 2 ..."
_TOP = {key.path: key for key in accelerate_keys.TOP}
_COMBINED_KEYS = (
    "distributed_type",
    "mixed_precision",
    "num_processes",
    "fp16",
    "dynamo_backend",
    "fp8_config",
    *SECTIONS,
    *_TYPE_OF_SECTION,
)
"""Keys at the top of the file that are read in this module."""

_CLIPPING = (
    "; a script clips where it calls clip_grad_norm_, plait.initialize at 1.0 unless"
    " gradient_clipping is 0"
)
_COMBINED_IN_SECTION = {
    "fsdp_config": tuple(f"fsdp_{name}" for name in SHARDING_KEYS),
    "deepspeed_config": ("deepspeed_config_file",),
}
"""Keys of sections that are read in this module, by section."""


@dataclass
class _AccelerateFile:
    """File that is converted, and the result so far."""

    document: Document
    translation: Translation = field(default_factory=Translation)
    distributed_type: str = ""
    """Upper-case value of `distributed_type`; empty if it is missing."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Accelerate's defaults by path."""
    deepspeed: dict[str, Any] | None = None
    """Content of the file that `deepspeed_config_file` names, if any."""

    @property
    def tree(self) -> Mapping[str, Any]:
        return self.document.tree

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section, which is empty if it is missing or not an object."""
        section = self.tree.get(name)
        if not isinstance(section, dict):
            return {}
        return section

    def not_read(self) -> str:
        """Return the reason for which the section of another type is not read."""
        kind = self.distributed_type or "missing"
        return f"distributed_type is {kind}, so Accelerate does not read it either"


def translate(document: Document) -> TranslatedDocument:
    """Return the configuration that a file of Accelerate describes. Problems are collected."""
    file = _AccelerateFile(document)
    translation = file.translation
    # The sections that follow depend on these two.
    file.distributed_type = _read_distributed_type(file)
    file.deepspeed = _read_deepspeed_file(file)

    for name, value in file.tree.items():
        if name in SECTIONS:
            _read_section(file, name, value)
        elif name in _TYPE_OF_SECTION or name == "fp8_config":
            _skip_section(file, name, value)
        elif name in _TOP:
            translation.translate_key(name, _TOP[name], value)
        elif name not in _COMBINED_KEYS:
            _refuse_unknown(file, name, value, (*_TOP, *_COMBINED_KEYS))

    processes_per_machine = _read_processes(file)
    if file.distributed_type == "FSDP":
        _read_fsdp_sharding(file, processes_per_machine)
    _read_precision(file)
    _complete_degrees(file)
    return translation.finish(document.name, "Accelerate", file.defaults, base=file.deepspeed)


def _read_distributed_type(file: _AccelerateFile) -> str:
    """Return the distributed type in upper case, and set the default of the ZeRO stage."""
    translation = file.translation
    value = file.tree.get("distributed_type")
    remedy = "use NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED"
    if value is None:
        rule = "is missing, and Accelerate does not run without it"
        translation.problems.append(Problem("distributed_type", None, rule, remedy))
        return ""

    # YAML reads NO as false.
    kind = "NO" if value is False else str(value).upper()
    if kind == "MEGATRON_LM":
        rule = "the section of Accelerate has a part of Megatron-LM's flags"
        translation.refuse("distributed_type", value, rule, _FLAGS)
    elif kind in ("XLA", "TPU"):
        rule = "this release runs on GPUs and CPUs"
        translation.refuse("distributed_type", value, rule, remedy)
    elif kind not in _TYPES:
        rule = "is no type that Accelerate has"
        translation.refuse("distributed_type", value, rule, remedy)
    else:
        if kind in REPLICATED:
            meaning = f"{STAGE} 0: a replica on every process"
        else:
            meaning = f"{STAGE}, by {kind.lower()}_config"
        if kind != "DEEPSPEED":
            meaning += _CLIPPING
        translation.rows.append(
            KeyReport("distributed_type", value, Status.RENAMED, meaning, STAGE)
        )

    if kind in REPLICATED:
        file.defaults[STAGE] = 0
    elif kind == "DEEPSPEED":
        file.defaults[STAGE] = 2
    elif kind == "FSDP":
        file.defaults[STAGE] = 3
    return kind


def _read_section(file: _AccelerateFile, section: str, value: Any) -> None:
    translation = file.translation
    keys = SECTIONS[section]
    if value is None or value == {}:
        translation.rows.append(KeyReport(section, value, Status.COMMENT, "empty: not given"))
        return
    if not isinstance(value, dict):
        remedy = f"write for example {{{next(iter(keys))}: ...}}"
        translation.refuse(section, value, "is a section and needs an object", remedy)
        return

    is_read = _TYPE_OF_SECTION.get(section, file.distributed_type) == file.distributed_type
    combined = _COMBINED_IN_SECTION.get(section, ())
    for written, item in value.items():
        shown = f"{section}.{written}"
        name = _add_prefix(section, written)
        if not is_read:
            translation.ignore(shown, item, file.not_read())
        elif name in combined:
            # Read by `_read_deepspeed_file` or `_read_fsdp_sharding`.
            continue
        elif name not in keys:
            _refuse_unknown(file, shown, item, (*keys, *combined))
        elif (
            file.deepspeed is not None
            and name in accelerate_keys.IN_DEEPSPEED_FILE
            and item is not None
        ):
            rule = "stands beside deepspeed_config_file, which decides it"
            translation.refuse(shown, item, rule, "leave it out, and write it in that file")
        else:
            translation.translate_key(shown, keys[name], item)


def _add_prefix(section: str, name: str) -> str:
    """Return the name of a key with the prefix of its section."""
    prefix = PREFIXES.get(section, "")
    if name.startswith(prefix):
        return name
    return prefix + name


def _skip_section(file: _AccelerateFile, name: str, value: Any) -> None:
    """Add a row for a section of a program that Plait does not use."""
    if not value:
        file.translation.rows.append(KeyReport(name, value, Status.COMMENT, "empty: not given"))
    elif name == "fp8_config":
        file.translation.ignore(name, value, "only mixed_precision fp8 reads it")
    else:
        file.translation.ignore(name, value, f"{file.not_read()}; {_FLAGS}")


def _refuse_unknown(file: _AccelerateFile, shown: str, value: Any, names: Sequence[str]) -> None:
    section, _, name = shown.rpartition(".")
    matches = nearest(name, names)
    prefixed = [candidate for candidate in names if candidate.endswith(f"_{name}")]
    if prefixed:
        remedy = f"write {prefixed[0]}; Accelerate does not read the short name"
    elif not section and shown in known_paths():
        remedy = (
            "a file is one of Accelerate or one of Plait's: leave it out here, and add it to what"
            " `plait config convert` writes"
        )
    elif matches:
        remedy = f"did you mean {' or '.join(matches)}?"
    else:
        remedy = "leave it out"
    file.translation.refuse(shown, value, "unknown key of Accelerate", remedy)


def _read_deepspeed_file(file: _AccelerateFile) -> dict[str, Any] | None:
    """Return the content of the file that `deepspeed_config_file` names, or None."""
    translation = file.translation
    shown = "deepspeed_config.deepspeed_config_file"
    path = file.section("deepspeed_config").get("deepspeed_config_file")
    if path is None or path == "none" or file.distributed_type != "DEEPSPEED":
        return None
    if not isinstance(path, str) or path.lower() == "none":
        translation.refuse(shown, path, "must be text", "give the path of a DeepSpeed file")
        return None

    try:
        tree = read_named(path, file.document).tree
    except ConfigError as error:
        translation.rows.append(KeyReport(shown, path, Status.REFUSED, "cannot be read"))
        translation.problems += problems_in(shown, error)
        return {}
    meaning = "the keys of that file, each with a row of its own"
    translation.rows.append(KeyReport(shown, path, Status.RENAMED, meaning))
    # The stage is that of the file.
    file.defaults.pop(STAGE)
    if not isinstance(tree.get("zero_optimization"), dict | bool):
        rule = f"{path} has no such section, which Accelerate asks for"
        problem = Problem(f"{shown}: zero_optimization", None, rule, "add it, with a stage")
        translation.problems.append(problem)
    return tree


def _read_processes(file: _AccelerateFile) -> int | None:
    """Set the processes per machine and return them; None if the file does not determine them."""
    translation = file.translation
    value = file.tree.get("num_processes")
    machines = file.tree.get("num_machines", 1)
    if value is None or value == -1:
        if "num_processes" in file.tree:
            meaning = "left to the launcher: plait launch --nproc-per-node"
            translation.ignore("num_processes", value, meaning)
        return None
    if file.distributed_type == "NO":
        meaning = "distributed_type NO runs one process and ignores this value"
        translation.ignore("num_processes", value, meaning)
        file.defaults["run.processes"] = 1
        return None

    valid = all(map(is_count, (value, machines)))
    if not valid or value % machines:
        rule = f"cannot be shared out over num_machines = {machines!r}"
        remedy = "give the processes of all machines together, as many on each"
        translation.refuse("num_processes", value, rule, remedy)
        return None

    processes = int(value // machines)
    if machines > 1:
        meaning = f"start them with plait launch --nnodes {machines} --nproc-per-node {processes}"
        translation.ignore("num_processes", value, meaning)
        return processes
    path = "run.processes"
    translation.set(path, "num_processes", processes)
    translation.rows.append(KeyReport("num_processes", value, Status.RENAMED, path, path))
    return processes


def _read_fsdp_sharding(file: _AccelerateFile, processes_per_machine: int | None) -> None:
    sharding = {}
    for written, value in file.section("fsdp_config").items():
        name = _add_prefix("fsdp_config", written).removeprefix("fsdp_")
        if name in SHARDING_KEYS:
            sharding[name] = (f"fsdp_config.{written}", value)
    keys = ShardingKeys(sharding, 1, processes_per_machine, launched=True)
    read_sharding(file.translation, keys)


def _read_precision(file: _AccelerateFile) -> None:
    """Read `mixed_precision`, or `fp16`, its name in old files."""
    translation = file.translation
    tree = file.tree
    shown = "mixed_precision"
    if "fp16" in tree and "mixed_precision" in tree:
        translation.ignore("fp16", tree["fp16"], "mixed_precision decides")
    elif "fp16" in tree:
        shown = "fp16"
    if "dynamo_backend" in tree:
        # A key of `dynamo_config` in old files.
        key = SECTIONS["dynamo_config"]["dynamo_backend"]
        translation.translate_key("dynamo_backend", key, tree["dynamo_backend"])

    value = tree.get(shown)
    if value is None:
        if shown in tree:
            translation.rows.append(KeyReport(shown, None, Status.COMMENT, "null: not given"))
        return
    if shown == "mixed_precision":
        name = str(value).lower()
    elif is_on(value):
        name = "fp16"
    else:
        name = "no"

    if file.deepspeed is not None:
        rule = "stands beside deepspeed_config_file, which decides it"
        remedy = "leave it out, and write fp16 or bf16 in that file"
        translation.refuse(shown, value, rule, remedy)
    elif not is_on(name):
        translation.ignore(shown, value, "off, as it is in Plait")
    elif name == "fp8":
        rule = "this release computes in fp16, bf16 or the dtype of the model"
        translation.refuse(shown, value, rule, "use bf16")
    elif name not in ("fp16", "bf16"):
        translation.refuse(shown, value, "is none of no, fp16, bf16", "use one of them")
    else:
        _set_mixed_precision(file, shown, value, name)


def _set_mixed_precision(file: _AccelerateFile, shown: str, value: Any, name: str) -> None:
    note = ""
    if file.distributed_type in REPLICATED:
        # Under autocast, gradients have the dtype of the parameters.
        file.defaults["communication_data_type"] = "fp32"
        note = (
            " (the model computes in it; torch.autocast leaves some operators, such as norms and"
            " losses, in float32)"
        )
    if name == "fp16" and file.distributed_type != "DEEPSPEED":
        file.defaults |= accelerate_keys.GRAD_SCALER
    path = f"{name}.enabled"
    file.translation.set(path, shown, True)
    file.translation.rows.append(KeyReport(shown, value, Status.RENAMED, path + note, path))


def _complete_degrees(file: _AccelerateFile) -> None:
    """Set the degrees that a `parallelism_config` omits.

    Accelerate takes 1 for them. FSDP then shards only over the degrees that are given.
    """
    settings = file.translation.settings
    names = ("dp_replicate", "dp_shard", "tp", "cp")
    degrees = [path for path in settings if path in [f"parallel.{name}" for name in names]]
    has_section = isinstance(file.tree.get("parallelism_config"), dict)
    if not has_section or all(_degree(settings, path) == "1" for path in degrees):
        # If all degrees are 1, Accelerate makes the processes data-parallel.
        for path in degrees:
            key, _ = settings[path]
            if key.startswith("parallelism_config"):
                del settings[path]
        return

    is_sharded = _degree(settings, SHARD) != "1" or _degree(settings, "parallel.cp") != "1"
    if file.distributed_type == "FSDP" and not is_sharded:
        rule = "FSDP has nothing to shard over where dp_shard and cp are 1"
        remedy = "give parallelism_config_dp_shard_size, or use distributed_type MULTI_GPU"
        problem = Problem("parallelism_config", None, rule, remedy)
        file.translation.problems.append(problem)
    file.defaults["parallel.dp_replicate"] = 1
    if file.distributed_type not in REPLICATED:
        file.defaults[SHARD] = 1


def _degree(settings: Mapping[str, tuple[str, Any]], path: str) -> str:
    """Return a degree as text, because a file may quote it; "1" if it is missing."""
    _, value = settings.get(path, ("", 1))
    return str(value)
