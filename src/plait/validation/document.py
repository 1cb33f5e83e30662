"""The document of a validation: the machine, the versions, and every row's numbers, as one JSON object that can be sent in.

It has no paths, user or host names: of the environment only the variables that change how CUDA, NCCL and torch work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.validation.rows import Result, counts

FORMAT = 1


def document(facts: Mapping[str, Any], results: Sequence[Result], *, at: str, seconds: float, only: Sequence[str]) -> dict[str, Any]:
    """Everything. `facts` are those of `cli.validating.machine`, `at` the time (UTC, ISO 8601), `only` what was asked for, if not all."""
    return {
        "format": FORMAT,
        "at": at,
        "seconds": round(seconds, 1),
        "only": list(only),
        **facts,
        "counts": counts(results),
        "rows": [_finite(result.as_dict()) for result in results],
    }


def _finite(value: Any) -> Any:
    """JSON has no numbers that are not finite: those become text."""
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
