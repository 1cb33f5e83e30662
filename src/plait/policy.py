"""Base class of all configuration sections: a frozen pydantic model that refuses unknown fields.

The docstring of a field is its documentation; `plait config schema` prints it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Policy(BaseModel):
    """Immutable section of the configuration, documented by the docstrings of its fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True
    )
