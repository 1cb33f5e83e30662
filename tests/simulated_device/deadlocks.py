"""Whether NCCL would carry out what communicators were given, played back from the journals of all ranks.

gloo matches messages whatever order they were begun in, and keeps what nobody receives yet. NCCL does not: a communicator is one stream, so
a call begins when the call before it is done; a call waits for work on other communicators that the stream or the host had waited for; and
it is done when all that it needs of other ranks have begun too. Calls of one group (`batch_isend_irecv`) are one call. What never begins
then is a deadlock, or a call without a partner; both are told by name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Journal = Sequence[dict[str, Any]]
"""Of one rank: entries with `communicator`, `rank`, `stream`, `position`, `calls` and `after`, as `on_torch.journal` returns them."""

MOST_TOLD = 8
SAME_BYTES = ("ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "SEND", "RECV")
PARTNER = {"SEND": "RECV", "RECV": "SEND"}


@dataclass
class _Part:
    """One call of one entry, with what it needs of whom."""

    kind: str
    peer: int
    bytes: int
    nth: int
    """Of its kind with this peer on this communicator."""


@dataclass
class _Entry:
    communicator: str
    rank: int
    stream: int
    position: int
    after: dict[int, int]
    parts: list[_Part] = field(default_factory=list)
    begun: bool = False
    done: bool = False

    def __str__(self):
        calls = [
            f"{part.kind} {'to' if part.kind == 'SEND' else 'from'} rank {part.peer} (number {part.nth + 1})"
            if part.peer >= 0
            else part.kind
            for part in self.parts
        ]
        text = (
            calls[0]
            if len(calls) == 1
            else f"the group of {', '.join(calls[:4])}{', ...' if len(calls) > 4 else ''}"
        )
        return f"rank {self.rank}: {text} on communicator {self.communicator}"


def members(communicator):
    """Ranks of the world; its name ends with them."""
    return [int(rank) for rank in communicator.split("[")[1].split("]")[0].split()]


def stuck(journals):
    """What would not end, empty where all would. `journals` by rank."""
    entries = [list(_entries(journal)) for journal in journals]
    known = {key: entry for own in entries for entry in own for key in _keys(entry)}
    wrong = list(_unlike(known))
    if wrong:
        return "\n".join(wrong[:MOST_TOLD])
    streams = [defaultdict(list) for _ in entries]
    for own, by_stream in zip(entries, streams, strict=True):
        for entry in own:
            by_stream[entry.stream].append(entry)
    at = [dict.fromkeys(by_stream, 0) for by_stream in streams]

    def head(rank, stream):
        queue = streams[rank].get(stream, [])
        return (
            queue[at[rank][stream]]
            if stream in at[rank] and at[rank][stream] < len(queue)
            else None
        )

    def waits_for(entry):
        """Work of its own rank."""
        for stream, position in entry.after.items():
            first = head(entry.rank, stream)
            if first is not None and first.position <= position:
                return first
        return None

    moved = True
    while moved:
        moved = False
        for rank, by_stream in enumerate(streams):
            for stream in by_stream:
                entry = head(rank, stream)
                while entry is not None:
                    if not entry.begun and waits_for(entry) is None:
                        entry.begun = moved = True
                    if not (
                        entry.begun
                        and all(key in known and known[key].begun for key in _partners(entry))
                    ):
                        break
                    at[rank][stream] += 1
                    entry.done = moved = True
                    entry = head(rank, stream)
    left = [
        entry
        for rank, by_stream in enumerate(streams)
        for stream in by_stream
        if (entry := head(rank, stream)) is not None
    ]
    return "\n".join(_told(left, known, waits_for))


def _entries(journal):
    counted: Counter[tuple[str, str, int]] = Counter()
    for line in journal:
        after = {int(stream): position for stream, position in line["after"].items()}
        entry = _Entry(line["communicator"], line["rank"], line["stream"], line["position"], after)
        for kind, peer, size in line["calls"]:
            key = (entry.communicator, kind if peer >= 0 else "", peer)
            entry.parts.append(_Part(kind, peer, size, counted[key]))
            counted[key] += 1
        yield entry


def _keys(entry):
    """By which others find it."""
    return [
        _key(entry.communicator, part.kind, entry.rank, part.peer, part.nth) for part in entry.parts
    ]


def _key(communicator, kind, rank, peer, nth):
    return (communicator, kind if peer >= 0 else "", rank, peer, nth)


def _partners(entry):
    for part in entry.parts:
        if part.peer >= 0:
            yield _key(entry.communicator, PARTNER[part.kind], part.peer, entry.rank, part.nth)
        else:
            for rank in members(entry.communicator):
                yield _key(entry.communicator, part.kind, rank, -1, part.nth)


def _unlike(known):
    """Partners that are something else, or of another size."""
    for key, entry in known.items():
        part = next(
            part
            for part in entry.parts
            if _key(entry.communicator, part.kind, entry.rank, part.peer, part.nth) == key
        )
        for partner in _partners_of(entry, part):
            other = known.get(partner)
            if other is None or other.rank < entry.rank:
                continue
            theirs = next(
                p
                for p in other.parts
                if _key(other.communicator, p.kind, other.rank, p.peer, p.nth) == partner
            )
            if part.peer < 0 and part.kind != theirs.kind:
                yield f"{entry} meets {other}"
            elif part.kind in SAME_BYTES and part.bytes != theirs.bytes:
                yield f"{entry} of {part.bytes} bytes meets {other} of {theirs.bytes} bytes"


def _partners_of(entry, part):
    alone = _Entry(entry.communicator, entry.rank, entry.stream, entry.position, {}, [part])
    return _partners(alone)


def _told(left, known, waits_for):
    for entry in left[:MOST_TOLD]:
        before = waits_for(entry) if not entry.begun else None
        if before is not None:
            yield f"{entry} waits for this rank's {str(before).split(': ', 1)[1]}"
            continue
        for key in _partners(entry):
            other = known.get(key)
            if other is None:
                yield f"{entry} waits for rank {key[2]}, which never calls {key[1] or entry.parts[0].kind} there"
            elif not other.begun:
                yield f"{entry} waits for {other}, which has not begun"
