"""The content hash is equal however a tensor is cut, and another one after every change."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
import torch

from plait.checkpoint import windows as content
from plait.checkpoint.windows import (
    ContentHash,
    TensorRecord,
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


def random_bits(shape, dtype):
    limit = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, limit, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def add_window(content_hash, name, tensor, record, window, *, is_first):
    """Add the window of a tensor to a hash, as the rank that holds it does."""
    observe = content_hash.observer(name, record, window, is_first=is_first)
    for block in tensor_blocks(name, tensor[slices_within(window, window_of(tensor))]):
        observe(block)


def hash_of(name, tensor, cuts=()):
    """Return the hash of a tensor that ranks hold in windows, cut alike in all dimensions."""
    content_hash = ContentHash()
    ranges = []
    for size in tensor.shape:
        edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
        ranges.append([(start, end - start) for start, end in pairwise(edges)])
    for window in list(product(*ranges)) or [window_of(tensor)]:
        is_first = all(start == 0 for start, _ in window)
        add_window(content_hash, name, tensor, record_of(tensor), window, is_first=is_first)
    return str(content_hash)


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (3, 4, 5), (4, 1), (1, 9)])
def test_the_hash_is_equal_however_a_tensor_is_cut(monkeypatch, shape):
    """Cuts are windows of ranks and blocks of a file. The reference is other code."""
    for dtype in DTYPES:
        tensor = random_bits(shape, dtype)
        expected = total({"x": lanes_of("x", tensor)})
        for cuts in ([], [2], [1, 3]):
            assert hash_of("x", tensor, cuts) == expected, (dtype, cuts)
        with monkeypatch.context() as small_blocks:
            small_blocks.setattr(content, "_BLOCK_BYTES", 8)
            small_blocks.setattr(content, "_WORDS_AT_ONCE", 4)
            assert hash_of("x", tensor, [3]) == expected, dtype


def test_every_bit_place_name_shape_and_dtype_count():
    generator = random.Random(3)
    tensor = random_bits((6, 5), torch.float32)
    original = hash_of("x", tensor)
    for _ in range(200):
        changed = tensor.clone().view(torch.uint8)
        row = changed[generator.randrange(6)]
        row[generator.randrange(20)] ^= 1 << generator.randrange(8)
        assert hash_of("x", changed.view(torch.float32)) != original

    others = [
        hash_of("x", tensor[[1, 0, 2, 3, 4, 5]]),
        hash_of("x", tensor.roll(1, 1)),
        hash_of("x", -tensor),
        hash_of("y", tensor),
        hash_of("x", tensor.reshape(5, 6)),
        hash_of("x", tensor.view(torch.int32)),
        hash_of("x", torch.zeros(6, 5)),
        hash_of("x", torch.zeros(0)),
        str(ContentHash()),
    ]
    assert len({original, *others}) == len(others) + 1


def test_hashes_of_ranks_add_up():
    tensor = random_bits((4, 4), torch.float32)
    record = TensorRecord(dtype="float32", shape=(4, 4), cuts=(("tp", 1),))
    total_hash = ContentHash()
    for rank in range(2):
        coordinates = {"tp": rank}
        window = record.window(coordinates, {"tp": 2})
        rank_hash = ContentHash()
        is_first = record.begins_at(coordinates)
        add_window(rank_hash, "x", tensor, record, window, is_first=is_first)
        total_hash.add(bytes(rank_hash))
    assert str(total_hash) == hash_of("x", tensor)
