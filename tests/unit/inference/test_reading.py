"""Bytes of files are the same whether they come from the kernel's cache or past it, and what is wrong with a file is named."""

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

SIZES = (4097, 3 * MAX_BUFFERED_READ_BYTES + 11, 0, 1, 4096, MAX_BUFFERED_READ_BYTES, 200_000)
"""Bytes of consecutive tensors behind a header of 123 bytes. A gap precedes the last."""


def part_of(name, offset, memory):
    size = memory.numel()
    return TensorPart(StoredTensor(Path(name), offset, size, torch.uint8, (size,)), 0, memory)


def zeros(size):
    return torch.zeros(size, dtype=torch.uint8)


@pytest.fixture
def make(tmp_path):
    readers = []

    def made(keeps):
        path = tmp_path / "weights"
        content = torch.randint(0, 256, (123 + sum(SIZES) + 300_000,), dtype=torch.uint8)
        path.write_bytes(content.numpy().tobytes())
        parts, at = [], 123
        for number, size in enumerate(SIZES):
            at += 290_000 * (number == len(SIZES) - 1)
            parts.append(part_of(path, at, zeros(size)))
            at += size
        readers.append(FileReader([path], largest=MIN_DIRECT_LAYER_BYTES, keeps=keeps))
        return readers[-1], parts, content

    yield made
    for reader in readers:
        reader.close()


def dropped(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_same_bytes_from_the_cache_and_past_it(make, keeps, monkeypatch):
    reader, parts, content = make(keeps)
    path, used, through = parts[0].stored.path, [], []
    read = weight_files.read_into

    def recorded(*arguments, **options):
        through.append(1)
        return read(*arguments, **options)

    monkeypatch.setattr(weight_files, "read_into", recorded)
    for is_cold in (True, True, False):
        through.clear()
        for part in parts:
            part.memory.zero_()
        if is_cold:
            dropped(path)
        reader.read(parts)
        for part in parts:
            assert torch.equal(part.memory, content[part.offset : part.end])
        used.append(bool(through))
    if reader._files[path].direct is not None:  # a folder in memory has no disk to read from
        # The first read uses the cache only where the bytes may stay. The second read bypasses it where they did not stay.
        assert used[:2] == [keeps, False]


def test_reads_are_blocks_of_one_file():
    large = MAX_BUFFERED_READ_BYTES
    places = (("b", 5000, 10), ("a", 9000, large), ("a", 8, 16), ("a", 30 << 20, 8))
    found = list(blocks_of([part_of(name, offset, zeros(size)) for name, offset, size in places]))
    blocks = [(str(block.path), block.low, block.size) for block in found]
    assert blocks == [("a", 0, large), ("a", large, 9000), ("a", 30 << 20, 8), ("b", 4096, 914)]
    sizes = [[one.memory.numel() for one in block.parts] for block in found]
    assert sizes == [[16, large - 9000], [9000], [8], [10]]


def test_reads_into_an_image_are_large_and_even():
    size = 2 * MAX_IMAGE_READ_BYTES + 5 * PAGE
    memory = zeros(size)
    parts = [part_of("a", PAGE + at, memory[at:end]) for at, end in ((16, size), (0, 16))]
    found = list(blocks_of(parts, FileImage(PAGE, memory)))
    assert len(found) == 3 and sum(block.size for block in found) == size and found[0].low == PAGE
    assert all(block.low % PAGE == 0 and block.size <= MAX_IMAGE_READ_BYTES for block in found)
    assert max(block.size for block in found) - min(block.size for block in found) <= 3 * PAGE


def test_a_file_that_ends_early_and_a_disk_that_fails(make, monkeypatch):
    reader, parts, _ = make(False)
    path = parts[0].stored.path
    os.truncate(path, 5000)
    dropped(path)
    words = r"weights ends at byte 5,000, before the end of a tensor"
    with pytest.raises(CheckpointError, match=words):
        reader.read(parts)

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match="cannot be read at byte 123: Input/output error"):
        reader.read(parts)
    assert reader._buffers.qsize() == weight_files.CONCURRENT_READS


@pytest.mark.parametrize("keeps", [False, True])
def test_a_file_that_is_written_to(make, keeps):
    """Nothing is computed from changed bytes. A file that replaces the first one is another file."""
    reader, parts, content = make(keeps)
    path = parts[0].stored.path
    other = path.with_name("other")
    other.write_bytes(b"other")
    path.rename(path.with_name("first"))
    other.rename(path)
    reader.read(parts)
    assert torch.equal(parts[0].memory, content[parts[0].offset : parts[0].end])
    with open(path.with_name("first"), "r+b") as file:
        file.seek(parts[-1].offset)
        file.write(b"1")
    # The kernel's clock may not have advanced since the file was made.
    os.utime(path.with_name("first"), ns=(0, 1))
    words = f"^{path} was written to while layers were streamed .*; wait until it is complete"
    with pytest.raises(CheckpointError, match=words):
        reader.read(parts[:1])
