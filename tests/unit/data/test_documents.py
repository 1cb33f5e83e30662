"""Complete documents in rows: every token once, and positions and targets per document."""

from itertools import chain, combinations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data.packing import IGNORED, Documents, Stream, best_fit

PADDING = 9_999


def stream_of(lengths, *, scored=None):
    """Return a stream with the tokens 1, 2, 3, ..."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    marks = None if scored is None else np.array(scored, dtype=np.uint8)
    return Stream(tokens, np.cumsum(lengths, dtype=np.uint64), marks)


def test_rows():
    batch = Documents(stream_of([3, 5, 2]), 6, PADDING).take(np.array([0, 1, -1]))
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
    assert {entry.dtype for entry in batch.values()} == {torch.int64}


def test_unscored_tokens_are_inputs_and_no_targets():
    batch = Documents(stream_of([4], scored=[0, 0, 1, 1]), 4, PADDING).take(np.array([0]))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 3, 4]]


def parts_of(batch, room):
    """Yield the tokens of each document in the rows, and check its labels and positions."""
    entries = (batch[name].tolist() for name in ("input_ids", "labels", "position_ids"))
    for ids, labels, positions in zip(*entries, strict=True):
        starts = [index for index in range(room) if positions[index] == 0]
        for start, end in zip(starts, [*starts[1:], room], strict=True):
            tokens = [token for token in ids[start:end] if token != PADDING]
            assert positions[start:end] == list(range(end - start))
            if tokens:
                assert labels[start : start + len(tokens)] == [IGNORED, *tokens[1:]]
                yield tokens


@given(st.lists(st.integers(1, 25), max_size=40), st.integers(2, 12))
def test_every_document_appears_once(lengths, room):
    """Parts of a single token, which predict nothing, are omitted."""
    documents = Documents(stream_of(lengths), room, PADDING)
    batch = documents.take(np.arange(len(documents)))
    expected = []
    start = 1
    for length in lengths:
        for offset in range(0, length, room):
            size = min(room, length - offset)
            if size >= 2:
                expected.append(list(range(start + offset, start + offset + size)))
        start += length
    assert sorted(parts_of(batch, room)) == sorted(expected)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_fills_rows(lengths):
    bins = best_fit(lengths, 20)
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))
    sizes = [sum(lengths[position] for position in positions) for positions in bins]
    assert all(size <= 20 for size in sizes)
    # A row is opened for what fits into no other row, so no two rows fit into one.
    assert all(first + second > 20 for first, second in combinations(sizes, 2))
    assert best_fit(lengths, 20) == bins


def test_a_stream_that_is_split_inside_a_document():
    stream = stream_of([3, 4], scored=[1, 0, 1, 1, 0, 0, 1])
    before, after = stream.split(5)
    for part, tokens, ends, scored in (
        (before, [1, 2, 3, 4, 5], [3, 5], [1, 0, 1, 1, 0]),
        (after, [6, 7], [2], [0, 1]),
    ):
        assert part.tokens.tolist() == tokens
        assert part.ends.tolist() == ends
        assert part.scored.tolist() == scored
    empty, complete = stream.split(0)
    assert len(empty) == 0
    assert empty.ends.tolist() == []
    assert complete.ends.tolist() == [3, 7]
