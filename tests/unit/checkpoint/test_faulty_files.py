"""A file system that is full, read-only, slow, or fails at any call of a save or a load: never a false success, nothing lost or mixed."""

import errno
import os
import re
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from plait.checkpoint.folder import candidates, remove_old
from plait.checkpoint.inspect import prune
from plait.checkpoint.load import Reader
from plait.checkpoint.save import Snapshot, Writer, write
from plait.checkpoint.windows import record_of
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.errors import CheckpointError
from tests.faulty_files import Planted, failing, planted, slow

CODES = (errno.ENOSPC, errno.EIO, errno.EROFS)


@pytest.fixture(scope="module")
def mesh():
    yield build_mesh(Layout())
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Thousands of files are written, and no power is lost here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def of(mesh, folder, value, tag):
    """A checkpoint whose tensors have one value."""
    tensors = {f"model.{name}": torch.full((3, 5), value) for name in ("a", "b")}
    records = {name: record_of(tensor) for name, tensor in tensors.items()}
    return Snapshot(folder, tag, mesh, tensors, records, records, {}, {})


def verified(found):
    """The tensors of a checkpoint whose every byte is verified."""
    reader = Reader(found)
    reader.verify("full")
    return list(map(reader.read, reader.tensors))


def loaded(folder):
    """The value of the one to go on from, whose every byte is verified; falls back as `load_checkpoint` does."""
    for one in candidates(folder):
        try:
            tensors = verified(one)
        except CheckpointError:
            continue
        found = {float(value) for tensor in tensors for value in tensor.unique()}
        assert len(found) == 1, f"mixed: {found}"
        return found.pop()
    raise AssertionError("lost")


def cases(calls):
    """(call, errno, whether only that call fails). The errors take turns."""
    return (
        (call, CODES[(call + once) % len(CODES)], once)
        for call in range(calls)
        for once in (True, False)
    )


@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_save_never_succeeds_falsely(mesh, tmp_path, tag):
    """Whichever call fails, under a tag that is there and under a new one: an error that names what could not be written, and the state
    before stays; or the new one is there."""
    counted = Planted()
    write(of(mesh, tmp_path / "counted" / "run", 1.0, "one"))
    with planted(counted):
        write(of(mesh, tmp_path / "counted" / "run", 2.0, tag))
    assert len(counted.calls) > 20, counted.calls
    failed = 0
    for number, (call, code, once) in enumerate(cases(len(counted.calls))):
        folder = tmp_path / str(number) / "run"
        write(of(mesh, folder, 1.0, "one"))
        said = ""
        with planted(Planted(failing(call, code, once=once))):
            try:
                write(of(mesh, folder, 2.0, tag))
            except CheckpointError as error:
                said = str(error)
        where = (counted.calls[call], errno.errorcode[code], once)
        found = loaded(folder)
        assert found in ((1.0, 2.0) if said else (2.0,)), where
        if said:
            failed += 1
            name = counted.calls[call].partition(" ")[2].partition(",")[0]
            assert f"planted error {code}" in said and re.sub("LATEST.*", "LATEST", name) in said, (
                where,
                said,
            )
        write(of(mesh, folder, 3.0, tag))  # on a disk that is well again
        assert loaded(folder) == 3.0, where
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert not left if once else all(name.startswith(".LATEST.") for name in left), (
            where
        )  # a disk that deletes nothing
    assert failed > 0.8 * number


def test_every_call_of_a_load(mesh, tmp_path):
    """A read that fails is an error that names the file, or the checkpoint before it is taken."""
    for value, tag in ((1.0, "one"), (2.0, "two")):
        write(of(mesh, tmp_path, value, tag))
    counted = Planted(reading=True)
    with planted(counted):
        assert loaded(tmp_path) == 2.0
    for call in range(len(counted.calls)):
        with (
            planted(Planted(failing(call, errno.EIO, once=True), reading=True)),
            suppress(CheckpointError),
        ):
            assert loaded(tmp_path) in (1.0, 2.0)
        with (
            planted(Planted(failing(call, errno.EIO, once=False), reading=True)),
            pytest.raises(CheckpointError) as caught,
        ):
            verified(candidates(tmp_path)[0])
        assert "planted error 5" in str(caught.value) or "cannot be read" in str(caught.value), (
            counted.calls[call]
        )


def test_old_ones_that_cannot_be_deleted(mesh, tmp_path):
    """Deleting stops where it fails, is told, and leaves whole checkpoints."""
    for number in range(4):
        write(of(mesh, tmp_path, float(number), f"step-{number}"))
    counted = Planted()
    with planted(counted):
        remove_old(tmp_path, keep=3)
    for call in range(len(counted.calls)):
        write(of(mesh, tmp_path, 9.0, "more"))
        with (
            planted(Planted(failing(call, errno.EIO, once=False))),
            pytest.warns(UserWarning, match="could not be deleted"),
        ):
            remove_old(tmp_path, keep=2)
        for one in candidates(tmp_path):
            Reader(one).verify("full")
        assert loaded(tmp_path) == 9.0
        remove_old(tmp_path, keep=2)
        write(of(mesh, tmp_path, float(call), f"again-{call}"))


@pytest.mark.parametrize("file", ["00000.safetensors", "00000.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_pruning_keeps_an_undamaged_one(mesh, tmp_path, file, damage):
    """A checkpoint with a good manifest and a damaged file does not count as one that is kept."""
    for number in range(3):
        write(of(mesh, tmp_path, float(number), f"step-{number}"))
    path = tmp_path / "step-2" / file
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
    assert prune(tmp_path, keep=1) == ["step-0"]
    assert loaded(tmp_path) == 1.0


def test_a_slow_disk_does_not_keep_the_training(mesh, tmp_path):
    """A save beside the training returns before it is on the disk, and nothing is named before it is whole."""
    write(of(mesh, tmp_path, 1.0, "one"))
    writer, layer = Writer(mesh), Planted(slow(0.01))
    with planted(layer):
        began = time.monotonic()
        writer.begin(of(mesh, tmp_path, 2.0, "two"))
        calls = len(layer.calls)
        assert writer.finished() is None and loaded(tmp_path) == 1.0
        assert writer.wait() == tmp_path / "two"
        assert len(layer.calls) > calls + 10 and time.monotonic() - began > 0.1
    assert loaded(tmp_path) == 2.0 and os.listdir(tmp_path)
    writer.close()
