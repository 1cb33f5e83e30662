"""The content hash: equal however a tensor is cut, another one for every change."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
import torch

from plait.checkpoint import windows as content
from plait.checkpoint.windows import (
    ContentHash,
    TensorRecord,
    Window,
    overlap,
    record_of,
    slices_within,
    tensor_blocks,
    window_of,
)
from tests.parity.live_content import lanes_of, total

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
)


def noise(shape, dtype):
    """All bits at random."""
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8
    )
    return raw.view(dtype).reshape(shape)


def hashed(name, tensor, cuts):
    """As ranks would that hold the parts between the cuts, of every dimension at the same places."""
    found, record = ContentHash(), record_of(tensor)
    full = window_of(tensor)
    edges = [sorted({0, size, *(cut for cut in cuts if cut < size)}) for size in tensor.shape]
    windows = [
        tuple((a, b - a) for a, b in part) for part in product(*(pairwise(e) for e in edges))
    ]
    for window in windows or [full]:
        observe = found.observer(
            name, record, window, is_first=all(start == 0 for start, _ in window)
        )
        for piece in tensor_blocks(name, tensor[slices_within(window, full)]):
            observe(piece)
    return str(found)


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (3, 4, 5), (4, 1), (1, 9)])
def test_equal_however_it_is_cut(monkeypatch, shape):
    """In parts of ranks, and in pieces of a file, of every dtype; other code finds the same."""
    for dtype in DTYPES:
        tensor = noise(shape, dtype)
        wanted = total({"x": lanes_of("x", tensor)})
        for cuts in ([], [2], [1, 3]):
            assert hashed("x", tensor, cuts) == wanted, (dtype, cuts)
        with monkeypatch.context() as small:
            small.setattr(content, "_BLOCK_BYTES", 8)
            small.setattr(content, "_WORDS_AT_ONCE", 4)
            assert hashed("x", tensor, [3]) == wanted, dtype


def test_what_is_in_it():
    """Every bit, its place, the name, the shape and the dtype; a tensor of zeros counts, and one without elements."""
    chance = random.Random(3)
    tensor = noise((6, 5), torch.float32)
    seen = {hashed("x", tensor, [])}
    for _ in range(200):
        changed = tensor.clone().view(torch.int32)
        changed[chance.randrange(6), chance.randrange(5)] ^= (
            -(2**31) if (bit := chance.randrange(32)) == 31 else 1 << bit
        )
        assert hashed("x", changed.view(torch.float32), []) not in seen
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    others = [
        hashed("x", swapped, []),
        hashed("x", tensor.roll(1, 1), []),
        hashed("x", -tensor, []),
        hashed("y", tensor, []),
        hashed("x", tensor.reshape(5, 6), []),
        hashed("x", tensor.view(torch.int32), []),
        hashed("x", torch.zeros(6, 5), []),
        hashed("x", torch.zeros(0), []),
        str(ContentHash()),
    ]
    assert len({*others, *seen}) == len(others) + 1


def test_sums_of_ranks_add_up():
    tensor = noise((4, 4), torch.float32)
    record, halves = TensorRecord(dtype="float32", shape=(4, 4), cuts=(("tp", 1),)), ContentHash()
    for rank in range(2):
        at, one = {"tp": rank}, ContentHash()
        window: Window = record.window(at, {"tp": 2})
        observe = one.observer("x", record, window, is_first=record.begins_at(at))
        part = overlap(window, window_of(tensor))
        assert part is not None
        for piece in tensor_blocks("x", tensor[slices_within(part, window_of(tensor))]):
            observe(piece)
        halves.add(bytes(one))
    assert str(halves) == hashed("x", tensor, [])
