"""Which piece of which tensor goes from which rank to which: computed by every rank from what all of them hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from plait.checkpoint.windows import TensorRecord, Window, overlap
from plait.errors import InputError
from plait.inference.weight_sync.holdings import Held, Holding

PIECE = 4 << 20
"""Bytes of a message at most: a few of them are in flight at a time, and are hashed while a core has them in its cache."""


@dataclass(frozen=True)
class Piece:
    """A part of one tensor, from one rank to one rank."""

    name: str
    record: TensorRecord
    """As the target has it."""
    window: Window
    source: int
    """Rank among those that have the weights."""
    target: int
    """Rank among those that get them."""
    is_counted: bool
    """Whether it is part of the content hash, in which every element is once, however many ranks get it."""

    @cached_property
    def size(self) -> int:
        """Bytes on their way."""
        return _bytes(self.window, self.record)


def pieces_of(
    sources: Sequence[Holding], targets: Sequence[Holding], *, same_ranks: bool, mine: Collection[tuple[str, int]]
) -> list[Piece]:
    """Those that a rank has a part in, in an order that all ranks share. `mine`: ("source", its rank there) and ("target", its rank
    there). `same_ranks`: source 0 and target 0 are one process, and so on. Raises InputError where the models differ."""
    have, want = _merged(sources), _merged(targets)
    _compare(have, want)
    skipped = _tied(have) & _tied(want)
    found = []
    for name, there in want.items():
        if name in skipped:
            continue
        held = next(iter(there.values()))
        record = TensorRecord(dtype=held.dtype, shape=held.shape)
        holders = _by_window(have[name])
        given = {window for window, ranks in holders.items() if any(("source", rank) in mine for rank in ranks)}
        for window, ranks in _by_window(there).items():
            is_given = any(overlap(one, window) is not None for one in given)
            for rank in ranks:
                if not is_given and ("target", rank) not in mine:
                    continue  # of a thousand ranks only few concern this one
                for part, source in _parts(name, window, holders, rank if same_ranks else None, rank):
                    if not {("source", source), ("target", rank)}.isdisjoint(mine):
                        found += [Piece(name, record, one, source, rank, rank == ranks[0]) for one in _cut(part, record)]
    return found


def _merged(holdings: Sequence[Holding]) -> dict[str, dict[int, Held]]:
    """By name, what every rank holds that holds some of it."""
    found: dict[str, dict[int, Held]] = {}
    for rank, holding in enumerate(holdings):
        for name, held in holding.items():
            found.setdefault(name, {})[rank] = held
    return found


def _compare(have: Mapping[str, Mapping[int, Held]], want: Mapping[str, Mapping[int, Held]]) -> None:
    lacking, extra = [name for name in want if name not in have], [name for name in have if name not in want]
    if lacking or extra:
        raise InputError(
            f"the models differ: the source lacks {len(lacking)} tensors of the target ({', '.join(lacking[:3]) or 'none'}) and has "
            f"{len(extra)} that the target lacks ({', '.join(extra[:3]) or 'none'}); build both from one configuration"
        )
    for name, there in want.items():
        shape, other = next(iter(have[name].values())).shape, next(iter(there.values())).shape
        if shape != other:
            raise InputError(f"the models differ: {name} has shape {shape} in the source and {other} in the target")


def _tied(merged: Mapping[str, Mapping[int, Held]]) -> set[str]:
    """Names that are, on every rank that holds them, another name of a tensor that is there too."""
    return {name for name, there in merged.items() if all(held.same_as for held in there.values())}


def _by_window(there: Mapping[int, Held]) -> dict[Window, list[int]]:
    found: dict[Window, list[int]] = {}
    for rank, held in there.items():
        if all(size for _, size in held.window):
            found.setdefault(held.window, []).append(rank)
    return found


def _parts(name: str, wanted: Window, holders: Mapping[Window, list[int]], own: int | None, turn: int) -> Iterator[tuple[Window, int]]:
    """(part of `wanted`, who brings it): the rank itself where it can, else replicas in turn."""
    missing = _elements(wanted)
    for held, ranks in holders.items():
        part = overlap(held, wanted)
        if part is not None:
            missing -= _elements(part)
            yield part, own if own in ranks else ranks[turn % len(ranks)]
    if missing:
        raise InputError(
            f"{name}: the ranks of the source hold {_elements(wanted) - missing} of {_elements(wanted)} elements that are needed"
        )


def _cut(window: Window, record: TensorRecord) -> Iterator[Window]:
    """Into parts of at most PIECE bytes, along the outermost dimension that has something to cut."""
    if _bytes(window, record) <= PIECE:
        yield window
        return
    dim = next(at for at, (_, size) in enumerate(window) if size > 1)
    start, size = window[dim]
    step = max(1, PIECE * size // _bytes(window, record))
    for at in range(start, start + size, step):
        yield from _cut((*window[:dim], (at, min(step, start + size - at)), *window[dim + 1 :]), record)


def _elements(window: Window) -> int:
    return prod(size for _, size in window)


def _bytes(window: Window, record: TensorRecord) -> int:
    dtype: torch.dtype = getattr(torch, record.dtype)
    return _elements(window) * dtype.itemsize
