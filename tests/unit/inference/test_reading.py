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
"""Bytes of tensors that lie one after another, behind a header of 123 bytes; the last behind a gap."""
Made = tuple[FileReader, list[TensorPart], torch.Tensor]


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
            parts.append(
                TensorPart(
                    StoredTensor(path, at, size, torch.uint8, (size,)),
                    0,
                    torch.zeros(size, dtype=torch.uint8),
                )
            )
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
    path, through = parts[0].stored.path, []
    read = weight_files.read_into
    monkeypatch.setattr(
        weight_files,
        "read_into",
        lambda *given, **options: (through.append(1), read(*given, **options)),
    )
    used = []
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
        # Read for the first time through the cache only where it may stay; read again past it where it did not.
        assert used[:2] == [keeps, False]


def test_reads_are_blocks_of_one_file():
    def part(name, offset, size):
        return TensorPart(
            StoredTensor(Path(name), offset, size, torch.uint8, (size,)),
            0,
            torch.empty(size, dtype=torch.uint8),
        )

    found = list(
        blocks_of(
            [
                part("b", 5000, 10),
                part("a", 9000, MAX_BUFFERED_READ_BYTES),
                part("a", 8, 16),
                part("a", 30 << 20, 8),
            ]
        )
    )
    assert [(str(block.path), block.low, block.size) for block in found] == [
        ("a", 0, MAX_BUFFERED_READ_BYTES), ("a", MAX_BUFFERED_READ_BYTES, 9000), ("a", 30 << 20, 8), ("b", 4096, 914),
    ]  # fmt: skip
    assert [[one.memory.numel() for one in block.parts] for block in found] == [
        [16, MAX_BUFFERED_READ_BYTES - 9000],
        [9000],
        [8],
        [10],
    ]


def test_reads_into_an_image_are_large_and_even():
    size = 2 * MAX_IMAGE_READ_BYTES + 5 * PAGE
    memory = torch.empty(size, dtype=torch.uint8)
    parts = [
        TensorPart(
            StoredTensor(Path("a"), PAGE + at, count, torch.uint8, (count,)),
            0,
            memory[at : at + count],
        )
        for at, count in ((16, size - 16), (0, 16))
    ]
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
    """Of other bytes nothing computes; a file that replaces it is another one."""
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
    os.utime(
        path.with_name("first"), ns=(0, 1)
    )  # the kernel's clock may not have gone on since it was made
    words = f"^{path} was written to while layers were streamed .*; wait until it is complete"
    with pytest.raises(CheckpointError, match=words):
        reader.read(parts[:1])
