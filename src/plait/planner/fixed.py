"""What a user fixes of a layout, as text: `tp=4`, `stage=3`, `recompute=full`."""

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
"""Fields that a user can fix (`tp=4`, `stage=3`, `recompute=full`)."""
_MOST_DIGITS = 9
"""Of a degree or a count; arrays hold no more."""
_OTHER_NAMES = {
    "zero": "stage",
    "mbs": "micro_batch",
    "micro-batch": "micro_batch",
    "dp-shard": "dp_shard",
    "dp-replicate": "dp_replicate",
}


_WORDS = {
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
_BOUNDS = {"sp": (0, 1), "stage": (0, 3), "loss_chunk": (0, 10**_MOST_DIGITS - 1)}


def parse_fixed(texts: list[str] | tuple[str, ...]) -> dict[str, int]:
    """`tp=4`, `stage=3`, `recompute=full`, `dp_shard=8` to numbers. Raises ConfigError for what is
    none.
    """
    found: dict[str, int] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, _, value = (part.strip() for part in text.partition("="))
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
        words = _WORDS.get(key)
        if words is not None:
            if value not in words:
                raise ConfigError(
                    Problem(name, value, "not a value of it", f"use {', '.join(words)}")
                )
            number = words[value]
        else:
            if value.lower() in ("true", "false", "yes", "no"):
                value = str(int(value.lower() in ("true", "yes")))
            number = (
                int(value)
                if value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
                else -1
            )
            least, most = _BOUNDS.get(key, (1, 10**_MOST_DIGITS - 1))
            if not least <= number <= most:
                raise ConfigError(
                    Problem(
                        name,
                        value,
                        f"not a whole number from {least} to {most}",
                        f"write for example {name}={max(least, 1)}",
                    )
                )
        if found.get(key, number) != number:
            raise ConfigError(
                Problem(
                    name,
                    value,
                    "is asked for a second time, with another value",
                    "keep one of them",
                )
            )
        found[key] = number
    return found


def written(fixed: Mapping[str, int]) -> str:
    """What `parse_fixed` reads, as a user writes it."""
    words = {key: {value: name for name, value in table.items()} for key, table in _WORDS.items()}
    return ", ".join(
        f"{key}={words.get(key, {}).get(value, value)}" for key, value in fixed.items()
    )
