"""The JSON schema of the one file, for editors and other programs: the schema's own, and every
other key that a file may contain.

Keys that are ignored, or refused for most values, are marked `deprecated` with the reason as their
description.
"""

from __future__ import annotations

from typing import Any

from plait.config.dialects.aliases import ALIASES
from plait.config.dialects.deepspeed import TABLE, Kind
from plait.config.resolving.degrees import PLANNED
from plait.config.schema.config import Config

_TYPES: dict[Kind, list[str]] = {
    "flag": ["boolean"],
    "whole": ["integer"],
    "number": ["number"],
    "text": ["string"],
    "list": ["array"],
    "tree": ["object", "boolean"],
}


def json_schema() -> dict[str, Any]:
    """The schema as JSON values."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
        "title": "Plait configuration",
    }
    for path in PLANNED:
        _or_auto(schema, path)
    for path, key in TABLE.items():
        types = {"type": sorted({*_TYPES[key.kind], "string"})} if key.kind in _TYPES else {}
        _add(schema, path, {**types, "description": f"{key.status}: {key.why}", "deprecated": True})
    for path, alias in ALIASES.items():
        _add(schema, path, {"description": f"Another name of {alias.target} ({alias.note})."})
    return schema


def _or_auto(schema: dict[str, Any], path: str) -> None:
    """ "auto" too, which `plait train` and `plait plan` answer."""
    *parents, last = path.split(".")
    node = schema
    for name in parents:
        node = _followed(schema, node["properties"][name])
    found = node["properties"][last]
    told = {name: found.pop(name) for name in ("description", "default", "title") if name in found}
    node["properties"][last] = {
        "anyOf": [*(found.get("anyOf") or [found]), {"const": "auto", "type": "string"}],
        **told,
    }


def _add(schema: dict[str, Any], path: str, entry: dict[str, Any]) -> None:
    *parents, last = path.split(".")
    node = schema
    for name in parents:
        properties = node.setdefault("properties", {})
        node = _followed(
            schema,
            properties.setdefault(
                name, {"type": ["object", "boolean"], "additionalProperties": False}
            ),
        )
    node.setdefault("properties", {}).setdefault(last, entry)


def _followed(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The object behind a reference, or behind `X | None`."""
    for option in node.get("anyOf", []):
        if "$ref" in option:
            node = option
    if "$ref" in node:
        found: dict[str, Any] = schema["$defs"][node["$ref"].rpartition("/")[2]]
        return found
    return node
