"""Layout fields that a user fixes, as text: `tp=4`, `stage=3`, `recompute=full`."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import ConfigError, Problem
from plait.planner.job import CONTEXT, SCHEDULES
from plait.planner.offers import RECOMPUTE_INDEX, SCHEDULE_INDEX
from plait.planner.relief import ON_HOST

FIXABLE = (
    *(
        "tp",
        "pp",
        "sp",
        "vpp",
        "schedule",
        "cp",
        "context",
        "ep",
        "dp_replicate",
        "dp_shard",
        "stage",
    ),
    *("recompute", "every", "offload", "loss_chunk", "micro_batch", "accumulation"),
)
"""Fields that a user can fix."""
_MAX_DIGITS = 9
"""Digits of the largest degree or count that is accepted."""
_OTHER_NAMES = {
    "zero": "stage",
    "mbs": "micro_batch",
    "micro-batch": "micro_batch",
    "dp-shard": "dp_shard",
    "dp-replicate": "dp_replicate",
}


_NAMED_VALUES = {
    "schedule": {name: index for index, name in enumerate(SCHEDULES)} | SCHEDULE_INDEX,
    "recompute": RECOMPUTE_INDEX,
    "context": {name: index for index, name in enumerate(CONTEXT)},
    "offload": {
        "none": 0,
        **{f"{share:.0%}": round(100 * share) for share in ON_HOST if share < 1},
        "all": 100,
    },
}
"""Values with names, as a configuration writes them."""
_BOUNDS = {"sp": (0, 1), "stage": (0, 3), "loss_chunk": (0, 10**_MAX_DIGITS - 1)}


def parse_fixed(texts: list[str] | tuple[str, ...]) -> dict[str, int]:
    """Parse texts such as `tp=4`, `stage=3`, `recompute=full`, or several separated by commas.

    Returns:
        Numbers by field. A named value becomes its index (`recompute`, `schedule`, `context`), or
        a percentage (`offload`).

    Raises:
        ConfigError: A field or value is unknown, or a field has two values.
    """
    fixed: dict[str, int] = {}
    for text in (part.strip() for argument in texts for part in argument.split(",")):
        name, _, value = text.partition("=")
        name = name.strip()
        value = value.strip()
        key = _OTHER_NAMES.get(name, name)
        if key not in FIXABLE or not value:
            raise ConfigError(
                Problem(
                    text,
                    None,
                    "not a field of a layout with a value",
                    f"use one of {', '.join(FIXABLE)}, for example tp=4",
                )
            )
        values = _NAMED_VALUES.get(key)
        if values is not None:
            if value not in values:
                raise ConfigError(
                    Problem(name, value, "not a value of it", f"use {', '.join(values)}")
                )
            number = values[value]
        else:
            if value.lower() in ("true", "false", "yes", "no"):
                value = str(int(value.lower() in ("true", "yes")))
            number = -1
            if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
                number = int(value)
            least, most = _BOUNDS.get(key, (1, 10**_MAX_DIGITS - 1))
            if not least <= number <= most:
                raise ConfigError(
                    Problem(
                        name,
                        value,
                        f"not a whole number from {least} to {most}",
                        f"write for example {name}={max(least, 1)}",
                    )
                )
        if fixed.get(key, number) != number:
            raise ConfigError(
                Problem(
                    name,
                    value,
                    "is asked for a second time, with another value",
                    "keep one of them",
                )
            )
        fixed[key] = number

    return fixed


def format_fixed(fixed: Mapping[str, int]) -> str:
    """Return fixed fields as a user writes them, which `parse_fixed` reads."""
    names = {
        key: {value: name for name, value in table.items()} for key, table in _NAMED_VALUES.items()
    }
    return ", ".join(
        f"{key}={names.get(key, {}).get(value, value)}" for key, value in fixed.items()
    )
