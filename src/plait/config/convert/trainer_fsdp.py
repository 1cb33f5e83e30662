"""The Trainer's `fsdp` and `fsdp_config` as a configuration: a file of these two, or the JSON file
that `fsdp_config` names.

Names may begin with `fsdp_`, as in Transformers. The version of FSDP is 2 where none is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config.convert.fsdp_keys import OF_TRAINER, OFFLOAD, STRATEGIES
from plait.config.convert.fsdp_sharding import NAMES, STAGE, read_sharding
from plait.config.convert.translated import Reading, Translated, inside, truth
from plait.config.dialects.keys import nearest
from plait.config.reading.source import Document, read_named
from plait.config.schema.provenance import Row, Status
from plait.errors import ConfigError, Problem

_KEYS = {key.path: key for key in OF_TRAINER}
_NAMES = (*_KEYS, *NAMES)
_OPTIONS = (*(name.lower() for name in STRATEGIES), "auto_wrap", "offload")


def translate(document: Document) -> Translated:
    """The configuration that the Trainer's arguments describe. Problems are collected."""
    found = Reading()
    tree = document.tree
    arguments = tree if "fsdp" in tree else {"fsdp": True, "fsdp_config": tree}
    prefix = "fsdp_config." if "fsdp" in tree else ""
    options = _options(found, arguments["fsdp"], written="fsdp" in tree)
    section = _section_of(found, document, arguments.get("fsdp_config"))
    for name in arguments:
        if name not in ("fsdp", "fsdp_config"):
            found.refuse(
                name, arguments[name], "unknown key beside fsdp and fsdp_config", "leave it out"
            )
    if options is None:
        for name, value in section.items():
            found.ignore(prefix + name, value, "fsdp is off")
    else:
        _read(found, section, options, prefix)
    return found.translated(document.name, "the Trainer", {STAGE: 0 if options is None else 3})


def _options(found: Reading, value: Any, *, written: bool) -> list[str] | None:
    """The options of `fsdp`; None where it is off."""
    value = truth(value)
    if value in ("", [], None, False):
        found.ignore("fsdp", value, "off: a replica on every process")
        return None
    if not isinstance(value, str | list | bool):
        found.refuse(
            "fsdp",
            value,
            "must be true, false, or a text of options",
            "use true, and write the rest in fsdp_config",
        )
        return None
    given = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    options = [str(option).lower() for option in given]
    wrong = [option for option in options if option not in _OPTIONS]
    if wrong:
        found.refuse(
            "fsdp", value, f"{wrong[0]!r} is no option of fsdp", f"use {', '.join(_OPTIONS)}"
        )
        return None
    if written:
        found.rows.append(
            Row("fsdp", value, Status.RENAMED, f"{STAGE}, with what fsdp_config says", STAGE)
        )
    return options


def _section_of(found: Reading, document: Document, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            section = read_named(value, document).tree
        except ConfigError as error:
            found.problems += inside("fsdp_config", error)
            found.rows.append(Row("fsdp_config", value, Status.REFUSED, "cannot be read"))
            return {}
        found.rows.append(
            Row(
                "fsdp_config",
                value,
                Status.RENAMED,
                "the keys of that file, each with a row of its own",
            )
        )
        return section
    if value is not None and not isinstance(value, dict):
        found.refuse("fsdp_config", value, "is an object or the path of a JSON file", "correct it")
        return {}
    return value or {}


def _read(found: Reading, section: Mapping[str, Any], options: list[str], prefix: str) -> None:
    given: dict[str, tuple[str, Any]] = {}
    for written, value in section.items():
        shown = prefix + written
        name = written.removeprefix("fsdp_")
        if name in ("version", "reshard_after_forward"):
            given[name] = (shown, value)
        elif name in _KEYS:
            found.take(shown, _KEYS[name], value)
        else:
            near = nearest(name, _NAMES)
            found.refuse(
                shown,
                value,
                "unknown key of fsdp_config",
                f"did you mean {' or '.join(near)}?" if near else "leave it out",
            )
    version = str(given.get("version", ("", None))[1] or 2)
    for option in options:
        if option == "offload":
            for path, setting in OFFLOAD(True).items():
                found.say(path, "fsdp", setting)
        elif option.upper() in STRATEGIES:
            shown, value = given.setdefault(
                "reshard_after_forward", ("fsdp", _strategy(option, version))
            )
            if str(value).lower() != str(_strategy(option, version)).lower():
                rule = f"fsdp says {option}; both say how parameters are sharded and disagree"
                found.problems.append(Problem(shown, value, rule, "keep one of them"))
    read_sharding(found, given, version=2, group=None, launched=False)
    _one_row(found)


def _one_row(found: Reading) -> None:
    """Of the rows of `fsdp`, whose options are several keys, the one that refuses, else the
    first.
    """
    own = [row for row in found.rows if row.key == "fsdp"]
    kept = next((row for row in own if row.status is Status.REFUSED), own[0] if own else None)
    found.rows[:] = [row for row in found.rows if row.key != "fsdp" or row is kept]


def _strategy(option: str, version: str) -> Any:
    """What `fsdp` says of `reshard_after_forward`; a strategy that FSDP2 has not stays its name,
    which is refused there.
    """
    return (
        {"full_shard": True, "shard_grad_op": False}.get(option, option)
        if version == "2"
        else option
    )
