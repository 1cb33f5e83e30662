"""Replays the calls of all communicators in NCCL's order, and names calls that would never end.

gloo matches messages in any order, and buffers messages that nobody receives yet. NCCL does not. A
communicator is one stream, so a call begins when the call before it is done. A call also waits for
work on other communicators that its stream or the host had waited for. It is done when its partners
on all other ranks have begun. Calls of one group (`batch_isend_irecv`) are one call. A call that
never begins is part of a deadlock or has no partner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

MOST_LINES = 8
SAME_BYTES = ("ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "SEND", "RECV")
PARTNER = {"SEND": "RECV", "RECV": "SEND"}


@dataclass
class _Part:
    """A call of an entry. `number` counts calls of its kind with this peer and communicator."""

    kind: str
    peer: int
    bytes: int
    number: int


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
        calls = []
        for part in self.parts:
            text = part.kind
            if part.peer >= 0:
                direction = "to" if part.kind == "SEND" else "from"
                text += f" {direction} rank {part.peer} (number {part.number + 1})"
            calls.append(text)
        text = calls[0]
        if len(calls) > 1:
            text = f"the group of {', '.join(calls[:4])}"
        if len(calls) > 4:
            text += ", ..."
        return f"rank {self.rank}: {text} on communicator {self.communicator}"


def members(communicator):
    """Return the ranks of a communicator, with which its name ends."""
    return [int(rank) for rank in communicator.split("[")[1].split("]")[0].split()]


def stuck(journals):
    """Return a message about calls that would not end, or an empty text. `journals` is by rank."""
    entries = [list(_entries(journal)) for journal in journals]
    known = {}
    for rank_entries in entries:
        for entry in rank_entries:
            known.update(dict.fromkeys(_keys(entry), entry))
    mismatches = list(_mismatches(known))
    if mismatches:
        return "\n".join(mismatches[:MOST_LINES])

    streams = [defaultdict(list) for _ in entries]
    for rank_entries, by_stream in zip(entries, streams, strict=True):
        for entry in rank_entries:
            by_stream[entry.stream].append(entry)
    at = [dict.fromkeys(by_stream, 0) for by_stream in streams]

    def head(rank, stream):
        """Return the first call of a stream that is not done."""
        queue = streams[rank].get(stream, [])
        position = at[rank].get(stream, 0)
        return queue[position] if position < len(queue) else None

    def waits_for(entry):
        """Return the work of its rank that a call waits for."""
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
                    partners = [known.get(key) for key in _partners(entry)]
                    if not entry.begun or any(x is None or not x.begun for x in partners):
                        break
                    at[rank][stream] += 1
                    entry.done = moved = True
                    entry = head(rank, stream)
    heads = [head(rank, stream) for rank, by_stream in enumerate(streams) for stream in by_stream]
    waiting = [entry for entry in heads if entry is not None]
    return "\n".join(_reasons(waiting, known, waits_for))


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
    """Return the keys by which partners find an entry."""
    return [_key_of(entry, part) for part in entry.parts]


def _key_of(entry, part):
    return _key(entry.communicator, part.kind, entry.rank, part.peer, part.number)


def _key(communicator, kind, rank, peer, number):
    return (communicator, kind if peer >= 0 else "", rank, peer, number)


def _partners(entry):
    for part in entry.parts:
        yield from _partners_of(entry, part)


def _mismatches(known):
    """Yield partners that are another call or have another size."""
    for key, entry in known.items():
        part = next(part for part in entry.parts if _key_of(entry, part) == key)
        for partner in _partners_of(entry, part):
            other = known.get(partner)
            if other is None or other.rank < entry.rank:
                continue
            theirs = next(part for part in other.parts if _key_of(other, part) == partner)
            if part.peer < 0 and part.kind != theirs.kind:
                yield f"{entry} meets {other}"
            elif part.kind in SAME_BYTES and part.bytes != theirs.bytes:
                yield f"{entry} of {part.bytes} bytes meets {other} of {theirs.bytes} bytes"


def _partners_of(entry, part):
    if part.peer >= 0:
        yield _key(entry.communicator, PARTNER[part.kind], part.peer, entry.rank, part.number)
        return
    for rank in members(entry.communicator):
        yield _key(entry.communicator, part.kind, rank, -1, part.number)


def _reasons(waiting, known, waits_for):
    """Yield what each of the first calls waits for."""
    for entry in waiting[:MOST_LINES]:
        before = waits_for(entry) if not entry.begun else None
        if before is not None:
            yield f"{entry} waits for this rank's {str(before).split(': ', 1)[1]}"
            continue
        for key in _partners(entry):
            other = known.get(key)
            if other is None:
                call = key[1] or entry.parts[0].kind
                yield f"{entry} waits for rank {key[2]}, which never calls {call} there"
            elif not other.begun:
                yield f"{entry} waits for {other}, which has not begun"
