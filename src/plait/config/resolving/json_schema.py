"""JSON schema of the configuration file, for editors and other programs.

It contains the fields of the schema, the keys of the DeepSpeed table and the aliases. Keys that are
ignored, or refused for most values, are marked `deprecated` with the reason as their description.
"""

from __future__ import annotations

from typing import Any

from plait.config.dialects.deepspeed import TABLE, Kind
from plait.config.dialects.keys import ALIASES
from plait.config.resolving.resolved_parts import PLANNABLE_SETTINGS
from plait.config.schema.config import Config

_TYPES: dict[Kind, list[str]] = {
    "flag": ["boolean"],
    "integer": ["integer"],
    "number": ["number"],
    "text": ["string"],
    "list": ["array"],
    "object": ["object", "boolean"],
}


def json_schema() -> dict[str, Any]:
    """Return the schema as JSON values."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
        "title": "Plait configuration",
    }
    for path in PLANNABLE_SETTINGS:
        _allow_auto(schema, path)

    for path, key in TABLE.items():
        entry: dict[str, Any] = {}
        if key.kind in _TYPES:
            # "auto" and quoted numbers are strings.
            entry["type"] = sorted({*_TYPES[key.kind], "string"})
        entry |= {"description": f"{key.status}: {key.why}", "deprecated": True}
        _add_property(schema, path, entry)

    for path, alias in ALIASES.items():
        entry = {"description": f"Another name of {alias.target} ({alias.note})."}
        _add_property(schema, path, entry)
    for section in (schema, *schema["$defs"].values()):
        _complete_descriptions(schema, section)
    return schema


def _complete_descriptions(schema: dict[str, Any], section: dict[str, Any]) -> None:
    """Join the lines of each paragraph, and restore the descriptions that pydantic drops."""
    for node in (section, *section["properties"].values()):
        # pydantic drops the description of a property that is equal to that of its section.
        if "$ref" in node:
            node.setdefault("description", _dereference(schema, node)["description"])
        if "description" in node:
            paragraphs = node["description"].split("\n\n")
            node["description"] = "\n\n".join(" ".join(text.split()) for text in paragraphs)


def _allow_auto(schema: dict[str, Any], path: str) -> None:
    """Allow "auto" for settings that `plait train` and `plait plan` can choose."""
    *parents, last = path.split(".")
    node = schema
    for name in parents:
        node = _dereference(schema, node["properties"][name])

    entry = node["properties"][last]
    # These describe the setting and not one of its alternatives.
    annotations = {}
    for name in ("description", "default", "title"):
        if name in entry:
            annotations[name] = entry.pop(name)
    alternatives = entry.get("anyOf") or [entry]
    node["properties"][last] = {
        "anyOf": [*alternatives, {"const": "auto", "type": "string"}],
        **annotations,
    }


def _add_property(schema: dict[str, Any], path: str, entry: dict[str, Any]) -> None:
    """Add an entry at a path, and create the sections of the path that do not exist yet."""
    *parents, last = path.split(".")
    node = schema
    for name in parents:
        section = {"type": ["object", "boolean"], "additionalProperties": False}
        node = _dereference(schema, node.setdefault("properties", {}).setdefault(name, section))
    # A field of the schema keeps its own entry.
    node.setdefault("properties", {}).setdefault(last, entry)


def _dereference(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Return the object that a node refers to. The node may be a reference, or `X | None`."""
    for alternative in node.get("anyOf", []):
        if "$ref" in alternative:
            node = alternative
    if "$ref" not in node:
        return node
    name = node["$ref"].rpartition("/")[2]
    definition: dict[str, Any] = schema["$defs"][name]
    return definition
