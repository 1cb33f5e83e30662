"""One value of a key in the DeepSpeed table: is it of the right type, and does it ask for
anything.
"""

from __future__ import annotations

from typing import Any

from plait.config.dialects.deepspeed import Key, Kind

_NAMES: dict[Kind, str] = {
    "flag": "true or false",
    "whole": "a whole number",
    "number": "a number",
    "text": "text",
    "list": "a list",
    "tree": "an object",
}


def type_problem(key: Key, value: Any) -> tuple[str, str] | None:
    """(rule, remedy) for a value of the wrong type. As in DeepSpeed, "auto" fits everywhere, and
    quoted numbers and flags are read.
    """
    number = _as_number(value)
    fits = {
        "any": True,
        "flag": as_flag(value) is not None,
        "whole": number is not None and number == number // 1,
        "number": number is not None,
        "text": isinstance(value, str),
        "list": isinstance(value, list),
        "tree": isinstance(value, dict | bool),
    }
    if value == "auto" or fits[key.kind]:
        return None
    return f"must be {_NAMES[key.kind]}", "correct it or leave it out: " + key.why


def asks_for_nothing(key: Key, value: Any) -> bool:
    """Whether a refused key may stay in the file with this value. "auto" is DeepSpeed's default,
    which asks for nothing.
    """
    if key.kind == "flag":
        value = as_flag(value)
    if (
        value is None
        or value == "auto"
        or any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in key.off)
    ):
        return True
    return key.kind == "tree" and not _switched_on(value, without_switch=key.off != ())


def as_flag(value: Any) -> bool | None:
    """The truth value that a file means; None for anything else (and for "auto")."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())


def _switched_on(value: Any, *, without_switch: bool) -> bool:
    """Whether a section is switched on by `enabled`, at its top or else anywhere in it.
    `without_switch`: what a section without any is.
    """
    switches = list(_switches(value))
    return any(switches) if switches else bool(value) and without_switch


def _switches(value: Any) -> list[bool]:
    if not isinstance(value, dict):
        return [value] if isinstance(value, bool) else []
    if "enabled" in value:
        switch = value["enabled"]
        # "yes" and other texts are true in DeepSpeed, which does not look at the type.
        return [switch not in (None, "auto") and as_flag(switch) is not False]
    return [
        switch for item in value.values() if isinstance(item, dict) for switch in _switches(item)
    ]


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
