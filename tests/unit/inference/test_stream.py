"""Blocks whose weights are streamed from files compute the same bits within a budget.

Errors of a file name it.
"""

import copy
import time
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from plait.errors import CheckpointError, InputError
from plait.inference import weight_files, weight_stream
from plait.inference.streamed_model import plan_streaming
from plait.inference.weight_files import FileReader, stored_tensors
from plait.inference.weight_stream import WeightStream


class Chain(nn.Module):
    """Five blocks, which a forward runs in the order of `order`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8, bias=False))
            for _ in range(5)
        )
        self.order = list(range(5))

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


def elements(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture
def saved(tmp_path):
    """A model in memory, and its file."""
    torch.manual_seed(0)
    model = Chain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"


@pytest.fixture
def streamed(saved):
    """A copy of the model with three streamed blocks, and its stream."""
    reference, file = saved
    model = copy.deepcopy(reference).requires_grad_(False)
    stream = WeightStream(model, ["layers.0", "layers.2", "layers.4"], stored_tensors(file))
    yield model, stream
    stream.close()


@torch.no_grad()
def test_the_same_bits_pass_after_pass(saved, streamed):
    reference, _ = saved
    model, stream = streamed
    block_bytes = 4 * (8 * 24 + 24 + 8 * 24)
    assert elements(model.layers[2]) == 0
    assert model.layers[1][0].weight.numel() == 8 * 24
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        assert torch.equal(model(x), reference(x))
        # Weights are dropped after each pass.
        assert [elements(model.layers[index]) for index in (0, 2, 4)] == [0, 0, 0]
    assert block_bytes <= stream.slot_bytes <= block_bytes + 3 * 64


def stored_at_shift(path, model, shift):
    """Save a model so that its tensors start `shift` bytes after a multiple of 16."""
    # The header is padded to a multiple of 8 bytes.
    for padding in range(0, 64, 8):
        save_file(model.state_dict(), path, metadata={"": "x" * padding})
        stored = stored_tensors(path)
        if all(tensor.offset % 16 == shift for tensor in stored.values()):
            return stored
    raise AssertionError("no header of this length")


@pytest.mark.parametrize("shift", [0, 8])
@torch.no_grad()
def test_large_layers_that_bypass_the_page_cache(tmp_path, shift, monkeypatch):
    """Tensors stay as in the file if that keeps the bits of a product of one row.

    They are copied to aligned memory otherwise.
    """
    torch.manual_seed(0)
    layers = ((nn.Linear(1030, 3100), nn.Linear(3100, 1030, bias=False)) for _ in range(3))
    reference = nn.ModuleList(nn.Sequential(*pair) for pair in layers).requires_grad_(False)
    path = tmp_path / "model.safetensors"
    stored = stored_at_shift(path, reference, shift)
    model = copy.deepcopy(reference)
    stream = WeightStream(model, ["0", "1", "2"], stored)
    reads_into_image = []
    read_pages = weight_files._read_pages

    def recorded(file, block, view):
        reads_into_image.append(block.image is not None)
        return read_pages(file, block, view)

    # The file was just written, so without these all reads would come from the page cache.
    monkeypatch.setattr(weight_files, "_read_pages", recorded)
    monkeypatch.setattr(stream._files, "_keeps", False)
    monkeypatch.setattr(weight_files._OpenFile, "has_in_cache", lambda *_: False)
    for step in range(3):
        actual = expected = torch.randn(1, 1030, generator=torch.Generator().manual_seed(step))
        for layer, streamed_layer in zip(reference, model, strict=True):
            expected = layer(expected)
            actual = streamed_layer(actual)
        assert torch.equal(actual, expected)

    # A folder in memory has no disk to read from.
    if stream._files._files[path].direct is not None:
        assert set(reads_into_image) == {shift == 0}
    stream.close()


@torch.no_grad()
def test_another_order_and_a_failed_forward(saved, streamed):
    reference, _ = saved
    model, _ = streamed
    x = torch.randn(2, 8)
    for order in ([4, 2, 0], [2, 2], [0, 1, 2, 3, 4], [4]):
        model.order = reference.order = order
        assert torch.equal(model(x), reference(x)), order
    model.order = reference.order = [0, 1, 2]
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(2, 9))
    assert torch.equal(model(x), reference(x))


def _with_header(header, data_bytes=0):
    return len(header).to_bytes(8, "little") + header + bytes(data_bytes)


def _tensor(shape, offsets):
    return b'{"a": {"dtype": "F32", "shape": %s, "data_offsets": %s}}' % (shape, offsets)


def test_damaged_headers_are_refused(tmp_path, saved):
    path = tmp_path / "bad.safetensors"
    valid = saved[1].read_bytes()
    for content, message in (
        (valid[:-5], "truncated"),
        (b"\xff" * 16, "header would end at byte"),
        (b"", "not a readable"),
        (valid[:20], "header would"),
        (_with_header(b'["a"]'), "not a readable"),
        (_with_header(b'{"a": {"dtype": "F32", "shape": [2]}}'), "not a readable.*data_offsets"),
        (_with_header(_tensor(b"[3]", b"[0, 8]"), 8), "bytes 0 to 8 of a are not the size of F32"),
        (_with_header(_tensor(b"[2]", b"[8, 0]"), 8), "bytes 8 to 0 of"),
        (_with_header(b"[" * 100_000), "not a readable"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            stored_tensors(path)


@torch.no_grad()
def test_a_disk_that_does_not_answer(streamed, monkeypatch):
    model, stream = streamed
    model(torch.zeros(1, 8))
    # Prefetched blocks of the next pass must arrive before the disk stops.
    for future, _ in stream._coming.values():
        future.result()
    release = weight_stream.threading.Event()
    monkeypatch.setattr(weight_files, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(weight_files, "read_into", lambda *_, **__: release.wait(20))
    message = "weights of layers.4 have not arrived, and no bytes were read for 0 s from byte"
    try:
        with pytest.raises(CheckpointError, match=rf"model.safetensors: the {message} [\d,]+ on"):
            model(torch.zeros(1, 8))
        start = time.monotonic()
        stream.close()
        assert time.monotonic() - start < 5, "close waits for the disk"
    finally:
        release.set()


@torch.no_grad()
def test_a_slow_disk_that_answers(saved, streamed, monkeypatch):
    """A layer may take longer than each of its reads."""
    model, stream = streamed
    read_block = FileReader._read_block

    def slow(self, block):
        time.sleep(0.15)
        read_block(self, block)

    limits = {"PATIENCE_SECONDS": 0.5, "PAGE": 64, "MAX_BUFFERED_READ_BYTES": 128}
    for name, value in limits.items():
        monkeypatch.setattr(weight_files, name, value)
    monkeypatch.setattr(FileReader, "_read_block", slow)
    model(torch.zeros(1, 8))
    x = torch.randn(1, 8)
    start = time.monotonic()
    assert torch.equal(model(x), saved[0](x))
    assert time.monotonic() - start > len(stream.blocks) * weight_files.PATIENCE_SECONDS


def test_the_budget_decides_which_blocks_are_streamed(saved):
    reference, file = saved
    plan = partial(plan_streaming, reference, stored_tensors(file), other_bytes=100)
    total = 4 * elements(reference)
    block = total // 5
    assert plan(budget_bytes=total + 100).streamed == ()

    # Slots for two blocks have to fit too.
    streaming = plan(budget_bytes=total - 1 + 100)
    assert streaming.streamed == ("layers.0", "layers.2", "layers.4")
    assert (streaming.resident_bytes, streaming.streamed_bytes) == (2 * block, 3 * block)

    least = streaming.slot_bytes + 100
    assert len(plan(budget_bytes=least).streamed) == 5
    message = "is too small: adapters and the weights outside the .* need 0 B, 2 layers .* at least"
    with pytest.raises(InputError, match=message):
        plan(budget_bytes=least - 1)
