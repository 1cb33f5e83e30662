"""Collectives that torch's flight recorder has seen begin and not end: torch keeps the last of them
for every backend, also for gloo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

_DUMPS = tuple(
    name
    for name in dir(_distributed_c10d)
    if name.startswith("_dump_") and name.endswith("_trace_json")
)
"""One for each recorder that this torch was built with."""

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
}
"""The recorder's names of dtypes."""


@dataclass(frozen=True)
class Begun:
    """A collective of this process that has not ended."""

    operation: str
    """`all_reduce`, without the backend's name."""
    group: str
    description: str
    """torch's name of the group, and what it is for (`mesh_dp_shard`)."""
    ranks: tuple[int, ...]
    sequence: int
    """Its number among the collectives of the group; 0 for a message between two ranks."""
    shapes: str
    """Of what it was given, with dtypes: `[1000] float32`."""
    time_ns: int
    """When it began, by `time.time_ns`."""


def begun_collectives() -> list[Begun]:
    """All of them, oldest first. Takes about a millisecond for a hundred recorded ones."""
    return sorted((one for name in _DUMPS for one in _of(name)), key=lambda one: one.time_ns)


def _of(recorder: str) -> Iterator[Begun]:
    dump = getattr(_distributed_c10d, recorder, None)
    if dump is None:
        return
    found = json.loads(dump(includeCollectives=True, onlyActive=True))
    groups = {name: group for group, name in distributed_c10d._world.pg_names.items()}
    for entry in found.get("entries") or ():
        if entry.get("retired") or entry.get("state") == "completed":
            continue
        name, _ = entry["process_group"]
        group = groups.get(name)
        dtypes = [_DTYPES.get(dtype, dtype.lower()) for dtype in entry.get("input_dtypes", ())]
        shapes = " and ".join(
            f"{shape} {dtype}"
            for shape, dtype in zip(entry.get("input_sizes", ()), dtypes, strict=False)
        )
        message = bool(entry.get("is_p2p"))
        yield Begun(
            operation=str(entry["profiling_name"]).rpartition(":")[2],
            group=name,
            description=group.group_desc if group is not None else "",
            ranks=tuple(distributed_c10d._world.pg_group_ranks[group]) if group is not None else (),
            sequence=0 if message else int(entry["collective_seq_id"]),
            shapes=shapes,
            time_ns=int(entry["time_created_ns"]),
        )
