"""The base of everything that can be set: a frozen pydantic model that refuses unknown fields.

A field's docstring is its documentation; `plait config schema` prints it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Policy(BaseModel):
    """Frozen, strict about unknown names, documented by its field docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True
    )
