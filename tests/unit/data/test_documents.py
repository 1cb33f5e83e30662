"""Whole documents in rows: each token once, positions and targets of each document alone, and few rows."""

from itertools import combinations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data.packing import IGNORED, Documents, Stream, best_fit

PADDING = 9_999


def documents(lengths, room, *, scored=None):
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    marks = None if scored is None else np.array(scored, dtype=np.uint8)
    return Documents(Stream(tokens, np.cumsum(lengths, dtype=np.uint64), marks), room, PADDING)


def test_a_row():
    batch = documents([3, 5, 2], 6).take(np.array([0, 1, -1]))
    assert batch["input_ids"].tolist() == [
        [4, 5, 6, 7, 8, PADDING],
        [1, 2, 3, 9, 10, PADDING],
        [PADDING] * 6,
    ]
    assert batch["labels"].tolist() == [
        [IGNORED, 5, 6, 7, 8, IGNORED],
        [IGNORED, 2, 3, IGNORED, 10, IGNORED],
        [IGNORED] * 6,
    ]
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 0],
        [0, 1, 2, 0, 1, 0],
        [0, 1, 2, 3, 4, 5],
    ]
    assert all(entry.dtype == torch.int64 for entry in batch.values())


def test_what_is_not_scored_is_seen_and_not_predicted():
    batch = documents([4], 4, scored=[0, 0, 1, 1]).take(np.array([0]))
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == (
        [[1, 2, 3, 4]],
        [[IGNORED, IGNORED, 3, 4]],
    )


@given(st.lists(st.integers(1, 25), max_size=40), st.integers(2, 12))
def test_every_document_is_there_once(lengths, room):
    """But for parts of a single token, which predict nothing."""
    made = documents(lengths, room)
    batch = made.take(np.arange(len(made)))
    found = []
    for ids, labels, positions in zip(
        *(batch[name].tolist() for name in ("input_ids", "labels", "position_ids")), strict=True
    ):
        starts = [at for at, position in enumerate(positions) if position == 0]
        for first, last in zip(starts, [*starts[1:], room], strict=True):
            part = [token for token in ids[first:last] if token != PADDING]
            assert positions[first:last] == list(range(last - first))
            assert labels[first : first + len(part)] == [IGNORED, *part[1:]][: len(part)]
            found += [part] if part else []
    wanted, at = [], 1
    for length in lengths:
        tokens = list(range(at, at + length))
        wanted += [
            part
            for first in range(0, length, room)
            if len(part := tokens[first : first + room]) >= 2
        ]
        at += length
    assert sorted(found) == sorted(wanted)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_fills_rows(lengths):
    bins = best_fit(lengths, 20)
    assert sorted(position for one in bins for position in one) == list(range(len(lengths)))
    assert all(sum(lengths[position] for position in one) <= 20 for one in bins)
    filled = [sum(lengths[position] for position in one) for one in bins]
    # A row is opened for what fits no other, so no two rows fit into one.
    assert all(one + other > 20 for one, other in combinations(filled, 2))
    assert best_fit(lengths, 20) == bins


def test_a_stream_that_is_parted_inside_of_a_document():
    made = documents([3, 4], 8, scored=[1, 0, 1, 1, 0, 0, 1])
    before, after = made.stream.split(5)
    assert (before.tokens.tolist(), before.ends.tolist()) == ([1, 2, 3, 4, 5], [3, 5])
    assert (after.tokens.tolist(), after.ends.tolist()) == ([6, 7], [2])
    assert before.scored is not None and after.scored is not None
    assert (before.scored.tolist(), after.scored.tolist()) == ([1, 0, 1, 1, 0], [0, 1])
    nothing, everything = made.stream.split(0)
    assert (len(nothing), nothing.ends.tolist(), everything.ends.tolist()) == (0, [], [3, 7])
