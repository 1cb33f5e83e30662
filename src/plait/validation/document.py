"""The document of a validation: machine, versions and the numbers of all rows, as one JSON object.

It contains no paths, user names or host names. Of the environment it has only the variables that
change how CUDA, NCCL and torch work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.validation.rows import Result, counts

FORMAT = 2


def document(
    facts: Mapping[str, Any],
    results: Sequence[Result],
    *,
    at: str,
    seconds: float,
    only: Sequence[str],
) -> dict[str, Any]:
    """Return the results of a validation as a JSON document.

    Args:
        facts: Facts of the machine, from `cli.validating.machine`.
        results: Results of the rows that have ended.
        at: Start of the validation (UTC, ISO 8601).
        seconds: Duration until now.
        only: Patterns of `--only`. Empty for the default rows.
    """
    return {
        "format": FORMAT,
        "at": at,
        "seconds": round(seconds, 1),
        "only": list(only),
        **facts,
        "counts": counts(results),
        "rows": [_with_finite_numbers(result.as_dict()) for result in results],
    }


def _with_finite_numbers(value: Any) -> Any:
    """Replace floats that JSON does not have (NaN, infinity) by text."""
    if isinstance(value, Mapping):
        return {str(key): _with_finite_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(entry) for entry in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
