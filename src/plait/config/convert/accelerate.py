"""A file of `accelerate launch` as a configuration: its sections become the keys that they stand
for (`accelerate_keys` says which).

What the file leaves out has Accelerate's default where that is another than Plait's. Sections that
`distributed_type` does not name are not read, as in Accelerate; each of their keys has a row that
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.config.convert import accelerate_keys
from plait.config.convert.accelerate_keys import PREFIXES, REPLICATED, SECTIONS, is_on
from plait.config.convert.fsdp_sharding import NAMES, SHARD, STAGE, read_sharding
from plait.config.convert.translated import Reading, Translated
from plait.config.dialects.keys import known_paths, nearest
from plait.config.reading.source import Document, read_named
from plait.config.schema.provenance import Row, Status
from plait.errors import ConfigError, Problem

_TYPES = (*REPLICATED, "DEEPSPEED", "FSDP")
_OF_TYPE = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
_FLAGS = "give Megatron-LM's flags: plait config convert -- --tensor-model-parallel-size 2 ..."
_TOP = {key.path: key for key in accelerate_keys.TOP}
_READ_HERE = (
    "distributed_type",
    "mixed_precision",
    "num_processes",
    "fp16",
    "dynamo_backend",
    "fp8_config",
    *SECTIONS,
    *_OF_TYPE,
)

_CLIPPING = (
    "; a script clips where it calls clip_grad_norm_, plait.initialize at 1.0 unless"
    " gradient_clipping is 0"
)
_TOGETHER = {
    "fsdp_config": tuple(f"fsdp_{name}" for name in NAMES),
    "deepspeed_config": ("deepspeed_config_file",),
}
"""Keys of sections that are read together with others."""


@dataclass
class _File:
    """A file that is read."""

    document: Document
    found: Reading = field(default_factory=Reading)
    kind: str = ""
    """`distributed_type`."""
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def tree(self) -> Mapping[str, Any]:
        return self.document.tree


def translate(document: Document) -> Translated:
    """The configuration that a file of Accelerate describes. Problems are collected."""
    file = _File(document)
    file.kind = _distributed_type(file)
    deepspeed = _deepspeed_file(file)
    for name, value in file.tree.items():
        if name in SECTIONS:
            _section(file, name, value, deepspeed is not None)
        elif name in _OF_TYPE or name == "fp8_config":
            _unread_section(file, name, value)
        elif name in _TOP:
            file.found.take(name, _TOP[name], value)
        elif name not in _READ_HERE:
            _unknown(file, name, value, (*_TOP, *_READ_HERE))
    each = _processes(file)
    if file.kind == "FSDP":
        _sharding(file, each)
    _precision(file, deepspeed is not None)
    _degrees(file)
    return file.found.translated(document.name, "Accelerate", file.defaults, base=deepspeed)


def _distributed_type(file: _File) -> str:
    value = file.tree.get("distributed_type")
    shown = ", ".join(("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"))
    if value is None:
        file.found.problems.append(
            Problem(
                "distributed_type",
                None,
                "is missing, and Accelerate does not run without it",
                f"use {shown}",
            )
        )
        return ""
    kind = "NO" if value is False else str(value).upper()
    if kind == "MEGATRON_LM":
        file.found.refuse(
            "distributed_type",
            value,
            "the section of Accelerate has a part of Megatron-LM's flags",
            _FLAGS,
        )
    elif kind not in _TYPES:
        rule = (
            "this release runs on GPUs and CPUs"
            if kind in ("XLA", "TPU")
            else "is no type that Accelerate has"
        )
        file.found.refuse("distributed_type", value, rule, f"use {shown}")
    else:
        meaning = (
            f"{STAGE} 0: a replica on every process"
            if kind in REPLICATED
            else f"{STAGE}, by {kind.lower()}_config"
        )
        meaning += "" if kind == "DEEPSPEED" else _CLIPPING
        file.found.rows.append(Row("distributed_type", value, Status.RENAMED, meaning, STAGE))
    if kind in REPLICATED:
        file.defaults[STAGE] = 0
    elif kind in ("DEEPSPEED", "FSDP"):
        file.defaults[STAGE] = 2 if kind == "DEEPSPEED" else 3
    return kind


def _section(file: _File, section: str, value: Any, beside_deepspeed: bool) -> None:
    found = file.found
    keys = SECTIONS[section]
    if value is None or value == {}:
        found.rows.append(Row(section, value, Status.COMMENT, "empty: not given"))
        return
    if not isinstance(value, dict):
        found.refuse(
            section,
            value,
            "is a section and needs an object",
            f"write for example {{{next(iter(keys))}: ...}}",
        )
        return
    for written, item in value.items():
        shown = f"{section}.{written}"
        name = _full(section, written)
        if section in _OF_TYPE and file.kind != _OF_TYPE[section]:
            found.ignore(
                shown,
                item,
                f"distributed_type is {file.kind or 'missing'}, so Accelerate does not read it"
                " either",
            )
        elif name == "deepspeed_config_file" or (
            section == "fsdp_config" and name.removeprefix("fsdp_") in NAMES
        ):
            continue
        elif name not in keys:
            _unknown(file, shown, item, (*keys, *_TOGETHER.get(section, ())))
        elif beside_deepspeed and name in accelerate_keys.BELONGS_IN_DEEPSPEED and item is not None:
            found.refuse(
                shown,
                item,
                "stands beside deepspeed_config_file, which decides it",
                "leave it out, and write it in that file",
            )
        else:
            found.take(shown, keys[name], item)


def _full(section: str, name: str) -> str:
    prefix = PREFIXES.get(section, "")
    return name if name.startswith(prefix) else prefix + name


def _unread_section(file: _File, name: str, value: Any) -> None:
    """Sections without a table: of programs that Plait does not call."""
    if not value:
        file.found.rows.append(Row(name, value, Status.COMMENT, "empty: not given"))
    elif name == "fp8_config":
        file.found.ignore(name, value, "mixed_precision fp8 alone reads it")
    else:
        file.found.ignore(
            name,
            value,
            f"distributed_type is {file.kind or 'missing'}, so Accelerate does not read it either;"
            f" {_FLAGS}",
        )


def _unknown(file: _File, shown: str, value: Any, names: Sequence[str]) -> None:
    section, _, name = shown.rpartition(".")
    near = nearest(name, names)
    prefixed = [candidate for candidate in names if candidate.endswith(f"_{name}")]
    if prefixed:
        remedy = f"write {prefixed[0]}; Accelerate does not read the short name"
    elif not section and shown in known_paths():
        remedy = (
            "a file is one of Accelerate or one of Plait's: leave it out here, and add it to what"
            " `plait config convert` writes"
        )
    else:
        remedy = f"did you mean {' or '.join(near)}?" if near else "leave it out"
    file.found.refuse(shown, value, "unknown key of Accelerate", remedy)


def _deepspeed_file(file: _File) -> dict[str, Any] | None:
    """The tree of the file that `deepspeed_config_file` names."""
    section = file.tree.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if named is None or file.kind != "DEEPSPEED":
        return None
    shown = "deepspeed_config.deepspeed_config_file"
    if not isinstance(named, str) or named.lower() == "none":
        if named != "none":
            file.found.refuse(shown, named, "must be text", "give the path of a DeepSpeed file")
        return None
    try:
        tree = read_named(named, file.document).tree
    except ConfigError as error:
        file.found.rows.append(Row(shown, named, Status.REFUSED, "cannot be read"))
        file.found.problems += [
            Problem(f"{shown}: {problem.field}", problem.value, problem.rule, problem.remedy)
            for problem in error.problems
        ]
        return {}
    file.found.rows.append(
        Row(shown, named, Status.RENAMED, "the keys of that file, each with a row of its own")
    )
    file.defaults.pop(STAGE)
    if not isinstance(tree.get("zero_optimization"), dict | bool):
        file.found.problems.append(
            Problem(
                f"{shown}: zero_optimization",
                None,
                f"{named} has no such section, which Accelerate asks for",
                "add it, with a stage",
            )
        )
    return tree


def _processes(file: _File) -> int | None:
    """Says how many processes run on a machine, and returns it; None where the file does not
    say.
    """
    value = file.tree.get("num_processes")
    machines = file.tree.get("num_machines", 1)
    if value is None or value == -1:
        if "num_processes" in file.tree:
            file.found.ignore(
                "num_processes", value, "left to the launcher: plait launch --nproc-per-node"
            )
        return None
    if file.kind == "NO":
        file.found.ignore(
            "num_processes", value, "distributed_type NO runs one process, whatever this says"
        )
        file.defaults["run.processes"] = 1
        return None
    if (
        not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (value, machines))
        or value % machines
    ):
        rule = f"cannot be shared out over num_machines = {machines!r}"
        file.found.refuse(
            "num_processes",
            value,
            rule,
            "give the processes of all machines together, as many on each",
        )
        return None
    each = int(value // machines)
    if machines > 1:
        file.found.ignore(
            "num_processes",
            value,
            f"start them with plait launch --nnodes {machines} --nproc-per-node {each}",
        )
    else:
        file.found.say("run.processes", "num_processes", each)
        file.found.rows.append(
            Row("num_processes", value, Status.RENAMED, "run.processes", "run.processes")
        )
    return each


def _sharding(file: _File, each: int | None) -> None:
    section = file.tree.get("fsdp_config")
    given = {}
    for written, value in section.items() if isinstance(section, dict) else ():
        name = _full("fsdp_config", written).removeprefix("fsdp_")
        if name in NAMES:
            given[name] = (f"fsdp_config.{written}", value)
    read_sharding(file.found, given, version=1, group=each, launched=True)


def _precision(file: _File, beside_deepspeed: bool) -> None:
    shown = (
        "mixed_precision" if "mixed_precision" in file.tree or "fp16" not in file.tree else "fp16"
    )
    value = file.tree.get(shown)
    if "fp16" in file.tree and shown != "fp16":
        file.found.ignore("fp16", file.tree["fp16"], "mixed_precision decides")
    if "dynamo_backend" in file.tree:
        file.found.take(
            "dynamo_backend",
            SECTIONS["dynamo_config"]["dynamo_backend"],
            file.tree["dynamo_backend"],
        )
    if value is None:
        if shown in file.tree:
            file.found.rows.append(Row(shown, None, Status.COMMENT, "null: not given"))
        return
    name = str(value).lower() if shown == "mixed_precision" else "fp16" if is_on(value) else "no"
    if beside_deepspeed:
        rule = "stands beside deepspeed_config_file, which decides it"
        file.found.refuse(shown, value, rule, "leave it out, and write fp16 or bf16 in that file")
    elif not is_on(name):
        file.found.ignore(shown, value, "off, as it is in Plait")
    elif name == "fp8":
        file.found.refuse(
            shown,
            value,
            "this release computes in fp16, bf16 or the dtype of the model",
            "use bf16",
        )
    elif name not in ("fp16", "bf16"):
        file.found.refuse(shown, value, "is none of no, fp16, bf16", "use one of them")
    else:
        _mixed(file, shown, value, name)


def _mixed(file: _File, shown: str, value: Any, name: str) -> None:
    note = ""
    if file.kind in REPLICATED:
        # Under autocast gradients have the parameters' dtype.
        file.defaults["communication_data_type"] = "fp32"
        note = (
            " (the model computes in it; torch.autocast leaves some operators, such as norms and"
            " losses, in float32)"
        )
    if name == "fp16" and file.kind != "DEEPSPEED":
        file.defaults |= accelerate_keys.GRAD_SCALER
    path = f"{name}.enabled"
    file.found.say(path, shown, True)
    file.found.rows.append(Row(shown, value, Status.RENAMED, path + note, path))


def _degrees(file: _File) -> None:
    """With a `parallelism_config` every degree that is left out is 1, and FSDP shards over what is
    given alone.
    """
    said = file.found.said
    degrees = [
        path
        for path in said
        if path.startswith("parallel.")
        and path.rpartition(".")[2] in ("dp_replicate", "dp_shard", "tp", "cp")
    ]
    if not isinstance(file.tree.get("parallelism_config"), dict) or not any(
        str(said[path][1]) != "1" for path in degrees
    ):
        for path in degrees:
            if said[path][0].startswith("parallelism_config"):
                del said[path]  # all are 1: Accelerate makes the processes data parallel
        return
    shard, cp = (str(said.get(path, ("", 1))[1]) for path in (SHARD, "parallel.cp"))
    if file.kind == "FSDP" and shard == cp == "1":
        rule = "FSDP has nothing to shard over where dp_shard and cp are 1"
        remedy = "give parallelism_config_dp_shard_size, or use distributed_type MULTI_GPU"
        file.found.problems.append(Problem("parallelism_config", None, rule, remedy))
    file.defaults |= (
        {"parallel.dp_replicate": 1}
        if file.kind in REPLICATED
        else {"parallel.dp_replicate": 1, SHARD: 1}
    )
