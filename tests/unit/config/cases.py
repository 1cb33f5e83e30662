"""Short names for the tests of this folder."""

from __future__ import annotations

from typing import Any

from plait.config.resolving.resolve import Config, Resolved, resolve
from plait.config.resolving.resolve import load as load

BATCH = {"train_micro_batch_size_per_gpu": 2}


def resolved(
    tree: dict[str, Any], *overrides: str, world_size: int = 4, **context: Any
) -> Resolved:
    """`tree` with a micro batch of 2 where it gives none, for 4 processes."""
    return resolve(load({**BATCH, **tree}, overrides), world_size=world_size, **context)


def status_of(config: Config, key: str) -> str:
    """What the file's `key` means."""
    (row,) = [row for row in config.provenance.rows if row.key == key]
    return str(row.status)
