"""A shard file can be read by the safetensors library, and every damage is found and named."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from plait.checkpoint.format import ShardReader, verify_shards, write_shards
from plait.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.b": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    "columns": torch.arange(8.0).reshape(2, 4).t().half(),
    "bits": torch.tensor([True, False]),
    "eight": torch.arange(5, dtype=torch.uint8),
}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "00000.safetensors"
    return path, write_shards(path, TENSORS)


def test_the_safetensors_library_reads_it(written):
    path, manifest = written
    tensors = load_file(path)
    assert set(tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        assert tensors[name].dtype == expected.dtype and torch.equal(tensors[name], expected), name
    assert path.stat().st_size == manifest.size
    verify_shards(path, manifest)


def test_every_flipped_bit_is_found(written):
    path, manifest = written
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        message = "its header was changed"
        for name, entry in manifest.entries.items():
            if entry.offset <= position < entry.offset + entry.size:
                message = f"{name} was changed"
        with pytest.raises(CheckpointError, match=message):
            verify_shards(path, manifest)


@pytest.mark.parametrize("end", [0, 7, 100, -1])
def test_a_truncated_or_missing_file_is_refused(written, end):
    path, manifest = written
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(CheckpointError, match="bytes, but .* were written"):
        verify_shards(path, manifest)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing or not a file"):
        verify_shards(path, manifest)


def test_an_unsupported_dtype_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"x is a Tensor of torch.complex64"):
        write_shards(tmp_path / "x", {"x": torch.zeros(2, dtype=torch.complex64)})
    assert not (tmp_path / "x").exists()


def test_large_tensors_are_written_in_chunks(tmp_path):
    tensor = torch.arange(9 << 20, dtype=torch.int32)
    manifest = write_shards(tmp_path / "x", {"x": tensor, "y": torch.ones(1)})
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert torch.equal(file.get_tensor("x"), tensor)
    verify_shards(tmp_path / "x", manifest)


def test_a_header_with_other_offsets_is_refused(written):
    """Hashes cover the offsets in the manifest, and the library reads those in the header."""
    path, manifest = written
    with ShardReader(path, manifest) as reader:
        assert torch.equal(reader.read("a"), TENSORS["a"])
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["a"]["data_offsets"] = [8, 32]
    header["a.b"]["data_offsets"] = [0, 8]
    changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(data[:8] + changed + data[8 + length :])
    with pytest.raises(CheckpointError, match="give a different positions in the file"):
        ShardReader(path, manifest).__enter__()
