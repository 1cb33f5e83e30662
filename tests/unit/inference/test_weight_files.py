"""Weight files give the same bytes through the page cache and past it. Errors name the file."""

import os
from pathlib import Path

import pytest
import torch

from plait.errors import CheckpointError
from plait.inference import weight_files
from plait.inference.weight_files import (
    MAX_BUFFERED_READ_BYTES,
    MAX_IMAGE_READ_BYTES,
    MIN_DIRECT_LAYER_BYTES,
    PAGE,
    FileImage,
    FileReader,
    StoredTensor,
    TensorPart,
    blocks_of,
)

HEADER_BYTES = 123
SIZES = (4097, 3 * MAX_BUFFERED_READ_BYTES + 11, 0, 1, 4096, MAX_BUFFERED_READ_BYTES, 200_000)
"""Bytes of consecutive tensors behind the header. A gap precedes the last."""
GAP_BYTES = 290_000


def zeros(size):
    return torch.zeros(size, dtype=torch.uint8)


def part_of(name, offset, memory):
    size = memory.numel()
    return TensorPart(StoredTensor(Path(name), offset, size, torch.uint8, (size,)), 0, memory)


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a file, and returns its reader, its tensors and its content."""
    readers = []

    def make_file(keeps):
        path = tmp_path / "weights"
        size = HEADER_BYTES + sum(SIZES) + GAP_BYTES
        content = torch.randint(0, 256, (size,), dtype=torch.uint8)
        path.write_bytes(content.numpy().tobytes())
        parts = []
        offset = HEADER_BYTES
        for size in SIZES[:-1]:
            parts.append(part_of(path, offset, zeros(size)))
            offset += size
        parts.append(part_of(path, offset + GAP_BYTES, zeros(SIZES[-1])))
        readers.append(FileReader([path], largest=MIN_DIRECT_LAYER_BYTES, keeps=keeps))
        return readers[-1], parts, content

    yield make_file
    for reader in readers:
        reader.close()


def drop_from_page_cache(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


@pytest.mark.parametrize("keeps", [False, True])
def test_bytes_through_the_page_cache_and_past_it(make, keeps, monkeypatch):
    reader, parts, content = make(keeps)
    path = parts[0].stored.path
    buffered_reads = []
    read_into = weight_files.read_into

    # Only buffered reads call this function: which path was taken shows nowhere else.
    def recorded(*arguments, **options):
        buffered_reads.append(1)
        return read_into(*arguments, **options)

    monkeypatch.setattr(weight_files, "read_into", recorded)
    used_cache = []
    for is_cold in (True, True, False):
        buffered_reads.clear()
        for part in parts:
            part.memory.zero_()
        if is_cold:
            drop_from_page_cache(path)
        reader.read(parts)
        for part in parts:
            assert torch.equal(part.memory, content[part.offset : part.end])
        used_cache.append(bool(buffered_reads))

    # A folder in memory has no disk to read from.
    if reader._files[path].direct is not None:
        # The first read uses the cache only if the bytes may stay there. The second one bypasses
        # it because they did not stay.
        assert used_cache[:2] == [keeps, False]


def test_reads_are_blocks_of_one_file():
    large = MAX_BUFFERED_READ_BYTES
    places = (("b", 5000, 10), ("a", 9000, large), ("a", 8, 16), ("a", 30 << 20, 8))
    blocks = list(blocks_of([part_of(name, offset, zeros(size)) for name, offset, size in places]))
    ranges = [(str(block.path), block.low, block.size) for block in blocks]
    assert ranges == [("a", 0, large), ("a", large, 9000), ("a", 30 << 20, 8), ("b", 4096, 914)]
    sizes = [[part.memory.numel() for part in block.parts] for block in blocks]
    assert sizes == [[16, large - 9000], [9000], [8], [10]]


def test_reads_into_an_image_are_large_and_even():
    size = 2 * MAX_IMAGE_READ_BYTES + 5 * PAGE
    memory = zeros(size)
    parts = [part_of("a", PAGE + low, memory[low:high]) for low, high in ((16, size), (0, 16))]
    blocks = list(blocks_of(parts, FileImage(PAGE, memory)))
    for block in blocks:
        assert block.low % PAGE == 0
    sizes = [block.size for block in blocks]
    assert len(sizes) == 3 and sum(sizes) == size and blocks[0].low == PAGE
    assert max(sizes) <= MAX_IMAGE_READ_BYTES and max(sizes) - min(sizes) <= 3 * PAGE


def test_errors_name_the_byte_and_return_the_buffers(make, monkeypatch):
    reader, parts, _ = make(False)
    path = parts[0].stored.path
    os.truncate(path, 5000)
    drop_from_page_cache(path)
    message = r"weights ends at byte 5,000, before the end of a tensor"
    with pytest.raises(CheckpointError, match=message):
        reader.read(parts)

    def failing_read(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing_read)
    with pytest.raises(CheckpointError, match="cannot be read at byte 123: Input/output error"):
        reader.read(parts)
    # A buffer that is not returned would make later reads wait for ever.
    assert reader._buffers.qsize() == weight_files.CONCURRENT_READS


@pytest.mark.parametrize("keeps", [False, True])
def test_a_file_that_is_written_to_is_refused(make, keeps):
    """A file that replaces the first one is another file, and changes nothing."""
    reader, parts, content = make(keeps)
    path = parts[0].stored.path
    original = path.rename(path.with_name("first"))
    path.write_bytes(b"other")
    reader.read(parts)
    assert torch.equal(parts[0].memory, content[parts[0].offset : parts[0].end])

    with open(original, "r+b") as file:
        file.seek(parts[-1].offset)
        file.write(b"1")
    # The kernel's clock may not have advanced since the file was made.
    os.utime(original, ns=(0, 1))
    message = f"^{path} was written to while layers were streamed .*; wait until it is complete"
    with pytest.raises(CheckpointError, match=message):
        reader.read(parts[:1])
