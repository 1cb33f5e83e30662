"""The JSON schema describes every key and its values."""

from plait.config.dialects.deepspeed import TABLE
from plait.config.dialects.keys import ALIASES, schema_fields
from plait.config.resolving.json_schema import json_schema
from plait.config.resolving.resolved_parts import PLANNABLE_SETTINGS
from plait.config.schema.config import Config

AUTO = {"const": "auto", "type": "string"}


def find(schema, path):
    """Return the part of a schema that describes a key."""
    node = schema
    for name in path.split("."):
        for option in node.get("anyOf", []):
            if "$ref" in option:
                node = option
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        node = node["properties"][name]
    return node


def test_every_key_is_described():
    schema = json_schema()
    for path, field in schema_fields().items():
        # Line breaks of the docstring are removed.
        assert find(schema, path)["description"] == " ".join(field.description.split()), path
    for path, key in TABLE.items():
        assert find(schema, path)["description"] == f"{key.status}: {key.why}"
        assert find(schema, path)["deprecated"] is True
    for path, alias in ALIASES.items():
        assert alias.target in find(schema, path)["description"]


def test_every_section_is_described():
    schema = json_schema()
    for name, field in Config.model_fields.items():
        description = schema["properties"][name]["description"]
        assert description == " ".join((field.description or "").split()), name
    for name, section in schema["$defs"].items():
        assert "\n" not in section["description"].replace("\n\n", ""), name


def test_the_schema_has_types_and_bounds():
    schema = json_schema()
    options = find(schema, "train_batch_size")["anyOf"]
    assert AUTO in options[0]["oneOf"]
    assert {"minimum": 1, "maximum": 2**63 - 1, "type": "integer"} in options[0]["oneOf"]
    assert find(schema, "zero_optimization.stage")["anyOf"][0]["enum"] == [0, 1, 2, 3]
    assert schema["additionalProperties"] is False


def test_auto_is_allowed_if_the_planner_can_choose():
    schema = json_schema()
    for path in PLANNABLE_SETTINGS:
        assert AUTO in find(schema, path)["anyOf"], path
