"""The sections `model`, `data` and `run`: what contradicts itself is refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from plait.config.schema.sections import DataSection, ModelSection, RunSection
from plait.policy import Policy


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (ModelSection, {}, "set exactly one"),
        (ModelSection, {"config": {"model_type": "llama"}, "path": "x"}, "set exactly one"),
        (ModelSection, {"config": {"hidden_size": 8}}, "model_type"),
        (ModelSection, {"path": "x", "dtype": "int8"}, "float32"),
        (DataSection, {"paths": ["a.txt"]}, "`paths` is read by a `source`"),
        (DataSection, {"source": "files"}, "set `paths`"),
        (DataSection, {"source": "jsonl"}, "set `paths`"),
        (
            DataSection,
            {"source": "datasets", "paths": ["a", "b"]},
            "exactly one data set and `paths` has 2",
        ),
        (
            DataSection,
            {"source": "files", "paths": ["a"], "split": "test"},
            'belong to source "datasets"',
        ),
        (DataSection, {"sequence_length": 1}, "greater than or equal to 2"),
        (DataSection, {"validation_fraction": 1.0}, "less than 1"),
        (DataSection, {"vocab_size": 256}, "greater than or equal to 257"),
        (RunSection, {"processes": 0}, "at least one process"),
        (RunSection, {"steps": 0}, "greater than or equal to 1"),
        (RunSection, {"keep": 0}, "greater than or equal to 1"),
    ],
)
def test_contradictions_are_refused(
    section: type[Policy], values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        section(**values)


@pytest.mark.parametrize("section", [ModelSection, DataSection, RunSection])
def test_every_field_is_documented(section: type[Policy]) -> None:
    assert all(field.description for field in section.model_fields.values())
