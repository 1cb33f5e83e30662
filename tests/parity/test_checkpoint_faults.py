"""Damaged checkpoints, ranks that cannot write, and tags saved twice: nothing lost, nothing wrong in silence, every rank told."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from plait.checkpoint import commit as commit_module
from plait.checkpoint import save as save_module
from plait.checkpoint.folder import candidates, list_complete
from plait.checkpoint.inspect import differences, open_checkpoint
from plait.checkpoint.load import Reader
from plait.errors import CheckpointError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import settings

FLIPS = 6
"""One in every file: thousands are in `damages`, without ranks."""


def engine_of(world, **more):
    """ZeRO stage 3."""
    return cases.engine(cases.build("plain", tied=True), settings(world, 3, 1, 1, **more))


def step(engine, number):
    """One step on data of its own."""
    batches = cases.ragged_steps(engine.dp_size, steps=4, keys=())
    return float(engine.train_batch(batches[number][engine.dp_rank]).loss)


def weights(engine):
    """Unsharded."""
    return {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}


def alike(one, other):
    """Bitwise."""
    return all(torch.equal(one[name], other[name]) for name in one)


def message(call):
    """Of the CheckpointError."""
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def damaged(rank, world, folder):
    """(bit flips that were found, notes of the fallback). Runs in a worker."""
    at, engine = Path(folder), engine_of(world)
    step(engine, 0)
    engine.save_checkpoint(at, tag="one")
    good = weights(engine)
    step(engine, 1)
    engine.save_checkpoint(at, tag="two")
    torch.distributed.barrier()
    if rank == 0:
        one, two = (open_checkpoint(at / tag) for tag in ("one", "two"))
        assert not list(differences(one, one)) and open_checkpoint(at).manifest.tag == "two"
        changed = {difference.name: difference for difference in differences(one, two)}
        assert (
            changed["model.embed.weight"].elements and float(changed["model.embed.weight"].what) > 0
        )
        assert "model.blocks.0.side.weight" not in changed
    chance, found = random.Random(1), 0
    files = sorted(path for path in (at / "two").iterdir())
    for trial in range(FLIPS):
        path = files[trial % len(files)]
        before = path.read_bytes()
        place, bit = chance.randrange(len(before)), 1 << chance.randrange(8)
        torch.distributed.barrier()
        if rank == 0:
            path.write_bytes(before[:place] + bytes([before[place] ^ bit]) + before[place + 1 :])
        torch.distributed.barrier()
        said = message(lambda: engine.load_checkpoint(at, tag="two"))
        found += path.stem in said  # of the manifest's hash the manifest
        torch.distributed.barrier()
        if rank == 0:
            path.write_bytes(before)
        torch.distributed.barrier()
    if rank == 0:
        (at / "two" / "00001.safetensors").unlink()
    torch.distributed.barrier()
    notes: list[str] = []
    for verify in ("full", "sample", "off"):
        loaded = engine.load_checkpoint(at, verify=verify, on_note=notes.append)
        assert (
            loaded is not None
            and loaded[0].name == "one"
            and alike(weights(engine), good)
            and engine.global_steps == 1
        )
    return found, notes


def test_a_damaged_checkpoint_is_never_loaded(pool, tmp_path):
    """Every flip of a bit is found, in the file that it is in; without a tag the newest undamaged one is loaded, and it is said."""
    for found, notes in pool.run(2, damaged, str(tmp_path)):
        assert found == FLIPS
        assert len(notes) == 3 and all(
            "two was not loaded, because it is damaged: rank 1" in note for note in notes
        )


def failing(rank, world, folder):
    """What a save says whose rank 1, or whose commit, fails. Runs in a worker."""
    at, engine, said = Path(folder), engine_of(world), []
    step(engine, 0)
    engine.save_checkpoint(at, tag="one")
    good = weights(engine)
    step(engine, 1)
    mine = {"mine": object()} if rank == 1 else {}
    assert "rank 1, " in message(lambda: engine.save_checkpoint(at, client_state=mine)), (
        "and rank 0 does not wait for it"
    )
    full = OSError(errno.ENOSPC, "No space left on device", "the disk")
    for module, name, victim in (
        (save_module, "write_shards", 1),
        (save_module, "write_text", 1),
        (commit_module, "publish", 0),
        (commit_module, "replace_text", 0),
    ):
        with patch.object(
            module, name, side_effect=full if rank == victim else None, wraps=getattr(module, name)
        ):
            said.append(message(lambda: engine.save_checkpoint(at, tag="one")))
        torch.distributed.barrier()
        assert not list(at.glob(".*.tmp"))
        loaded = engine.load_checkpoint(at)
        assert loaded is not None and loaded[0].name == "one"
        assert name == "replace_text" or alike(weights(engine), good)
        torch.distributed.barrier()
    engine.save_checkpoint(at, tag="one")
    assert [path.name for path in sorted(at.iterdir())] == ["LATEST", "one"]
    assert [one.manifest.tag for one in list_complete(at)] == ["one"]
    return said


def test_one_ranks_failure_is_every_ranks(pool, tmp_path):
    """And what was saved under the same tag is still there."""
    first, second = pool.run(2, failing, str(tmp_path))
    assert first == second
    assert all("No space left on device" in said for said in first)
    assert ["rank 1" in said for said in first] == [True, True, False, False]


def elsewhere(rank, world, folder):
    """Each rank names a folder of its own, as a machine's own disk is. Runs in a worker."""
    engine = engine_of(world)
    mine = Path(folder) / str(rank)
    mine.mkdir()
    with patch.object(save_module, "VISIBLE_WITHIN_SECONDS", 0.2):
        said = message(lambda: engine.save_checkpoint(mine, tag="one"))
    assert not (mine / "one").exists() and not list(mine.glob(".*"))
    shutil.rmtree(mine)
    return said


def test_folders_of_single_machines_are_refused(pool, tmp_path):
    assert all(
        "rank 1" in said and "a file system that all machines share" in said
        for said in pool.run(2, elsewhere, str(tmp_path))
    )


@pytest.mark.parametrize("tag", ["", "a/b", ".hidden", "LATEST"])
def test_a_tag_is_the_name_of_a_folder(pool, tmp_path, tag):
    assert "a tag names a folder" in pool.run(1, refused_tag, str(tmp_path), tag)[0]


def refused_tag(rank, world, folder, tag):
    """Runs in a worker."""
    return message(
        lambda: save_module.snapshot(
            Path(folder),
            tag,
            mesh=engine_of(world).mesh,
            tensors={},
            rank_tensors={},
            values={},
            metadata={},
        )
    )


def order(rank, world, folder):
    """What is put on the disk and renamed in a save, in order. Runs in a worker."""
    at, engine, seen = Path(folder), engine_of(world), []
    engine.save_checkpoint(at, tag="one")
    sync, rename = os.fsync, Path.rename

    def syncing(handle):
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).relative_to(at.parent)}")
        sync(handle)

    def renaming(path, target):
        seen.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    with patch.object(os, "fsync", syncing), patch.object(Path, "rename", renaming):
        engine.save_checkpoint(at, tag="one")
    return seen


def test_nothing_is_published_before_it_is_on_the_disk(pool, tmp_path):
    """Files, their folder, the rename; then LATEST in the same way; what was there under the name is deleted at the end."""
    name = tmp_path.name
    files = ("begun", "00000.safetensors", "00000.json", "manifest.sha256", "manifest.json")
    seen = pool.run(1, order, str(tmp_path))[0]
    pointer = next(found for found in seen if "LATEST" in found).split()[1].removeprefix(f"{name}/")
    assert seen == [
        *(f"sync {name}/.one.tmp/{file}" for file in files),
        "rename one .one.replaced",
        f"sync {name}/.one.tmp",
        "rename .one.tmp one",
        f"sync {name}",
        f"sync {name}/{pointer}",
        f"rename {pointer} LATEST",
        f"sync {name}",
    ]


def two(rank, world, folder):
    """Two checkpoints. Runs in a worker."""
    engine = engine_of(world)
    for number, tag in enumerate(("one", "two")):
        step(engine, number)
        engine.save_checkpoint(folder, tag=tag)


def flip(chance, path, other):
    raw = bytearray(path.read_bytes())
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


def cut(chance, path, other):
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def blank(chance, path, other):
    """A page of zeros; of a file that is all zeros there, ones."""
    raw = bytearray(path.read_bytes())
    start = chance.randrange(len(raw))
    page = bytes(len(raw[start : start + 4096]))
    raw[start : start + 4096] = page if raw[start : start + 4096] != page else b"\1" * len(page)
    path.write_bytes(raw)


def longer(chance, path, other):
    path.write_bytes(path.read_bytes() + bytes(chance.randrange(1, 100)))


def gone(chance, path, other):
    path.unlink()


def swapped(chance, path, other):
    """With the same rank's file of the other checkpoint, or the other rank's."""
    path.write_bytes(other.read_bytes())


KINDS = (flip, cut, blank, longer, gone, swapped)


def damages(folder, trials):
    """Each is found, by its file, when the checkpoint is opened and verified."""
    chance, files = random.Random(7), sorted((folder / "two").iterdir())
    for trial in range(trials):
        kind, path = KINDS[trial % len(KINDS)], chance.choice(files)
        names = {path.name.replace("00000", "00001"), path.name.replace("00001", "00000")}
        peers = [folder / "one" / path.name, *(path.with_name(name) for name in sorted(names))]
        other = chance.choice([peer for peer in peers if peer != path and peer.exists()])
        before = path.read_bytes()
        kind(chance, path, other)
        if path.exists() and path.read_bytes() == before:
            continue  # the two files were alike
        with pytest.raises(CheckpointError) as caught:
            Reader(candidates(folder, "two")[0]).verify("full")
        assert path.stem in str(caught.value), (kind.__name__, path.name, str(caught.value))
        path.write_bytes(before)
    Reader(candidates(folder, "two")[0]).verify("full")


def test_damage_of_every_kind_is_found(pool, tmp_path):
    pool.run(2, two, str(tmp_path))
    damages(tmp_path, 60)


@pytest.mark.proof
def test_thousands_of_damages_are_found(pool, tmp_path):
    pool.run(2, two, str(tmp_path))
    damages(tmp_path, 6000)


def over_others_files(rank, world, folder):
    """What a save says whose tag is the name of something else. Runs in a worker."""
    at, engine = Path(folder), engine_of(world)
    (at / "notes").mkdir()
    (at / "notes" / "thesis.txt").write_text("mine")
    (at / "log").write_text("mine")
    (at / "gone").symlink_to(at / "nowhere")
    return [
        message(lambda tag=tag: engine.save_checkpoint(at, tag=tag))
        for tag in ("notes", "log", "gone")
    ]


def test_only_a_checkpoint_is_replaced(pool, tmp_path):
    said = pool.run(1, over_others_files, str(tmp_path))[0]
    assert all("is not a checkpoint, and would be deleted" in one for one in said)
    assert (
        (tmp_path / "notes" / "thesis.txt").read_text() == (tmp_path / "log").read_text() == "mine"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone", "log", "notes"]
