"""Conversion of the configuration file of `accelerate launch`.

The tables contain the fields of Accelerate 1.15's `ClusterConfig`, `ipex_config` of earlier
releases, and the options of `accelerate launch` that the sections set. Each entry says what the
key sets, or why it is ignored or refused.

For keys that the file omits, Accelerate's defaults are converted where they differ from Plait's. As
in Accelerate, the section of another `distributed_type` is not read; each of its keys has a row
with this reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.config.convert.fsdp import (
    ACCELERATE_KEYS,
    SHARD,
    SHARDING_KEYS,
    STAGE,
    ShardingKeys,
    ignored,
    on,
    read_sharding,
    refused,
    renamed,
)
from plait.config.convert.translated import ForeignKey, TranslatedDocument, Translation, problems_in
from plait.config.dialects.deepspeed import as_flag
from plait.config.dialects.keys import known_paths, nearest
from plait.config.schema.config import KeyReport, Status
from plait.config.source import Document, read_named
from plait.errors import ConfigError, Problem
from plait.sizes import is_count

REPLICATED = (
    "NO",
    *(
        f"MULTI_{kind}"
        for kind in ["CPU", "GPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON"]
    ),
)
"""Values of `distributed_type` that train a replica on every process."""

_LAUNCHER = "an option of the launcher; see `plait launch --help`"
_TPU = "an option of TPUs, which this file does not use"


Sets = Callable[[Any], Mapping[str, Any]]
"""Function from a key's value to settings by path."""


def _sets(path: str) -> Sets:
    """Return a function that maps a value to the setting `path`."""
    return lambda value: {path: value}


def _sets_unless(off: str, path: str, **more: Any) -> Sets:
    """Return a function that maps `off` to no settings, and other values to `path` and `more`."""

    def sets(value: Any) -> Mapping[str, Any]:
        if str(value).lower() == off:
            return {}
        return {path: value, **more}

    return sets


def _one_of(choices: Mapping[str, Mapping[str, Any]]) -> Sets:
    """Return a function that maps a value to its settings, and refuses values not in `choices`."""

    def sets(value: Any) -> Mapping[str, Any]:
        settings = choices.get(str(value).lower())
        if settings is None:
            raise ValueError(f"is none of {', '.join(choices)}; use one of them")
        return settings

    return sets


def _compile_settings(backend: Any) -> Mapping[str, Any]:
    name = str(backend).lower()
    if name == "no":
        return {}
    return {"compile.enabled": True, "compile.backend": name}


def _ignored_keys(names: str, why: str) -> tuple[ForeignKey, ...]:
    """Return keys of any type (names separated by spaces) that are ignored for the same reason."""
    return tuple(ignored(name, "any", why) for name in names.split())


TOP: tuple[ForeignKey, ...] = (
    refused(
        "compute_environment",
        "text",
        "this release starts processes on your own machines",
        "use LOCAL_MACHINE",
        "LOCAL_MACHINE",
    ),
    *_ignored_keys(
        "machine_rank main_process_ip main_process_port rdzv_backend same_network"
        " main_training_function gpu_ids enable_cpu_affinity mpirun_config num_machines",
        _LAUNCHER,
    ),
    *_ignored_keys(
        "downcast_bf16 tpu_name tpu_zone tpu_use_sudo commands command_file tpu_vm tpu_env",
        _TPU,
    ),
    refused("tpu_use_cluster", "flag", "this release does not run on TPUs", "use false", False),
    ignored("ipex_config", "any", "PyTorch runs on Intel devices without the extension"),
    ignored(
        "use_cpu", "flag", "Plait uses the GPUs that it finds, and the CPU where there is none"
    ),
    renamed(
        "debug",
        "flag",
        on({"faults.check_collectives": True}),
        "shapes are compared before every collective",
    ),
)
"""Keys at the top of the file, except for those of `_COMBINED_KEYS`."""

_INIT = "plait.from_pretrained builds the model without its weights, at every stage"
DEEPSPEED: tuple[ForeignKey, ...] = (
    renamed("zero_stage", "integer", _sets("zero_optimization.stage")),
    renamed("gradient_accumulation_steps", "integer", _sets("gradient_accumulation_steps")),
    renamed("gradient_clipping", "number", _sets("gradient_clipping")),
    renamed(
        "offload_optimizer_device", "text", _sets("zero_optimization.offload_optimizer.device")
    ),
    renamed("offload_param_device", "text", _sets("zero_optimization.offload_param.device")),
    renamed(
        "offload_optimizer_nvme_path",
        "text",
        _sets_unless("none", "zero_optimization.offload_optimizer.nvme_path"),
    ),
    renamed(
        "offload_param_nvme_path",
        "text",
        _sets_unless("none", "zero_optimization.offload_param.nvme_path"),
    ),
    ignored("zero3_init_flag", "flag", _INIT),
    ignored(
        "zero3_save_16bit_model",
        "flag",
        "weights are written shard by shard, at every stage; nothing is gathered on one process",
    ),
    ignored(
        "deepspeed_moe_layer_cls_names",
        "text",
        "the unit that is gathered is a block of the model, its experts with it",
    ),
    *_ignored_keys(
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter"
        " deepspeed_inclusion_filter",
        _LAUNCHER,
    ),
)
"""Keys of `deepspeed_config`, except for `deepspeed_config_file`."""

IN_DEEPSPEED_FILE = frozenset(
    {
        "zero_stage",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
        "zero3_save_16bit_model",
    }
)
"""Keys of `deepspeed_config` that Accelerate reads from DeepSpeed's file if one is named."""

FSDP = tuple(
    ForeignKey(f"fsdp_{key.path}", key.status, key.kind, key.why, key.off, key.remedy, key.sets)
    for key in ACCELERATE_KEYS
)
"""Keys of `fsdp_config`, except for those that determine the sharding."""

PARALLELISM: tuple[ForeignKey, ...] = (
    renamed("parallelism_config_dp_replicate_size", "integer", _sets("parallel.dp_replicate")),
    renamed("parallelism_config_dp_shard_size", "integer", _sets("parallel.dp_shard")),
    renamed("parallelism_config_tp_size", "integer", _sets("parallel.tp")),
    renamed(
        "parallelism_config_cp_size",
        "integer",
        _sets_unless("1", "parallel.cp"),
        "1 is off",
    ),
    refused(
        "parallelism_config_cp_backend",
        "text",
        "Plait has its own context parallelism",
        "use torch",
        "torch",
    ),
    renamed(
        "parallelism_config_cp_comm_strategy",
        "text",
        _one_of(
            {
                "allgather": {"parallel.context": "all-gather-kv"},
                "alltoall": {"parallel.context": "ring"},
            }
        ),
        "torch's alltoall passes keys and values around a ring",
    ),
    renamed(
        "parallelism_config_sp_size",
        "integer",
        _sets_unless("1", "parallel.cp", **{"parallel.context": "ulysses"}),
        "DeepSpeed's Ulysses: as many processes share a sequence; 1 is off",
    ),
    *_ignored_keys(
        "parallelism_config_sp_backend parallelism_config_sp_seq_length"
        " parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
        "a detail of DeepSpeed's Ulysses; sequences may have any length, and attention is the"
        " model's",
    ),
)
"""Keys of `parallelism_config`."""

DYNAMO: tuple[ForeignKey, ...] = (
    renamed(
        "dynamo_backend",
        "text",
        _compile_settings,
        "no is off",
    ),
    renamed("dynamo_mode", "text", _sets_unless("default", "compile.mode")),
    ignored("dynamo_use_regional_compilation", "flag", "blocks are always compiled one by one"),
    refused("dynamo_use_fullgraph", "flag", "a graph may have breaks", "use false", False),
    refused(
        "dynamo_use_dynamic",
        "flag",
        "torch.compile detects dynamic shapes itself",
        "use false, or leave it out",
        False,
    ),
)
"""Keys of `dynamo_config`, whose prefix `dynamo_` is optional."""

SECTIONS: dict[str, dict[str, ForeignKey]] = {
    "deepspeed_config": {key.path: key for key in DEEPSPEED},
    "fsdp_config": {key.path: key for key in FSDP},
    "parallelism_config": {key.path: key for key in PARALLELISM},
    "dynamo_config": {key.path: key for key in DYNAMO},
}
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"""Prefixes that Accelerate adds to the names in a section if they are missing."""

GRAD_SCALER: Mapping[str, Any] = {"fp16.loss_scale_window": 2000, "fp16.hysteresis": 1}
"""Defaults of torch's GradScaler, which Accelerate uses. Plait's defaults are DeepSpeed's."""


def is_on(value: Any) -> bool:
    """Return True if a precision is enabled. Accelerate's YAML reads `no` as false."""
    return str(value).lower() not in ("no", "none") and as_flag(value) is not False


_STAGES = {**dict.fromkeys(REPLICATED, 0), "DEEPSPEED": 2, "FSDP": 3}
"""Default of the ZeRO stage, by the value of `distributed_type`."""
_TYPE_OF_SECTION = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
"""Value of `distributed_type` with which Accelerate reads a section."""
_FLAGS = "give Megatron-LM's flags: plait config convert -- --tensor-model-parallel-size 2 ..."
_TOP = {key.path: key for key in TOP}
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
"""Keys at the top of the file whose meaning depends on other keys. Functions below read them."""

_CLIPPING = (
    "; a script clips where it calls clip_grad_norm_, plait.initialize at 1.0 unless"
    " gradient_clipping is 0"
)
_COMBINED_IN_SECTION = {
    "fsdp_config": tuple(f"fsdp_{name}" for name in SHARDING_KEYS),
    "deepspeed_config": ("deepspeed_config_file",),
}
"""Keys of sections whose meaning depends on other keys, by section. Functions below read them."""


@dataclass
class _AccelerateFile:
    """Accelerate file that is being converted, and the result so far."""

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
        """Return the reason why the section of another `distributed_type` is not read."""
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
        translation.problems.append(
            Problem(
                "distributed_type",
                None,
                "is missing, and Accelerate does not run without it",
                remedy,
            )
        )
        return ""

    # YAML reads NO as false.
    kind = "NO" if value is False else str(value).upper()
    if kind == "MEGATRON_LM":
        translation.refuse(
            "distributed_type",
            value,
            "Accelerate's section contains only some of Megatron-LM's flags",
            _FLAGS,
        )
    elif kind in ("XLA", "TPU"):
        translation.refuse("distributed_type", value, "this release runs on GPUs and CPUs", remedy)
    elif kind not in _STAGES:
        translation.refuse("distributed_type", value, "is not a type of Accelerate", remedy)
    else:
        if kind in REPLICATED:
            meaning = f"{STAGE} 0: a replica on every process"
        else:
            meaning = f"{STAGE}, by {kind.lower()}_config"
        # With DeepSpeed, gradient_clipping is a key of its section.
        if kind != "DEEPSPEED":
            meaning += _CLIPPING
        translation.rows.append(
            KeyReport("distributed_type", value, Status.RENAMED, meaning, STAGE)
        )

    if kind in _STAGES:
        file.defaults[STAGE] = _STAGES[kind]
    return kind


def _read_section(file: _AccelerateFile, section: str, value: Any) -> None:
    translation = file.translation
    keys = SECTIONS[section]
    if value is None or value == {}:
        translation.rows.append(KeyReport(section, value, Status.COMMENT, "empty: not given"))
        return
    if not isinstance(value, dict):
        translation.refuse(
            section,
            value,
            "is a section, which must be an object",
            f"write for example {{{next(iter(keys))}: ...}}",
        )
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
        elif file.deepspeed is not None and name in IN_DEEPSPEED_FILE and item is not None:
            remedy = "leave it out"
            sets = keys[name].sets
            # Some values of a key set nothing.
            paths = list(sets(item)) if sets is not None else []
            if paths:
                remedy += f", and write {paths[0]} in that file"
            translation.refuse(
                shown,
                item,
                "is given together with deepspeed_config_file, which decides it",
                remedy,
            )
        else:
            translation.translate_key(shown, keys[name], item)


def _add_prefix(section: str, name: str) -> str:
    """Return the name of a key with the prefix of its section."""
    prefix = PREFIXES.get(section, "")
    return name if name.startswith(prefix) else prefix + name


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
        remedy = f"write {' or '.join(prefixed)}; Accelerate does not read the short name"
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
    """Return the content of the file that `deepspeed_config_file` names, or None without one."""
    translation = file.translation
    shown = "deepspeed_config.deepspeed_config_file"
    path = file.section("deepspeed_config").get("deepspeed_config_file")
    if path is None or path == "none" or file.distributed_type != "DEEPSPEED":
        return None
    if not isinstance(path, str) or path.lower() == "none":
        translation.refuse(shown, path, "must be text", "pass the path of a DeepSpeed file")
        return None

    try:
        tree = read_named(path, file.document).tree
    except ConfigError as error:
        translation.rows.append(KeyReport(shown, path, Status.REFUSED, "cannot be read"))
        translation.problems += problems_in(shown, error)
        return {}
    translation.rows.append(
        KeyReport(shown, path, Status.RENAMED, "the keys of that file, each with a row of its own")
    )
    # The stage is that of the file.
    file.defaults.pop(STAGE)
    if not isinstance(tree.get("zero_optimization"), dict | bool):
        problem = Problem(
            f"{shown}: zero_optimization",
            None,
            f"{path} has no such section, which Accelerate asks for",
            "add it, with a stage",
        )
        translation.problems.append(problem)
    return tree


def _read_processes(file: _AccelerateFile) -> int | None:
    """Set and return the processes per machine. Return None if the file does not imply them."""
    translation = file.translation
    value = file.tree.get("num_processes")
    machines = file.tree.get("num_machines", 1)
    if value is None or value == -1:
        if "num_processes" in file.tree:
            translation.ignore(
                "num_processes", value, "left to the launcher: plait launch --nproc-per-node"
            )
        return None
    if file.distributed_type == "NO":
        translation.ignore(
            "num_processes", value, "distributed_type NO runs one process and ignores this value"
        )
        file.defaults["run.processes"] = 1
        return None

    valid = all(map(is_count, (value, machines)))
    if not valid or value % machines:
        translation.refuse(
            "num_processes",
            value,
            f"cannot be divided evenly by num_machines = {machines!r}",
            "pass the processes of all machines together, as many on each",
        )
        return None

    processes = int(value // machines)
    if machines > 1:
        translation.ignore(
            "num_processes",
            value,
            f"start them with plait launch --nnodes {machines} --nproc-per-node {processes}",
        )
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
    read_sharding(file.translation, ShardingKeys(sharding, 1, processes_per_machine, launched=True))


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
        translation.translate_key(
            "dynamo_backend", SECTIONS["dynamo_config"]["dynamo_backend"], tree["dynamo_backend"]
        )

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
        translation.refuse(
            shown,
            value,
            "is given together with deepspeed_config_file, which decides it",
            "leave it out, and write fp16 or bf16 in that file",
        )
    elif not is_on(name):
        translation.ignore(shown, value, "off, as it is in Plait")
    elif name == "fp8":
        translation.refuse(
            shown,
            value,
            "this release computes in fp16, bf16 or the dtype of the model",
            "use bf16",
        )
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
        file.defaults |= GRAD_SCALER
    path = f"{name}.enabled"
    file.translation.set(path, shown, True)
    file.translation.rows.append(KeyReport(shown, value, Status.RENAMED, path + note, path))


def _complete_degrees(file: _AccelerateFile) -> None:
    """Set the degrees that a `parallelism_config` omits.

    Accelerate's default of a degree is 1. FSDP then shards only over the degrees that are given.
    """
    settings = file.translation.settings
    names = ("dp_replicate", "dp_shard", "tp", "cp")
    paths = [f"parallel.{name}" for name in names]
    degrees = [path for path in settings if path in paths]
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
        problem = Problem(
            "parallelism_config",
            None,
            "FSDP has nothing to shard over if dp_shard and cp are 1",
            "set parallelism_config_dp_shard_size, or use distributed_type MULTI_GPU",
        )
        file.translation.problems.append(problem)
    file.defaults["parallel.dp_replicate"] = 1
    if file.distributed_type not in REPLICATED:
        file.defaults[SHARD] = 1


def _degree(settings: Mapping[str, tuple[str, Any]], path: str) -> str:
    """Return a degree as text, because a file may quote it; "1" if it is missing."""
    _, value = settings.get(path, ("", 1))
    return str(value)
