"""Which way to sum gradients over a group, how large a message, and whether to compress it: from the links' costs. Pure, and every choice
says why.

A way is priced as the operations that it is made of. Compression changes what is trained, a little, so it is only chosen where the caller
allows it. Ties go to the way with the fewest parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.comm.links import GroupLinks
from plait.comm.quantise import packed_bytes
from plait.units import MIB, format_bytes

FIXED_SHARE = 0.1
"""A bucket is so large that the fixed time is at most this part of its time."""
_LARGEST_BUCKET = 100 * MIB
QUANTISE_SECONDS_PER_BYTE = 2e-9
"""Of float32, there and back, twice: about 2 GB/s a core. A GPU is a hundred times as fast; measured values replace it."""


@dataclass(frozen=True)
class Choice:
    """A way and its price."""

    algorithm: str
    """A name of `comm.algorithms`, `shared-memory`, or `int8` (quantised to owners and back)."""
    seconds: float
    bucket_bytes: int
    reason: str
    others: tuple[tuple[str, float], ...]
    """Every other way that was priced, cheapest first."""


def prices(
    nbytes: int, group: GroupLinks, *, lossy: bool = False, quantise_seconds_per_byte: float = QUANTISE_SECONDS_PER_BYTE
) -> dict[str, float]:
    """Way to seconds for an all-reduce of `nbytes` of float32, in the order in which ties are decided."""
    costs, ranks = group.whole.costs, group.ranks
    found = {"shared-memory": costs["shared_memory"].at(nbytes)} if "shared_memory" in costs else {}
    found["all-reduce"] = costs["all_reduce"].at(nbytes)
    found["reduce-scatter+all-gather"] = costs["reduce_scatter"].at(nbytes) + costs["all_gather"].at(nbytes)
    if group.inside is not None and group.across is not None:
        inside, across = group.inside.costs, group.across.costs
        there = inside["reduce_scatter"].at(nbytes) + across["all_reduce"].at(nbytes / group.per_machine)
        found["two-level"] = there + inside["all_gather"].at(nbytes)
    far = math.floor(math.log2(group.machines)) if "far_exchange" in costs else 0
    near = math.floor(math.log2(ranks)) - far + 2 * (ranks & (ranks - 1) != 0)
    nearby = (group.inside or group.whole).costs["exchange"]
    found["recursive-doubling"] = near * nearby.at(nbytes) + (far * costs["far_exchange"].at(nbytes) if far else 0)
    found["ring"] = 2 * (ranks - 1) * costs["exchange"].at(nbytes / ranks)
    if lossy:
        packed = packed_bytes(nbytes // 4, 8)
        sent = costs["reduce_scatter"].at(packed) + costs["all_gather"].at(packed)
        found["int8"] = sent + quantise_seconds_per_byte * nbytes
    return found


def choose_all_reduce(
    nbytes: int, group: GroupLinks, *, lossy: bool = False, quantise_seconds_per_byte: float = QUANTISE_SECONDS_PER_BYTE
) -> Choice:
    """The cheapest way to sum `nbytes` of float32 gradients over the group. `lossy` allows compression."""
    priced = prices(nbytes, group, lossy=lossy, quantise_seconds_per_byte=quantise_seconds_per_byte)
    best = min(priced, key=lambda way: priced[way])
    others = tuple(sorted(((way, seconds) for way, seconds in priced.items() if way != best), key=lambda item: item[1]))
    bucket = _bucket_bytes(group, best, lossy)
    where = f"{group.ranks} ranks on {group.machines} machine{'s' if group.machines > 1 else ''}"
    beaten = ", ".join(f"{way} {_milliseconds(seconds)}" for way, seconds in others[:3])
    reason = f"{format_bytes(nbytes)} over {group.axis}, {where}: {best} {_milliseconds(priced[best])}; {beaten}. {_why(best, group)}"
    return Choice(best, priced[best], bucket, reason, others)


def _why(best: str, group: GroupLinks) -> str:
    if best == "two-level":
        return f"Only 1/{group.per_machine} of the bytes of each rank cross between machines."
    if best == "recursive-doubling":
        return "The message is small: fewest steps win."
    if best == "int8":
        return "A quarter of the bytes; the links are slower than quantising."
    if best == "shared-memory":
        return "All ranks are on one machine and share memory."
    return "Nothing that it is made of is cheaper apart."


def _bucket_bytes(group: GroupLinks, way: str, lossy: bool) -> int:
    """From the way's own price at two sizes: fixed and per byte; a power of two of MiB."""
    small, large = (prices(size * MIB, group, lossy=lossy)[way] for size in (1, 64))
    per_byte = (large - small) / (63 * MIB)
    fixed = max(0.0, small - per_byte * MIB)
    wanted = (1 / FIXED_SHARE - 1) * fixed / per_byte if per_byte > 0 else _LARGEST_BUCKET
    power = 2 ** math.ceil(math.log2(max(1.0, wanted / MIB)))
    return min(_LARGEST_BUCKET, power * MIB)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
