"""Damaged checkpoints and failing saves are reported on every rank and lose nothing."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from plait.checkpoint import commit as commit_module
from plait.checkpoint import save as save_module
from plait.checkpoint.folder import candidates, list_complete
from plait.checkpoint.inspect import differences, open_checkpoint
from plait.checkpoint.load import Reader
from plait.engine.weights import load_weights_of
from plait.errors import CheckpointError
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.parity.full_tensors import assert_equal, full_weights

# Disks fail and are delayed here, which only replaced functions of the writer can simulate.

FLIPS = 6
"""Number of damaged bits, one per file. `damage_files` has thousands, without ranks."""


def engine_of(world):
    return cases.engine(cases.build("plain", tied=True), settings(world, 3, 1, 1))


def step(engine, number):
    """Train one step on its own data."""
    batches = cases.ragged_steps(engine.dp_size, steps=4, keys=())
    engine.train_batch(batches[number][engine.dp_rank])


def message_of(function, *arguments, **keywords):
    """Return the message of a call that must raise CheckpointError."""
    with pytest.raises(CheckpointError) as raised:
        function(*arguments, **keywords)
    return str(raised.value)


def save_two(engine, folder):
    """Save checkpoints "one" and "two", and return the weights of the first."""
    step(engine, 0)
    engine.save_checkpoint(folder, tag="one")
    first_weights = full_weights(engine.model)
    step(engine, 1)
    engine.save_checkpoint(folder, tag="two")
    return first_weights


def on_rank_0(rank, function, *arguments):
    """Call a function on rank 0 while the others wait."""
    dist.barrier()
    if rank == 0:
        function(*arguments)
    dist.barrier()


def check_differences(folder):
    first = open_checkpoint(folder / "one")
    second = open_checkpoint(folder / "two")
    assert not list(differences(first, first))
    assert open_checkpoint(folder).manifest.tag == "two"
    changed = {difference.name: difference for difference in differences(first, second)}
    embedding = changed["model.embed.weight"]
    assert embedding.elements and float(embedding.what) > 0
    # Its branch is never used.
    assert "model.blocks.0.side.weight" not in changed


def load_damaged(rank, world, folder):
    """Return the number of detected bit flips and the notes of the fallback. Runs on every rank."""
    folder = Path(folder)
    engine = engine_of(world)
    first_weights = save_two(engine, folder)
    on_rank_0(rank, check_differences, folder)

    random_numbers = random.Random(1)
    detected = 0
    files = sorted((folder / "two").iterdir())
    for trial in range(FLIPS):
        path = files[trial % len(files)]
        content = path.read_bytes()
        damaged = bytearray(content)
        position = random_numbers.randrange(len(content))
        damaged[position] ^= 1 << random_numbers.randrange(8)
        on_rank_0(rank, path.write_bytes, damaged)
        # For the hash of the manifest the message names the manifest.
        detected += path.stem in message_of(engine.load_checkpoint, folder, tag="two")
        on_rank_0(rank, path.write_bytes, content)

    on_rank_0(rank, (folder / "two" / "00001.safetensors").unlink)
    notes: list[str] = []
    for verify in ("full", "sample", "off"):
        loaded = engine.load_checkpoint(folder, verify=verify, on_note=notes.append)
        assert loaded is not None and loaded[0].name == "one"
        assert engine.global_steps == 1
        assert_equal(full_weights(engine.model), first_weights)

    # Weights alone are read with the same care.
    for tag in ("two", None):
        step(engine, 2)
        trained = full_weights(engine.model)
        if tag is not None:
            assert "00001.safetensors" in message_of(load_weights_of, engine, folder, tag=tag)
            assert_equal(full_weights(engine.model), trained)
            continue
        reader = load_weights_of(engine, folder, tag=tag)
        assert reader is not None and reader.path.name == "one"
        assert_equal(full_weights(engine.model), first_weights)
    return detected, notes


def test_a_damaged_checkpoint_is_never_loaded(pool, tmp_path):
    """The newest undamaged checkpoint is loaded if no tag is given, with a note."""
    for detected, notes in pool.run(2, load_damaged, str(tmp_path)):
        assert detected == FLIPS
        assert len(notes) == 3
        for note in notes:
            assert "two was not loaded, because it is damaged: rank 1" in note


FAILURES = (
    (save_module, "write_shards", 1),
    (save_module, "write_text", 1),
    (commit_module, "publish", 0),
    (commit_module, "replace_text", 0),
)
"""Functions of a save, and the rank on which they fail."""


def save_and_fail(rank, world, folder):
    """Return the messages of saves that fail in `FAILURES`. Runs on every rank."""
    folder = Path(folder)
    engine = engine_of(world)
    step(engine, 0)
    engine.save_checkpoint(folder, tag="one")
    first_weights = full_weights(engine.model)
    step(engine, 1)
    # Rank 0 must not wait for rank 1, whose state cannot be saved.
    client_state = {"unsupported": object()} if rank == 1 else {}
    message = message_of(engine.save_checkpoint, folder, client_state=client_state)
    assert "rank 1, " in message

    messages = []
    full = OSError(errno.ENOSPC, "No space left on device", "the disk")
    for module, name, failing_rank in FAILURES:
        error = full if rank == failing_rank else None
        with patch.object(module, name, side_effect=error, wraps=getattr(module, name)):
            messages.append(message_of(engine.save_checkpoint, folder, tag="one"))
        dist.barrier()
        assert not list(folder.glob(".*.tmp"))
        loaded = engine.load_checkpoint(folder)
        assert loaded is not None and loaded[0].name == "one"
        # With replace_text, the new checkpoint is in its place when LATEST cannot be written.
        if name != "replace_text":
            assert_equal(full_weights(engine.model), first_weights)
        dist.barrier()

    engine.save_checkpoint(folder, tag="one")
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", "one"]
    assert [checkpoint.manifest.tag for checkpoint in list_complete(folder)] == ["one"]
    return messages


def test_a_failure_on_one_rank_is_raised_on_all(pool, tmp_path):
    """The checkpoint that was saved under the same tag stays."""
    first, second = pool.run(2, save_and_fail, str(tmp_path))
    assert first == second
    for (_, name, failing_rank), message in zip(FAILURES, first, strict=True):
        assert "No space left on device" in message
        assert ("rank 1" in message) == (failing_rank == 1), name


def save_to_own_folder(rank, world, folder):
    """Save to a folder that only this rank sees, like a machine's own disk. Runs on every rank."""
    engine = engine_of(world)
    own_folder = Path(folder) / str(rank)
    own_folder.mkdir()
    with patch.object(save_module, "VISIBLE_WITHIN_SECONDS", 0.2):
        message = message_of(engine.save_checkpoint, own_folder, tag="one")
    assert "rank 1" in message and "a file system that all machines share" in message
    assert not (own_folder / "one").exists() and not list(own_folder.glob(".*"))
    shutil.rmtree(own_folder)


def test_folders_of_single_machines_are_refused(pool, tmp_path):
    pool.run(2, save_to_own_folder, str(tmp_path))


def save_under_refused_tags(rank, world, folder):
    """Save under tags that are no names, and under names of other files. Runs on every rank."""
    folder = Path(folder)
    engine = engine_of(world)
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.txt").write_text("thesis")
    (folder / "log").write_text("log")
    (folder / "dangling").symlink_to(folder / "nowhere")
    for tag in ("", "a/b", ".hidden", "LATEST"):
        assert "a tag names a folder" in message_of(
            save_module.snapshot,
            folder,
            tag,
            mesh=engine.mesh,
            tensors={},
            rank_tensors={},
            values={},
            metadata={},
        )
    for tag in ("notes", "log", "dangling"):
        message = message_of(engine.save_checkpoint, folder, tag=tag)
        assert "is not a checkpoint, and would be deleted" in message


def test_a_tag_that_names_something_else_is_refused(pool, tmp_path):
    pool.run(1, save_under_refused_tags, str(tmp_path))
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "thesis"
    assert (tmp_path / "log").read_text() == "log"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "log", "notes"]


def operations(rank, world, folder):
    """Return the operations of a save on the disk in their order. Runs on every rank."""
    folder = Path(folder)
    engine = engine_of(world)
    engine.save_checkpoint(folder, tag="one")
    fsync = os.fsync
    rename = Path.rename
    result = []

    def record_sync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        result.append(f"sync {path.relative_to(folder.parent)}")
        fsync(descriptor)

    def record_rename(path, target):
        result.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    with patch.object(os, "fsync", record_sync), patch.object(Path, "rename", record_rename):
        engine.save_checkpoint(folder, tag="one")
    return result


def test_nothing_is_published_before_it_is_on_the_disk(pool, tmp_path):
    """The files and their folder come before the rename, and LATEST is replaced in the same way."""
    name = tmp_path.name
    files = ("begun", "00000.safetensors", "00000.json", "manifest.sha256", "manifest.json")
    actual = pool.run(1, operations, str(tmp_path))[0]
    # The temporary file of the pointer has a random name.
    pointer = next(line for line in actual if "LATEST" in line).split()[1].split("/")[-1]
    assert actual == [
        *(f"sync {name}/.one.tmp/{file}" for file in files),
        "rename one .one.replaced",
        f"sync {name}/.one.tmp",
        "rename .one.tmp one",
        f"sync {name}",
        f"sync {name}/{pointer}",
        f"rename {pointer} LATEST",
        f"sync {name}",
    ]


def save_two_checkpoints(rank, world, folder):
    """Runs on every rank."""
    save_two(engine_of(world), folder)


# Each damage receives random numbers, the file, and another file of the two checkpoints.


def flip(numbers, path, other):
    content = bytearray(path.read_bytes())
    content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content)


def truncate(numbers, path, other):
    path.write_bytes(path.read_bytes()[: numbers.randrange(path.stat().st_size)])


def blank(numbers, path, other):
    """Write a page of zeros, or of ones where the file is zero."""
    content = bytearray(path.read_bytes())
    start = numbers.randrange(len(content))
    zeros = bytes(len(content[start : start + 4096]))
    is_zero = content[start : start + 4096] == zeros
    content[start : start + 4096] = b"\1" * len(zeros) if is_zero else zeros
    path.write_bytes(content)


def lengthen(numbers, path, other):
    path.write_bytes(path.read_bytes() + bytes(numbers.randrange(1, 100)))


def delete(numbers, path, other):
    path.unlink()


def replace(numbers, path, other):
    path.write_bytes(other.read_bytes())


DAMAGES = (flip, truncate, blank, lengthen, delete, replace)


def verify(folder):
    Reader(candidates(folder, "two")[0]).verify("full")


def damage_files(folder, trials):
    """Damage files of the checkpoint "two" one at a time, and verify it."""
    numbers = random.Random(7)
    files = sorted((folder / "two").iterdir())
    for trial in range(trials):
        damage = DAMAGES[trial % len(DAMAGES)]
        path = numbers.choice(files)
        # The same rank's file of the other checkpoint, or the other rank's file.
        names = {path.name.replace("00000", "00001"), path.name.replace("00001", "00000")}
        others = [folder / "one" / path.name, *(path.with_name(name) for name in sorted(names))]
        other = numbers.choice([other for other in others if other != path and other.exists()])
        content = path.read_bytes()
        damage(numbers, path, other)
        if path.exists() and path.read_bytes() == content:
            # The two files were equal.
            continue
        message = message_of(verify, folder)
        assert path.stem in message, (damage.__name__, path.name, message)
        path.write_bytes(content)
    verify(folder)


@pytest.mark.parametrize("trials", [60, pytest.param(6000, marks=pytest.mark.proof)])
def test_damage_of_every_kind_is_found(pool, tmp_path, trials):
    pool.run(2, save_two_checkpoints, str(tmp_path))
    damage_files(tmp_path, trials)
