"""Whole documents in sequences of one length, each with positions of its own, so that attention
stays within it.

Transformers takes positions that begin anew within a row for several documents and masks attention
between them, where no cache is kept and no `attention_mask` is given. A document longer than a
sequence is cut into several.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from plait.data.packing import IGNORED, Array, Stream, place_tokens


@dataclass(frozen=True)
class Documents:
    """Sequences that hold as many documents as fit."""

    stream: Stream
    length: int
    padding: int
    """The token that fills what is left over; its labels are `IGNORED`."""

    @cached_property
    def _parts(self) -> tuple[Array, Array]:
        """First and last token of every document, those of long ones in parts. One of a single
        token has nothing to predict.
        """
        ends = np.asarray(self.stream.ends, dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
        counts = -(-(ends - begins) // self.length)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(begins, counts) + numbers * self.length
        last = np.minimum(first + self.length, np.repeat(ends, counts))
        kept = last - first >= 2
        return first[kept], last[kept]

    @cached_property
    def together(self) -> list[list[int]]:
        """The documents of each sequence, by best fit: the longest first, each where it leaves the
        least room.
        """
        first, last = self._parts
        return best_fit((last - first).tolist(), self.length)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.together)

    def take(self, numbers: Array) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` and `position_ids`, int64 [len(numbers), length]. A document's
        first token is predicted from nothing: its label is `IGNORED`. Number -1 gives a sequence of
        padding, scored nowhere.
        """
        shape = (len(numbers), self.length)
        ids = np.full(shape, self.padding, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        begins, ends = self._parts
        for row, number in enumerate(numbers):
            at = 0
            for part in self.together[number] if number >= 0 else ():
                count = place_tokens(
                    self.stream, int(begins[part]), int(ends[part]), ids[row, at:], labels[row, at:]
                )
                labels[row, at], positions[row, at : at + count] = IGNORED, np.arange(count)
                at += count
            positions[row, at:] = np.arange(self.length - at)
        return {
            name: torch.from_numpy(found)
            for name, found in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
        }


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Which of `lengths` go together in bins of `room`: positions, in the order in which they were
    put there.

    Best fit decreasing (Johnson, 1974): at most 11/9 of the fewest bins, and the same bins
    everywhere. Equal lengths keep their order.
    """
    bins: list[list[int]] = []
    left: dict[int, deque[int]] = defaultdict(deque)
    rooms: list[int] = []  # the keys of `left`, sorted
    for position in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        length = lengths[position]
        at = bisect_left(rooms, length)
        if at < len(rooms):
            free = rooms[at]
            number = left[free].popleft()
            if not left[free]:
                del left[free], rooms[at]
            bins[number].append(position)
        else:
            free = room
            number = len(bins)
            bins.append([position])
        rest = free - length
        if rest:
            if rest not in left:
                insort(rooms, rest)
            left[rest].append(number)
    return bins
