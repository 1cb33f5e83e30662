"""Blocks whose weights are read from files compute the same bits, within a budget; what goes wrong with a file is named."""

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
    def __init__(self, blocks=5):
        super().__init__()
        sizes = ((nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8, bias=False)) for _ in range(blocks))
        self.layers = nn.ModuleList(nn.Sequential(*layers) for layers in sizes)
        self.order = list(range(blocks))

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Chain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"


@pytest.fixture
def streamed(saved):
    torch.manual_seed(1)
    model = Chain().requires_grad_(False)
    model.load_state_dict(saved[0].state_dict())
    made = WeightStream(model, ["layers.0", "layers.2", "layers.4"], stored_tensors(saved[1]))
    yield model, made
    made.close()


@torch.no_grad()
def test_the_same_bits_pass_after_pass(saved, streamed):
    model, made = streamed
    one = 4 * (8 * 24 + 24 + 8 * 24)
    assert all(p.numel() == 0 for p in model.layers[2].parameters())
    assert model.layers[1][0].weight.numel() == 8 * 24
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        assert torch.equal(model(x), saved[0](x))
        assert all(p.numel() == 0 for index in (0, 2, 4) for p in model.layers[index].parameters())
    assert one <= made.slot_bytes <= one + 3 * 64


@pytest.mark.parametrize("shift", [0, 8])
@torch.no_grad()
def test_large_layers_past_the_cache(tmp_path, shift, monkeypatch):
    """Tensors stay as in the file if that keeps the bits of a product of one row, and are copied otherwise."""
    torch.manual_seed(0)
    layers = ((nn.Linear(1030, 3100), nn.Linear(3100, 1030, bias=False)) for _ in range(3))
    whole = nn.ModuleList(nn.Sequential(*pair) for pair in layers).requires_grad_(False)
    path = tmp_path / "model.safetensors"
    for more in range(0, 64, 8):  # the header is filled up to a multiple of 8 bytes
        save_file(whole.state_dict(), path, metadata={"": "x" * more})
        stored = stored_tensors(path)
        if all(one.offset % 16 == shift for one in stored.values()):
            break
    else:
        pytest.fail("no header of this length")
    model = copy.deepcopy(whole)
    made = WeightStream(model, ["0", "1", "2"], stored)
    reads = []
    read_pages = weight_files._read_pages

    def recorded(file, block, view):
        reads.append(block.image is not None)
        return read_pages(file, block, view)

    monkeypatch.setattr(weight_files, "_read_pages", recorded)
    monkeypatch.setattr(made._files, "_keeps", False)
    monkeypatch.setattr(weight_files._OpenFile, "has_in_cache", lambda *_: False)
    for step in range(3):
        x = torch.randn(1, 1030, generator=torch.Generator().manual_seed(step))
        one, other = x, x
        for layer, streamed in zip(whole, model, strict=True):
            one, other = layer(one), streamed(other)
        assert torch.equal(one, other)
    if made._files._files[path].direct is not None:  # a folder in memory has no disk to read from
        assert set(reads) == {shift == 0}
    made.close()


@torch.no_grad()
def test_another_order_and_a_failed_forward(saved, streamed):
    model, _ = streamed
    x = torch.randn(2, 8)
    for order in ([4, 2, 0], [2, 2], [0, 1, 2, 3, 4], [4]):
        model.order = saved[0].order = order
        assert torch.equal(model(x), saved[0](x)), order
    model.order = saved[0].order = [0, 1, 2]
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(2, 9))
    assert torch.equal(model(x), saved[0](x))


def _with_header(header, more=0):
    return len(header).to_bytes(8, "little") + header + bytes(more)


def _tensor(shape, offsets):
    return b'{"a": {"dtype": "F32", "shape": %s, "data_offsets": %s}}' % (shape, offsets)


def test_headers_that_are_not_what_they_say(tmp_path, saved):
    path = tmp_path / "bad.safetensors"
    whole = saved[1].read_bytes()
    for content, words in (
        (whole[:-5], "truncated"),
        (b"\xff" * 16, "header would end at byte"),
        (b"", "not a readable"),
        (whole[:20], "header would"),
        (_with_header(b'["a"]'), "not a readable"),
        (_with_header(b'{"a": {"dtype": "F32", "shape": [2]}}'), "not a readable.*data_offsets"),
        (_with_header(_tensor(b"[3]", b"[0, 8]"), 8), "a is F32 .3. in bytes 0 to 8"),
        (_with_header(_tensor(b"[2]", b"[8, 0]"), 8), "in bytes 8 to 0"),
        (_with_header(b"[" * 100_000), "not a readable"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            stored_tensors(path)


@torch.no_grad()
def test_a_disk_that_does_not_answer(streamed, monkeypatch):
    model, made = streamed
    model(torch.zeros(1, 8))
    for future, _ in made._coming.values():
        future.result()
    release = weight_stream.threading.Event()
    monkeypatch.setattr(weight_files, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(weight_files, "read_into", lambda *_, **__: release.wait(20))
    words = r"model.safetensors: the weights of layers.4 have not arrived, and no bytes were read for 0 s from byte [\d,]+ on; check"
    try:
        with pytest.raises(CheckpointError, match=words):
            model(torch.zeros(1, 8))
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < 5, "waits for the disk"
    finally:
        release.set()


@torch.no_grad()
def test_a_disk_that_is_slow_and_answers(saved, streamed, monkeypatch):
    """A layer takes longer than any of its reads may."""
    model, made = streamed
    quick = FileReader._read_block

    def slow(self, block):
        time.sleep(0.15)
        quick(self, block)

    limits = {"PATIENCE_SECONDS": 0.5, "PAGE": 64, "MAX_BUFFERED_READ_BYTES": 128}
    for name, value in limits.items():
        monkeypatch.setattr(weight_files, name, value)
    monkeypatch.setattr(FileReader, "_read_block", slow)
    model(torch.zeros(1, 8))
    x, began = torch.randn(1, 8), time.monotonic()
    assert torch.equal(model(x), saved[0](x))
    assert time.monotonic() - began > len(made.blocks) * weight_files.PATIENCE_SECONDS


def test_what_stays_in_memory(tmp_path, saved):
    with torch.device("meta"):
        model = Chain(5)
    planned = partial(plan_streaming, model, stored_tensors(saved[1]), other_bytes=100)
    total = sum(p.numel() * 4 for p in model.parameters())
    block = total // 5
    assert planned(budget_bytes=total + 100).streamed == ()
    found = planned(budget_bytes=total - 1 + 100)
    # Two places of blocks have to fit besides.
    assert found.streamed == ("layers.0", "layers.2", "layers.4")
    assert (found.resident_bytes, found.streamed_bytes) == (2 * block, 3 * block)
    least = found.slot_bytes + 100
    assert len(planned(budget_bytes=least).streamed) == 5
    words = "is too small: adapters and the weights outside the repeated layers need 0 B, 2 layers .* pass at least"
    with pytest.raises(InputError, match=words):
        planned(budget_bytes=least - 1)
