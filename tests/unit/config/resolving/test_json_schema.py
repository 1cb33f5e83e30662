"""The JSON schema says of every key what it is, and describes it."""

import json

from plait.config.dialects.deepspeed import TABLE
from plait.config.dialects.keys import ALIASES, schema_fields
from plait.config.resolving.json_schema import json_schema
from plait.config.resolving.resolved_parts import PLANNABLE_SETTINGS
from plait.config.schema.config import Config


def find(schema, path):
    node = schema
    for name in path.split("."):
        for option in node.get("anyOf", []):
            node = option if "$ref" in option else node
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        node = node["properties"][name]
    return node


def test_every_key_is_described():
    schema = json_schema()
    for path, field in schema_fields().items():
        # On one line, without the line breaks of the docstring.
        assert find(schema, path)["description"] == " ".join(field.description.split()), path
    for path, key in TABLE.items():
        assert find(schema, path)["description"] == f"{key.status}: {key.why}"
        assert find(schema, path)["deprecated"] is True
    for path, alias in ALIASES.items():
        if path != "bfloat16":
            assert alias.target in find(schema, path)["description"]


def test_every_section_is_described():
    schema = json_schema()
    for name, field in Config.model_fields.items():
        description = schema["properties"][name]["description"]
        assert description == " ".join((field.description or "").split()), name
    for name, section in schema["$defs"].items():
        assert "\n" not in section["description"].replace("\n\n", ""), name


def test_types_bounds_and_auto_are_in_it():
    schema = json_schema()
    options = find(schema, "train_batch_size")["anyOf"]
    assert {"const": "auto", "type": "string"} in options[0]["oneOf"]
    assert {"minimum": 1, "maximum": 2**63 - 1, "type": "integer"} in options[0]["oneOf"]
    assert find(schema, "zero_optimization.stage")["anyOf"][0]["enum"] == [0, 1, 2, 3]
    assert schema["additionalProperties"] is False


def test_auto_is_allowed_where_train_plans_it():
    """D7."""
    schema = json_schema()
    for path in PLANNABLE_SETTINGS:
        assert {"const": "auto", "type": "string"} in find(schema, path)["anyOf"], path


def test_it_is_json_and_does_not_change():
    assert json.dumps(json_schema()) == json.dumps(json_schema())
