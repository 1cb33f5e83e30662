"""Selects the all-reduce algorithm and the bucket size of a group from the costs of its links, and
prices compression. Pure; every choice has a reason.

An algorithm that was measured directly has that cost; any other costs the sum of its operations.
Compression changes the training slightly, so it is a candidate only where the caller allows it.
Ties go to the algorithm with the fewest operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from plait.comm.links import GroupLinks
from plait.comm.quantise import packed_bytes
from plait.units import KIB, MIB, format_bytes

LARGEST_BUCKET_BYTES = 100 * MIB
SMALLEST_BUCKET_BYTES = 256 * KIB
"""Below this size Python's overhead for a bucket dominates, and the costs of the links do not
include it.
"""
MEASURED_TIE = 0.03
"""Measured times that differ by less count as equal."""
OVERLAP_TIE = 0.15
"""The same between the backend's own all-reduce and a composed algorithm, for buckets: only the
first operation of a composed one overlaps with the backward.
"""
NEAR = 2.0
"""Algorithms whose cost is at most this many times that of the chosen one are timed against it
(`comm.startup.refine`).
"""
_TIE = 1e-9
QUANTISE_SECONDS_PER_BYTE = 6e-10
"""Of float32, both hops there and back, with error feedback, on one core of an AMD EPYC. Measured
values replace it.
"""


@dataclass(frozen=True)
class Choice:
    """An algorithm and its cost."""

    algorithm: str
    """A name of `comm.algorithms`, `shared-memory`, or `int8`, `int4` (quantised to owners and
    back).
    """
    seconds: float
    """Of all messages together."""
    bucket_bytes: int
    """Of one message."""
    reason: str
    others: tuple[tuple[str, float], ...]
    """Every other candidate, cheapest first."""
    total_bytes: int
    """Of all messages."""
    in_buckets: bool
    """Whether they are overlapped with a backward."""
    why: str
    """The last sentence of the reason."""

    @property
    def messages(self) -> int:
        """How many there are."""
        return math.ceil(self.total_bytes / self.bucket_bytes)

    @property
    def near(self) -> tuple[str, ...]:
        """The chosen algorithm and those that could be as good."""
        return self.algorithm, *(
            way for way, seconds in self.others if seconds <= NEAR * self.seconds
        )


def prices(
    nbytes: float,
    group: GroupLinks,
    *,
    lossy: bool = False,
    quantise_seconds_per_byte: float = QUANTISE_SECONDS_PER_BYTE,
) -> dict[str, float]:
    """Algorithm to seconds for an all-reduce of `nbytes` of float32, in the order in which ties are
    decided.
    """
    measured = {way: cost.at(nbytes) for way, cost in group.whole.costs.items() if way in _WAYS}
    composed = (
        _composed(nbytes, group, quantise_seconds_per_byte)
        if "exchange" in group.whole.costs
        else {}
    )
    found = composed | measured
    return {way: found[way] for way in (_WAYS if lossy else _EXACT) if way in found}


QUANTISED: tuple[Literal[4, 8], ...] = (8, 4)
"""Bits per element of compressed gradients."""
_EXACT = (
    "shared-memory",
    "all-reduce",
    "reduce-scatter+all-gather",
    "hierarchical",
    "recursive-doubling",
    "ring",
)
_WAYS = (*_EXACT, *(f"int{bits}" for bits in QUANTISED))


def _composed(
    nbytes: float, group: GroupLinks, quantise_seconds_per_byte: float
) -> dict[str, float]:
    costs = group.whole.costs
    ranks = group.ranks
    found = {"all-reduce": costs["all_reduce"].at(nbytes)}
    found["reduce-scatter+all-gather"] = costs["reduce_scatter"].at(nbytes) + costs[
        "all_gather"
    ].at(nbytes)
    if group.inside is not None and group.across is not None:
        inside = group.inside.costs
        across = group.across.costs
        there = inside["reduce_scatter"].at(nbytes) + across["all_reduce"].at(
            nbytes / group.per_machine
        )
        found["hierarchical"] = there + inside["all_gather"].at(nbytes)
    far = math.floor(math.log2(group.machines)) if "far_exchange" in costs else 0
    near = math.floor(math.log2(ranks)) - far + 2 * (ranks & (ranks - 1) != 0)
    nearby = (group.inside or group.whole).costs["exchange"]
    found["recursive-doubling"] = near * nearby.at(nbytes) + (
        far * costs["far_exchange"].at(nbytes) if far else 0
    )
    found["ring"] = 2 * (ranks - 1) * costs["exchange"].at(nbytes / ranks)
    for bits in QUANTISED:
        packed = packed_bytes(int(nbytes) // 4, bits)
        sent = costs["reduce_scatter"].at(packed) + costs["all_gather"].at(packed)
        found[f"int{bits}"] = sent + quantise_seconds_per_byte * nbytes
    return found


def choose_all_reduce(
    nbytes: int,
    group: GroupLinks,
    *,
    lossy: bool = False,
    quantise_seconds_per_byte: float = QUANTISE_SECONDS_PER_BYTE,
) -> Choice:
    """The cheapest algorithm for an all-reduce of `nbytes` of float32 in one message. `lossy`
    allows compression.
    """
    priced = prices(nbytes, group, lossy=lossy, quantise_seconds_per_byte=quantise_seconds_per_byte)
    return _choice(nbytes, 1, priced, group, in_buckets=False)


def refined(choice: Choice, group: GroupLinks, times: Mapping[str, float]) -> Choice:
    """The choice after its candidates were timed at its own message size: `times` has the seconds
    of one message.
    """
    count = choice.messages
    priced = {choice.algorithm: choice.seconds, **dict(choice.others)} | {
        way: count * seconds for way, seconds in times.items()
    }
    timed = {way: priced[way] for way in _WAYS if way in times}
    return _choice(
        choice.total_bytes, count, timed, group, in_buckets=choice.in_buckets, beaten=priced
    )


def choose_buckets(
    gradient_bytes: int, group: GroupLinks, *, bucket_bytes: int | None = None
) -> Choice:
    """The cheapest algorithm for `gradient_bytes` of gradients in buckets, and the bucket size
    where `bucket_bytes` is None.

    A bucket is sent when the backward has filled it. More buckets start earlier, and each adds its
    fixed time. For a backward that takes as long as the all-reduce of all gradients T(G), where
    this matters most, N buckets end T(G) / N + N T(G / N) after its start: the minimum is at N =
    sqrt(b G / a) for T = a + b x.
    """
    return _in_buckets(gradient_bytes, group, lambda nbytes: prices(nbytes, group), bucket_bytes)


def price_quantised(
    bits: int,
    gradient_bytes: int,
    group: GroupLinks,
    *,
    quantise_seconds_per_byte: float = QUANTISE_SECONDS_PER_BYTE,
) -> Choice | None:
    """The same for 8 or 4 bits per element, for comparison; a run measures them itself
    (`parallel.data.autotune`). None where the links have no cost for it.
    """

    def price(nbytes: float) -> dict[str, float]:
        found = prices(
            nbytes, group, lossy=True, quantise_seconds_per_byte=quantise_seconds_per_byte
        )
        return {way: seconds for way, seconds in found.items() if way == f"int{bits}"}

    return _in_buckets(gradient_bytes, group, price, None) if price(gradient_bytes) else None


def _in_buckets(
    total: int,
    group: GroupLinks,
    price: Callable[[float], dict[str, float]],
    bucket_bytes: int | None,
) -> Choice:
    total = max(total, 1)
    whole = price(total)

    def together(count: int) -> dict[str, float]:
        # Small messages may pass through the buffers of a switch; many in sequence are no faster
        # than one message with all bytes.
        return {
            way: max(count * seconds, whole[way]) for way, seconds in price(total / count).items()
        }

    if bucket_bytes is not None:
        count = math.ceil(total / min(bucket_bytes, total))
        return _choice(total, count, together(count), group, in_buckets=True)
    counts = [math.ceil(total / LARGEST_BUCKET_BYTES)]
    while total / (2 * counts[-1]) >= SMALLEST_BUCKET_BYTES:
        counts.append(2 * counts[-1])
    ends = {
        count: min(whole[way] / count + seconds for way, seconds in together(count).items())
        for count in counts
    }
    best = min(ends, key=lambda count: ends[count])
    return _choice(total, best, together(best), group, in_buckets=True)


def _choice(
    nbytes: int,
    count: int,
    priced: Mapping[str, float],
    group: GroupLinks,
    *,
    in_buckets: bool,
    beaten: Mapping[str, float] | None = None,
) -> Choice:
    """Of `priced`, in the order in which ties are decided; `beaten` also has the candidates that
    could not be chosen.
    """
    cheapest = min(priced.values())
    measured = any(cost.samples for cost in group.whole.costs.values())
    tie = MEASURED_TIE if measured else _TIE
    best = next(way for way, seconds in priced.items() if seconds <= cheapest * (1 + tie))
    if (
        in_buckets
        and measured
        and priced.get("all-reduce", math.inf) <= priced[best] * (1 + OVERLAP_TIE)
        and best != "shared-memory"
    ):
        best = "all-reduce"
    everything = beaten or priced
    others = tuple(
        sorted(
            ((way, seconds) for way, seconds in everything.items() if way != best),
            key=lambda item: item[1],
        )
    )
    where = f"{group.ranks} ranks on {group.machines} machine{'s' if group.machines > 1 else ''}"
    shown = ", ".join(f"{way} {_milliseconds(seconds)}" for way, seconds in others[:3])
    bucket = math.ceil(nbytes / count)
    parts = f" in {count} buckets of {format_bytes(bucket)}" if count > 1 else ""
    taken = f"{best} {_milliseconds(priced[best])}{parts}"
    reason = (
        f"{format_bytes(nbytes)} over {group.axis}, {where}: {taken}; {shown}. {_why(best, group)}"
    )
    return Choice(best, priced[best], bucket, reason, others, nbytes, in_buckets, _why(best, group))


def _why(best: str, group: GroupLinks) -> str:
    if best == "hierarchical":
        return f"Only 1/{group.per_machine} of the bytes of each rank cross between machines."
    if best == "recursive-doubling":
        return "Fewest sequential messages, each with all bytes."
    if best.startswith("int"):
        return (
            f"{best.removeprefix('int')} bits per element; the links are slower than quantization."
        )
    if best == "shared-memory":
        return "All ranks are on one machine and share memory."
    if best == "all-reduce":
        return "The backend's own all-reduce; no composed algorithm is cheaper."
    return "As many bytes as the backend's own all-reduce, and less time on these links."


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
