"""Unfinished collectives in torch's flight recorders.

torch records the most recent collectives of every backend, including gloo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

_DUMP_FUNCTIONS = tuple(
    name
    for name in dir(_distributed_c10d)
    if name.startswith("_dump_") and name.endswith("_trace_json")
)
"""Names of the functions that return a recorder's entries. This torch has one per backend."""

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
}
"""Names of dtypes, keyed by the names that the recorders use."""


@dataclass(frozen=True)
class UnfinishedCollective:
    """A collective of this process that has begun and has not ended.

    Attributes:
        operation: Name without that of the backend, for example `all_reduce`.
        group: torch's name of the process group.
        description: Purpose of the group, for example `mesh_dp_shard`.
        ranks: Global ranks of the group.
        sequence: Number of the collective in its group. 0 for a message between two ranks.
        shapes: Shapes and dtypes of the inputs, for example `[1000] float32`.
        time_ns: Time at which it began, as `time.time_ns` returns it.
    """

    operation: str
    group: str
    description: str
    ranks: tuple[int, ...]
    sequence: int
    shapes: str
    time_ns: int


def unfinished_collectives() -> list[UnfinishedCollective]:
    """Return the unfinished collectives of this process, oldest first.

    A call takes about a millisecond per hundred recorded collectives.
    """
    collectives = [entry for name in _DUMP_FUNCTIONS for entry in _unfinished(name)]
    return sorted(collectives, key=attrgetter("time_ns"))


def _unfinished(dump_function: str) -> Iterator[UnfinishedCollective]:
    """Yield the unfinished collectives of one recorder."""
    dump = getattr(_distributed_c10d, dump_function, None)
    if dump is None:
        return
    recorded = json.loads(dump(includeCollectives=True, onlyActive=True))
    groups = {name: group for group, name in distributed_c10d._world.pg_names.items()}

    for entry in recorded.get("entries") or ():
        if entry.get("retired") or entry.get("state") == "completed":
            continue

        name, _ = entry["process_group"]
        group = groups.get(name)
        description = ""
        ranks: tuple[int, ...] = ()
        if group is not None:
            description = group.group_desc
            ranks = tuple(distributed_c10d._world.pg_group_ranks[group])

        is_message = bool(entry.get("is_p2p"))
        yield UnfinishedCollective(
            operation=str(entry["profiling_name"]).rpartition(":")[2],
            group=name,
            description=description,
            ranks=ranks,
            sequence=0 if is_message else int(entry["collective_seq_id"]),
            shapes=_shapes(entry),
            time_ns=int(entry["time_created_ns"]),
        )


def _shapes(entry: dict[str, Any]) -> str:
    """Return shapes and dtypes of a recorded collective's inputs."""
    inputs = [
        f"{size} {_DTYPES.get(dtype, dtype.lower())}"
        for size, dtype in zip(
            entry.get("input_sizes", ()), entry.get("input_dtypes", ()), strict=False
        )
    ]
    return " and ".join(inputs)
