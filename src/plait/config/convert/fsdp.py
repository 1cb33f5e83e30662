"""Conversion of the Trainer's `fsdp` and `fsdp_config`, or of the file that `fsdp_config` names.

The tables contain the FSDP keys of Accelerate 1.15 and of the Trainer of Transformers 5.23, without
the prefix `fsdp_`, which is optional in Transformers. Several keys together determine the sharding:
`read_sharding` converts FSDP's version (2 by default) and strategy to a ZeRO stage and a degree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.config.convert.translated import (
    ForeignKey,
    TranslatedDocument,
    Translation,
    parse_flag,
    problems_in,
)
from plait.config.dialects.deepspeed import Kind, as_flag
from plait.config.dialects.keys import nearest
from plait.config.schema.config import KeyReport, Status
from plait.config.source import Document, read_named
from plait.errors import ConfigError, Problem

_TO_HOST = {
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "cpu",
}
_BLOCKS = (
    "the unit that is gathered is a block of the model, which is found in it; parallel.blocks names"
    " others"
)
_OVERLAP = "the next block is gathered while one computes, in forward and in backward"
_FILES = "a checkpoint loads on any layout; save_pretrained writes a folder of Hugging Face's"


def on(settings: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that maps true to `settings`, and false to no settings."""
    return lambda value: settings if as_flag(value) else {}


def ignored(name: str, kind: Kind, why: str) -> ForeignKey:
    """Return a key without an equivalent, which is ignored because it does not change results."""
    return ForeignKey(name, Status.IGNORED, kind, why)


def refused(name: str, kind: Kind, why: str, remedy: str, *off: Any) -> ForeignKey:
    """Return a key without an equivalent, which is refused unless its value is in `off`."""
    return ForeignKey(name, Status.REFUSED, kind, why, off, remedy)


def renamed(
    name: str, kind: Kind, sets: Callable[[Any], Mapping[str, Any]], note: str = ""
) -> ForeignKey:
    """Return a key with an equivalent in Plait. `sets` maps its value to Plait's settings."""
    return ForeignKey(name, Status.SUPPORTED, kind, note, sets=sets)


OFFLOAD = on(_TO_HOST)
"""Settings of FSDP's offload of parameters, gradients and optimizer states to host memory."""

SHARED: tuple[ForeignKey, ...] = (
    ignored("auto_wrap_policy", "text", _BLOCKS),
    ignored("transformer_layer_cls_to_wrap", "any", _BLOCKS),
    ignored("min_num_params", "integer", _BLOCKS),
    ignored("backward_prefetch", "any", _OVERLAP),
    ignored("forward_prefetch", "flag", _OVERLAP),
    ignored(
        "limit_all_gathers", "flag", "a block is freed before the one after the next is gathered"
    ),
    ignored("use_orig_params", "flag", "the optimizer always has the model's own parameters"),
    ignored("sync_module_states", "flag", "the weights of a model are always taken from rank 0"),
    ignored(
        "cpu_ram_efficient_loading",
        "flag",
        "with plait.from_pretrained every rank reads only its slices of the weights",
    ),
    ignored("state_dict_type", "text", _FILES),
    renamed("activation_checkpointing", "flag", on({"parallel.recompute.mode": "full"})),
)
"""Keys that Accelerate and the Trainer have in common."""

ACCELERATE_KEYS: tuple[ForeignKey, ...] = (
    *SHARED,
    renamed("offload_params", "flag", OFFLOAD, "FSDP's offload includes the optimizer states"),
    renamed(
        "activation_checkpointing_offload",
        "flag",
        on({"activation_checkpointing.cpu_checkpointing": True}),
    ),
    refused(
        "ignored_modules",
        "any",
        "every parameter is sharded or replicated by the stage",
        "leave it out",
        "",
        [],
    ),
)
"""Keys of `fsdp_config` in a file of Accelerate."""

_XLA = "this release does not run on XLA"
_NOT_IN_TRAINER = "the Trainer does not read it in fsdp_config"
TRAINER_KEYS: tuple[ForeignKey, ...] = (
    *SHARED,
    renamed("cpu_offload", "flag", OFFLOAD, "FSDP's offload includes the optimizer states"),
    refused("offload_params", "flag", _NOT_IN_TRAINER, "write cpu_offload", False),
    refused("sharding_strategy", "any", _NOT_IN_TRAINER, "write reshard_after_forward"),
    refused("xla", "flag", _XLA, "leave it out", False),
    refused("xla_fsdp_v2", "flag", _XLA, "leave it out", False),
    refused("xla_fsdp_grad_ckpt", "flag", _XLA, "leave it out", False),
    ignored("xla_fsdp_settings", "object", "settings of XLA, which is off"),
)
"""Keys of `fsdp_config` in the Trainer's arguments."""

STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
"""ZeRO stage of FSDP1's strategies, in the order of their numbers, which start at 1."""
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def strategy_named(value: Any) -> str:
    """Return the name of an FSDP1 strategy that is given by name or number.

    Raises:
        ValueError: There is no such strategy. The text is `rule; remedy`.
    """
    text = str(value).upper()
    names = list(STRATEGIES)
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text not in names:
        raise ValueError(
            f"is not an FSDP1 strategy; use {', '.join(names)}, or 1 to {len(names)} in this order"
        )
    return text


def reshard_settings(value: Any) -> Mapping[str, Any]:
    """Return the settings of FSDP2's `reshard_after_forward`.

    Raises:
        ValueError: The value is not a boolean. The text is `rule; remedy`.
    """
    flag = as_flag(value)
    if flag is None:
        raise ValueError(
            "is true or false in FSDP2 (fsdp_version 2); use true for FULL_SHARD, false for"
            " SHARD_GRAD_OP"
        )
    return {STAGE: 3 if flag else 2}


STAGE = "zero_optimization.stage"
SHARD = "parallel.dp_shard"
STRATEGY = "sharding_strategy"
RESHARD = "reshard_after_forward"
SHARDING_KEYS = ("version", STRATEGY, RESHARD)
"""Keys that `read_sharding` reads together, without the prefix `fsdp_`."""
_NOT_READ = (
    "`accelerate launch` still uses FULL_SHARD, the default of fsdp_sharding_strategy,"
    " which it reads first"
)


@dataclass(frozen=True)
class ShardingKeys:
    """Keys of FSDP that determine the sharding."""

    written: Mapping[str, tuple[str, Any]]
    """Keys by name without `fsdp_`: the key as written, and its value."""
    version: int
    """Version of FSDP if no key sets it."""
    processes_per_machine: int | None
    """Processes over which a hybrid strategy shards; None if they are not known."""
    launched: bool
    """True for a file of `accelerate launch`, which reads FSDP1's strategy under both names."""


def read_sharding(translation: Translation, keys: ShardingKeys) -> None:
    """Set the ZeRO stage and the degree of sharding. Problems are collected."""
    version = keys.version
    shown, value = keys.written.get("version", ("fsdp_version", None))
    if value is not None:
        if str(value) not in ("1", "2"):
            translation.refuse(shown, value, "FSDP has the versions 1 and 2", "use 2")
            return
        version = int(value)
        translation.ignore(
            shown, value, f"determines how the other keys are read: as those of FSDP{version}"
        )

    # Both names may be given. `Translation.set` reports values that disagree.
    for name in (STRATEGY, RESHARD):
        if name not in keys.written:
            continue
        shown, value = keys.written[name]
        if value is None:
            continue
        if version == 1:
            _read_fsdp1(translation, keys, name)
        elif name == STRATEGY:
            _refuse_strategy_of_fsdp2(translation, shown, value)
        else:
            translation.translate_key(
                shown,
                ForeignKey(shown, Status.SUPPORTED, "any", "", sets=reshard_settings),
                parse_flag(value),
            )


def _read_fsdp1(translation: Translation, keys: ShardingKeys, name: str) -> None:
    """Read a strategy of FSDP1, which Accelerate also accepts as `reshard_after_forward`."""
    shown, value = keys.written[name]
    # A boolean is the value of FSDP2.
    if isinstance(value, bool):
        translation.refuse(
            shown,
            value,
            "is the name of a strategy in FSDP1 (fsdp_version 1)",
            "use FULL_SHARD or SHARD_GRAD_OP, or fsdp_version 2",
        )
        return
    try:
        strategy = strategy_named(value)
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        translation.refuse(shown, value, rule, remedy)
        return

    stage = STRATEGIES[strategy]
    translation.set(STAGE, shown, stage)
    if strategy in HYBRID:
        _shard_within_machines(translation, keys, shown, value)
        return
    meaning = f"{STAGE} {stage}"
    if keys.launched and name == RESHARD and stage != 3 and STRATEGY not in keys.written:
        meaning += f" ({_NOT_READ})"
    translation.rows.append(KeyReport(shown, value, Status.RENAMED, meaning, STAGE))


def _shard_within_machines(
    translation: Translation, keys: ShardingKeys, shown: str, value: Any
) -> None:
    processes = keys.processes_per_machine
    if processes is None:
        rule = "shards inside a machine, and the file does not say how many processes a machine has"
        remedy = "write full_shard, and set parallel.dp_shard in the converted file"
        if keys.launched:
            remedy = "set num_processes and num_machines"
        translation.refuse(shown, value, rule, remedy)
        return
    translation.set(SHARD, shown, processes)
    translation.rows.append(
        KeyReport(
            shown,
            value,
            Status.RENAMED,
            f"{STAGE} and {SHARD} (the {processes} processes of a machine)",
            STAGE,
        )
    )


def _refuse_strategy_of_fsdp2(translation: Translation, shown: str, value: Any) -> None:
    """Refuse an FSDP1 strategy in a file for FSDP2, unless it equals FSDP2's default."""
    try:
        strategy = strategy_named(value)
    except ValueError:
        strategy = ""
    if strategy == "FULL_SHARD":
        translation.ignore(
            shown, value, "FSDP2 does not read it; fsdp_reshard_after_forward decides"
        )
        return
    translation.refuse(
        shown,
        value,
        "is a key of FSDP1 and fsdp_version is 2, so Accelerate does not read it",
        "leave it out and write fsdp_reshard_after_forward, or use fsdp_version 1",
    )


_KEYS = {key.path: key for key in TRAINER_KEYS}
_NAMES = (*_KEYS, *SHARDING_KEYS)
_OPTIONS = (*(name.lower() for name in STRATEGIES), "auto_wrap", "offload")
"""Options of `fsdp`."""


def translate(document: Document) -> TranslatedDocument:
    """Return the configuration that the Trainer's arguments describe. Problems are collected."""
    translation = Translation()
    tree = document.tree
    arguments: Mapping[str, Any] = tree
    prefix = "fsdp_config."
    if "fsdp" not in tree:
        # The document is the file that `fsdp_config` names.
        arguments = {"fsdp": True, "fsdp_config": tree}
        prefix = ""

    options = _read_options(translation, arguments["fsdp"], written="fsdp" in tree)
    section = _read_section(translation, document, arguments.get("fsdp_config"))
    for name, value in arguments.items():
        if name not in ("fsdp", "fsdp_config"):
            translation.refuse(
                name, value, "unknown key next to fsdp and fsdp_config", "leave it out"
            )

    if options is None:
        for name, value in section.items():
            translation.ignore(prefix + name, value, "fsdp is off")
        return translation.finish(document.name, "the Trainer", {STAGE: 0})
    _read_keys(translation, section, options, prefix)
    return translation.finish(document.name, "the Trainer", {STAGE: 3})


def _read_options(translation: Translation, value: Any, *, written: bool) -> list[str] | None:
    """Return the options of `fsdp`, or None if FSDP is off or the value is invalid.

    Args:
        translation: Result so far.
        value: Value of `fsdp`.
        written: Whether the document contains `fsdp`.
    """
    value = parse_flag(value)
    if value in ("", [], None, False):
        translation.ignore("fsdp", value, "off: a replica on every process")
        return None
    if not isinstance(value, str | list | bool):
        translation.refuse(
            "fsdp",
            value,
            "must be true, false, or a string of options",
            "use true, and write the rest in fsdp_config",
        )
        return None

    options: list[Any] = []
    if isinstance(value, str):
        options = value.split()
    elif isinstance(value, list):
        options = value
    names = [str(option).lower() for option in options]
    unknown = [name for name in names if name not in _OPTIONS]
    if unknown:
        translation.refuse(
            "fsdp", value, f"{unknown[0]!r} is not an option of fsdp", f"use {', '.join(_OPTIONS)}"
        )
        return None
    if written:
        translation.rows.append(
            KeyReport(
                "fsdp", value, Status.RENAMED, f"{STAGE}, with the keys of fsdp_config", STAGE
            )
        )
    return names


def _read_section(translation: Translation, document: Document, value: Any) -> Mapping[str, Any]:
    """Return the content of `fsdp_config`, which may be the path of a file."""
    if isinstance(value, str):
        try:
            section = read_named(value, document).tree
        except ConfigError as error:
            translation.problems += problems_in("fsdp_config", error)
            translation.rows.append(
                KeyReport("fsdp_config", value, Status.REFUSED, "cannot be read")
            )
            return {}
        translation.rows.append(
            KeyReport(
                "fsdp_config",
                value,
                Status.RENAMED,
                "the keys of that file, each with a row of its own",
            )
        )
        return section
    if value is not None and not isinstance(value, dict):
        translation.refuse(
            "fsdp_config", value, "is an object or the path of a JSON file", "correct it"
        )
        return {}
    return value or {}


def _read_keys(
    translation: Translation, section: Mapping[str, Any], options: list[str], prefix: str
) -> None:
    sharding: dict[str, tuple[str, Any]] = {}
    for written, value in section.items():
        shown = prefix + written
        name = written.removeprefix("fsdp_")
        if name in ("version", RESHARD):
            sharding[name] = (shown, value)
        elif name in _KEYS:
            translation.translate_key(shown, _KEYS[name], value)
        else:
            matches = nearest(name, _NAMES)
            remedy = f"did you mean {' or '.join(matches)}?" if matches else "leave it out"
            translation.refuse(shown, value, "unknown key of fsdp_config", remedy)

    # The options of `fsdp` name strategies of FSDP1, which FSDP2 expresses as a boolean.
    _, version = sharding.get("version", ("", None))
    version = str(version or 2)
    for option in options:
        if option == "offload":
            for path, setting in OFFLOAD(True).items():
                translation.set(path, "fsdp", setting)
        elif option.upper() in STRATEGIES:
            reshard = _reshard_value(option, version)
            if version == "2" and not isinstance(reshard, bool):
                # A boolean in place of the option would turn FSDP on or off.
                translation.refuse(
                    "fsdp",
                    option,
                    "is a strategy of FSDP1, and fsdp_config.version is 2 by default",
                    "use full_shard or shard_grad_op, or set fsdp_config.version to 1",
                )
                continue
            shown, value = sharding.setdefault(RESHARD, ("fsdp", reshard))
            # Compared as text, because a file may quote a boolean.
            if str(value).lower() != str(reshard).lower():
                translation.problems.append(
                    Problem(
                        shown,
                        value,
                        f"fsdp says {option}; both say how parameters are sharded and disagree",
                        "keep one of them",
                    )
                )

    read_sharding(
        translation, ShardingKeys(sharding, version=2, processes_per_machine=None, launched=False)
    )
    _merge_rows(translation)


def _merge_rows(translation: Translation) -> None:
    """Keep only one row for `fsdp`: the first refused row, or else the first row."""
    rows = [row for row in translation.rows if row.key == "fsdp"]
    if not rows:
        return
    # A refusal must not be hidden by an option that was translated.
    merged = next((row for row in rows if row.status is Status.REFUSED), rows[0])
    translation.rows[:] = [row for row in translation.rows if row.key != "fsdp" or row is merged]


def _reshard_value(option: str, version: str) -> Any:
    """Return the value of `reshard_after_forward` that an option of `fsdp` implies.

    For FSDP1, and for strategies that FSDP2 does not have, it is the option itself.
    """
    if version != "2":
        return option
    return {"full_shard": True, "shard_grad_op": False}.get(option, option)
