"""Conversion of the Trainer's `fsdp` and `fsdp_config`, or of the file that `fsdp_config` names.

Names may have the prefix `fsdp_`, as in Transformers. The default version of FSDP is 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config.convert.fsdp_keys import OFFLOAD, STRATEGIES, TRAINER_KEYS
from plait.config.convert.fsdp_sharding import (
    RESHARD,
    SHARDING_KEYS,
    STAGE,
    ShardingKeys,
    read_sharding,
)
from plait.config.convert.translated import (
    TranslatedDocument,
    Translation,
    parse_flag,
    problems_in,
)
from plait.config.dialects.keys import nearest
from plait.config.reading.source import Document, read_named
from plait.config.schema.provenance import KeyReport, Status
from plait.errors import ConfigError, Problem

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
            rule = "unknown key beside fsdp and fsdp_config"
            translation.refuse(name, value, rule, "leave it out")

    if options is None:
        for name, value in section.items():
            translation.ignore(prefix + name, value, "fsdp is off")
        return translation.finish(document.name, "the Trainer", {STAGE: 0})
    _read_keys(translation, section, options, prefix)
    return translation.finish(document.name, "the Trainer", {STAGE: 3})


def _read_options(translation: Translation, value: Any, *, written: bool) -> list[str] | None:
    """Return the options of `fsdp`; None if it is off or invalid.

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
        rule = "must be true, false, or a text of options"
        remedy = "use true, and write the rest in fsdp_config"
        translation.refuse("fsdp", value, rule, remedy)
        return None

    options: list[Any] = []
    if isinstance(value, str):
        options = value.split()
    elif isinstance(value, list):
        options = value
    names = [str(option).lower() for option in options]
    unknown = [name for name in names if name not in _OPTIONS]
    if unknown:
        rule = f"{unknown[0]!r} is no option of fsdp"
        translation.refuse("fsdp", value, rule, f"use {', '.join(_OPTIONS)}")
        return None
    if written:
        meaning = f"{STAGE}, with what fsdp_config says"
        translation.rows.append(KeyReport("fsdp", value, Status.RENAMED, meaning, STAGE))
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
        meaning = "the keys of that file, each with a row of its own"
        translation.rows.append(KeyReport("fsdp_config", value, Status.RENAMED, meaning))
        return section
    if value is not None and not isinstance(value, dict):
        rule = "is an object or the path of a JSON file"
        translation.refuse("fsdp_config", value, rule, "correct it")
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
            shown, value = sharding.setdefault(RESHARD, ("fsdp", reshard))
            if str(value).lower() != str(reshard).lower():
                rule = f"fsdp says {option}; both say how parameters are sharded and disagree"
                translation.problems.append(Problem(shown, value, rule, "keep one of them"))

    keys = ShardingKeys(sharding, version=2, processes_per_machine=None, launched=False)
    read_sharding(translation, keys)
    _merge_rows(translation)


def _merge_rows(translation: Translation) -> None:
    """Keep one row for `fsdp`, whose options are several settings: a refusal, or the first one."""
    rows = [row for row in translation.rows if row.key == "fsdp"]
    if not rows:
        return
    merged = next((row for row in rows if row.status is Status.REFUSED), rows[0])
    translation.rows[:] = [row for row in translation.rows if row.key != "fsdp" or row is merged]


def _reshard_value(option: str, version: str) -> Any:
    """Return the value of `reshard_after_forward` that an option of `fsdp` stands for.

    FSDP1, and strategies that FSDP2 does not have, use the option itself. FSDP2 refuses it later.
    """
    if version != "2":
        return option
    return {"full_shard": True, "shard_grad_op": False}.get(option, option)
