"""A file system that is full, read-only, slow, or fails at any call of a save or a load.

No failed save is reported as a success, and no checkpoint is lost or mixed with another one.
"""

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
def _no_fsync(monkeypatch):
    """Thousands of files are written, and no power is lost here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def save(mesh, tmp_path):
    """Return a function that saves a checkpoint whose tensors have one value."""

    def save_value(value, tag, folder=tmp_path):
        write(snapshot_of(mesh, folder, value, tag))

    return save_value


def snapshot_of(mesh, folder, value, tag):
    tensors = {f"model.{name}": torch.full((3, 5), value) for name in ("a", "b")}
    records = {name: record_of(tensor) for name, tensor in tensors.items()}
    return Snapshot(folder, tag, mesh, tensors, records, records, {}, {})


def verified_tensors(checkpoint):
    reader = Reader(checkpoint)
    reader.verify("full")
    return list(map(reader.read, reader.tensors))


def loaded_value(folder):
    """Return the value of the checkpoint that a load takes, and check every byte of it."""
    for checkpoint in candidates(folder):
        with suppress(CheckpointError):
            values = {float(v) for tensor in verified_tensors(checkpoint) for v in tensor.unique()}
            assert len(values) == 1, f"mixed: {values}"
            return values.pop()
    raise AssertionError("no checkpoint can be loaded")


def faults(calls):
    """Yield the number of a call, its error, and whether later calls succeed."""
    for call in range(calls):
        for once in (True, False):
            yield call, CODES[(call + once) % len(CODES)], once


@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_failed_save_is_an_error_and_keeps_the_old_one(save, tmp_path, tag):
    """Each call of a save fails in turn. The tag is that of the old checkpoint, or a new one."""
    recorder = Planted()
    folder = tmp_path / "recorded" / "run"
    save(1.0, "one", folder)
    with planted(recorder):
        save(2.0, tag, folder)
    calls = recorder.calls
    assert len(calls) > 20, calls

    errors = 0
    for number, (call, code, once) in enumerate(faults(len(calls))):
        folder = tmp_path / str(number) / "run"
        case = (calls[call], errno.errorcode[code], once)
        save(1.0, "one", folder)
        message = ""
        with planted(Planted(failing(call, code, once=once))):
            try:
                save(2.0, tag, folder)
            except CheckpointError as error:
                message = str(error)
                errors += 1

        # An error after the new checkpoint has its name is possible.
        assert loaded_value(folder) in ((1.0, 2.0) if message else (2.0,)), case
        if message:
            file = calls[call].partition(" ")[2].partition(",")[0]
            assert f"planted error {code}" in message, (case, message)
            assert re.sub("LATEST.*", "LATEST", file) in message, (case, message)

        # The disk is well again.
        save(3.0, tag, folder)
        assert loaded_value(folder) == 3.0, case
        leftovers = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        if once:
            assert not leftovers, case
        else:
            # A disk that failed could not delete this file either.
            assert all(name.startswith(".LATEST.") for name in leftovers), case
    assert errors > 0.8 * number


def test_a_failed_read_is_an_error_or_loads_an_older_one(save, tmp_path):
    save(1.0, "one")
    save(2.0, "two")
    recorder = Planted(reading=True)
    with planted(recorder):
        assert loaded_value(tmp_path) == 2.0
    for call in range(len(recorder.calls)):
        once = Planted(failing(call, errno.EIO, once=True), reading=True)
        with planted(once), suppress(CheckpointError):
            assert loaded_value(tmp_path) in (1.0, 2.0)
        always = Planted(failing(call, errno.EIO, once=False), reading=True)
        with (
            planted(always),
            pytest.raises(CheckpointError, match="planted error 5|cannot be read"),
        ):
            verified_tensors(candidates(tmp_path)[0])


def test_old_checkpoints_that_cannot_be_deleted(save, tmp_path):
    """Deletion stops at an error, is reported, and leaves complete checkpoints."""
    for number in range(4):
        save(float(number), f"step-{number}")
    recorder = Planted()
    with planted(recorder):
        remove_old(tmp_path, keep=3)
    for call in range(len(recorder.calls)):
        save(9.0, "newest")
        with (
            planted(Planted(failing(call, errno.EIO, once=False))),
            pytest.warns(UserWarning, match="could not be deleted"),
        ):
            remove_old(tmp_path, keep=2)
        for checkpoint in candidates(tmp_path):
            Reader(checkpoint).verify("full")
        assert loaded_value(tmp_path) == 9.0
        remove_old(tmp_path, keep=2)
        save(float(call), f"next-{call}")


def test_a_save_removes_the_files_of_killed_saves(save, tmp_path):
    """A process that is killed while it replaces LATEST leaves a temporary file."""
    hour_ago = time.time() - 3600
    abandoned = tmp_path / ".LATEST.0123456789abcdef.tmp"
    running = tmp_path / ".LATEST.fedcba9876543210.tmp"
    another_tag = tmp_path / ".LATEST.00.tmp"
    abandoned.write_text("{")
    running.write_text("{")
    another_tag.mkdir()
    os.utime(abandoned, (hour_ago, hour_ago))
    os.utime(another_tag, (hour_ago, hour_ago))
    save(1.0, "a")
    assert not abandoned.exists()
    assert running.exists() and another_tag.exists()
    os.utime(running, (hour_ago, hour_ago))
    save(2.0, "a")
    assert not running.exists() and loaded_value(tmp_path) == 2.0


@pytest.mark.parametrize("file", ["00000.safetensors", "00000.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_pruning_keeps_an_undamaged_checkpoint(save, tmp_path, file, damage):
    """A checkpoint with a good manifest and a damaged file does not count."""
    for number in range(3):
        save(float(number), f"step-{number}")
    path = tmp_path / "step-2" / file
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
    assert prune(tmp_path, keep=1) == ["step-0"]
    assert loaded_value(tmp_path) == 1.0


def test_an_asynchronous_save_does_not_wait_for_the_disk(mesh, save, tmp_path):
    """The new checkpoint has its name when it is complete."""
    save(1.0, "one")
    writer = Writer(mesh)
    layer = Planted(slow(0.01))
    with planted(layer):
        start = time.monotonic()
        writer.begin(snapshot_of(mesh, tmp_path, 2.0, "two"))
        calls = len(layer.calls)
        assert writer.finished() is None and loaded_value(tmp_path) == 1.0
        assert writer.wait() == tmp_path / "two"
        assert len(layer.calls) > calls + 10 and time.monotonic() - start > 0.1
    assert loaded_value(tmp_path) == 2.0
    writer.close()
