"""Checks of the values of DeepSpeed's keys: their type, and whether they request a feature."""

from __future__ import annotations

from typing import Any

from plait.config.dialects.deepspeed import Key, Kind

_NAMES: dict[Kind, str] = {
    "flag": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "text": "text",
    "list": "a list",
    "object": "an object",
}


def type_problem(key: Key, value: Any) -> tuple[str, str] | None:
    """Return (rule, remedy) for a value of the wrong type, or None.

    As in DeepSpeed, "auto" is valid for every key, and quoted numbers and flags are parsed.
    """
    number = _parse_number(value)
    valid = {
        "any": True,
        "flag": as_flag(value) is not None,
        "integer": number is not None and number == number // 1,
        "number": number is not None,
        "text": isinstance(value, str),
        "list": isinstance(value, list),
        "object": isinstance(value, dict | bool),
    }
    if value == "auto" or valid[key.kind]:
        return None
    return f"must be {_NAMES[key.kind]}", "correct it or leave it out: " + key.why


def asks_for_nothing(key: Key, value: Any) -> bool:
    """Return True if a refused key may stay in the file with this value.

    "auto" selects DeepSpeed's default, which requests nothing.
    """
    if key.kind == "flag":
        value = as_flag(value)
    if value is None or value == "auto":
        return True

    for off in key.off:
        # Python's 0 == False, but a number is not a flag.
        if value == off and isinstance(value, bool) == isinstance(off, bool):
            return True
    return key.kind == "object" and not _is_enabled(value, default=key.off != ())


def as_flag(value: Any) -> bool | None:
    """Return the boolean that a value stands for; None for any other value, including "auto"."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())


def _is_enabled(value: Any, *, default: bool) -> bool:
    """Return True if a section is enabled by a switch `enabled`, at its top or nested in it.

    Args:
        value: The section, or a boolean in place of it.
        default: Result for a section that is not empty and contains no switch.
    """
    switches = _switches(value)
    if switches:
        return any(switches)
    return bool(value) and default


def _switches(value: Any) -> list[bool]:
    """Return the values of the outermost switches of a section."""
    if isinstance(value, bool):
        return [value]
    if not isinstance(value, dict):
        return []
    if "enabled" in value:
        switch = value["enabled"]
        # "yes" and other texts are true in DeepSpeed, which does not check the type.
        return [switch not in (None, "auto") and as_flag(switch) is not False]

    switches: list[bool] = []
    for item in value.values():
        if isinstance(item, dict):
            switches += _switches(item)
    return switches


def _parse_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
