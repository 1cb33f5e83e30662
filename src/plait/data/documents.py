"""Sequences that hold several whole documents, with separate positions for each document.

Transformers masks the attention between the documents of a row if positions restart within it, no
KV cache is used and no `attention_mask` is passed. A document longer than a sequence is cut into
chunks, which are treated as documents.
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
    """Sequences that are filled with as many documents as fit."""

    stream: Stream
    length: int
    padding: int
    """Token that fills the remainder of a sequence; its labels are `IGNORED`."""

    @cached_property
    def _chunks(self) -> tuple[Array, Array]:
        """Stream positions of the first token of every chunk, and after its last token."""
        ends = np.asarray(self.stream.ends, dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]

        # Cut long documents: chunk i of a document starts i * length after the document.
        counts = -(-(ends - begins) // self.length)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(begins, counts) + numbers * self.length
        last = np.minimum(first + self.length, np.repeat(ends, counts))

        # A single token has no target.
        trainable = last - first >= 2
        return first[trainable], last[trainable]

    @cached_property
    def _sequences(self) -> list[list[int]]:
        """Numbers of the chunks in each sequence."""
        first, last = self._chunks
        return best_fit((last - first).tolist(), self.length)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._sequences)

    def take(self, numbers: Array) -> dict[str, torch.Tensor]:
        """Return the batch of some sequences.

        Args:
            numbers: Numbers of the sequences. -1 gives a sequence of padding without targets.

        Returns:
            `input_ids`, `labels` and `position_ids`, each int64 [len(numbers), length]. The
            label of the first token of a document is `IGNORED`, because no token precedes it.
        """
        shape = (len(numbers), self.length)
        ids = np.full(shape, self.padding, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        begins, ends = self._chunks
        for row, number in enumerate(numbers):
            column = 0
            for chunk in self._sequences[number] if number >= 0 else ():
                count = place_tokens(
                    self.stream,
                    int(begins[chunk]),
                    int(ends[chunk]),
                    ids[row, column:],
                    labels[row, column:],
                )
                labels[row, column] = IGNORED
                positions[row, column : column + count] = np.arange(count)
                column += count
            # Positions restart, so that the padding is masked like one more document.
            positions[row, column:] = np.arange(self.length - column)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack items into bins of equal capacity by best fit decreasing.

    The longest items come first, and each goes to the bin that it leaves the least space in. This
    takes at most 11/9 of the fewest possible bins (Johnson, 1974). The result is deterministic:
    equal lengths keep their order.

    Args:
        lengths: Lengths of the items, at most `capacity` each.
        capacity: Length of a bin.

    Returns:
        Indices of the items in each bin, in the order in which they were added.
    """
    bins: list[list[int]] = []
    bins_by_space: dict[int, deque[int]] = defaultdict(deque)
    # The keys of `bins_by_space`, sorted for the binary search.
    spaces: list[int] = []

    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[item]
        slot = bisect_left(spaces, length)
        if slot < len(spaces):
            space = spaces[slot]
            number = bins_by_space[space].popleft()
            if not bins_by_space[space]:
                del bins_by_space[space]
                del spaces[slot]
            bins[number].append(item)
        else:
            space = capacity
            number = len(bins)
            bins.append([item])

        remaining = space - length
        if remaining:
            if remaining not in bins_by_space:
                insort(spaces, remaining)
            bins_by_space[remaining].append(number)
    return bins
