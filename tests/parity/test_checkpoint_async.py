"""Checkpoints that are written while training goes on: an error that every rank is told of. test_stale_saves.py: what they hold."""

import errno
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait.checkpoint import save as save_module
from plait.checkpoint.folder import list_complete
from plait.cluster.mesh import Mesh
from plait.errors import CheckpointError, CommunicationError
from tests.parity import cases
from tests.parity.digests import build
from tests.parity.tensor_parallel import settings


def engine_of(world):
    """ZeRO stage 1."""
    return cases.engine(build("llama", torch.float32, dropout=False), settings(world, 1, 1, 1, 1))


def failing(rank, world, folder):
    """(what the step after a save that failed says, checkpoints then). Runs in a worker."""
    at = Path(folder)
    engine = engine_of(world)
    batch = cases.ragged_steps(world, steps=1)[0][rank]
    engine.train_batch([batch])
    engine.save_checkpoint(at, tag="one")
    full = OSError(errno.ENOSPC, "No space left on device", "the disk")
    with patch.object(
        save_module,
        "write_shards",
        side_effect=full if rank == 1 else None,
        wraps=save_module.write_shards,
    ):
        engine.save_checkpoint(at, tag="two", wait=False)
        while not engine._writer._running.done():
            time.sleep(0.01)
    with pytest.raises(CheckpointError) as caught:
        engine.train_batch([batch])
    engine.train_batch([batch])
    engine.save_checkpoint(at, tag="three", wait=False)
    engine.close()
    return str(caught.value), [one.manifest.tag for one in list_complete(at)]


def test_an_error_is_told_at_the_next_step(pool, tmp_path):
    """Of every rank; the run may go on, and what it closes on is on the disk."""
    for said, tags in pool.run(2, failing, str(tmp_path)):
        assert "rank 1" in said and "No space left on device" in said
        assert tags == ["three", "one"]


def blocked(rank, world, folder):
    """What a save says whose timeout is over before the disk of rank 1 has taken its files. Runs in a worker."""
    engine = engine_of(world)
    honest = save_module.write_shards

    def slow(*args):
        time.sleep(3 * rank)
        return honest(*args)

    short = patch.object(
        Mesh,
        "host_group",
        lambda mesh: dist.new_group(backend="gloo", timeout=timedelta(seconds=1)),
    )
    with short, patch.object(save_module, "write_shards", slow):
        engine.save_checkpoint(folder, tag="one", wait=False)
        with pytest.raises(CommunicationError) as caught:
            engine.checkpoint_written(wait=True)
    engine.close()
    return str(caught.value)


def test_a_disk_that_blocks_one_rank_is_named(pool, tmp_path):
    first, _ = pool.run(2, blocked, str(tmp_path))
    assert first.startswith(
        f"checkpoint {tmp_path}/one: rank 0 waited for ranks that did not take part"
    ), first
    assert f"not written yet: {tmp_path}/.one.tmp/00001.safetensors; check whether a disk" in first


def without_room(rank, world, folder):
    """The threads that wrote, where rank 1 has no memory for a copy. Runs in a worker."""
    engine = engine_of(world)
    honest, threads = save_module.write_shards, set()

    def noting(*args):
        threads.add(threading.current_thread().name.partition("_")[0])
        return honest(*args)

    room = patch.object(save_module, "free_host_bytes", lambda: 1000 if rank else None)
    with room, patch.object(save_module, "write_shards", noting):
        engine.save_checkpoint(folder, tag="one", wait=False)
        engine.checkpoint_written(wait=True)
    return threads


def test_a_rank_without_room_writes_at_once(pool, tmp_path):
    assert pool.run(2, without_room, str(tmp_path)) == [{"plait-checkpoint"}, {"MainThread"}]
    assert [one.manifest.tag for one in list_complete(tmp_path)] == ["one"]


def at_other_moments(rank, world):
    """Whether the steps after a failure say so, of which rank 1 hears after rank 0. Runs in a worker."""
    engine = engine_of(world)
    batch, said = cases.ragged_steps(world, steps=1)[0][rank], []
    failing, writer = Future[Path](), engine._writer
    writer._running = writer._unsettled = failing
    for step in range(4):
        if rank == 0 and step == 1:
            failing.set_exception(CheckpointError("full"))
        if rank == 1 and step == 1:
            threading.Timer(
                0.05, failing.set_exception, [CheckpointError("full")]
            ).start()  # while rank 0 waits for it
        try:
            engine.train_batch([batch])
            said.append(False)
        except CheckpointError:
            said.append(True)
        assert engine.checkpoint_written() is None
    writer._running = writer._unsettled = Future[Path]()
    writer._running.set_exception(CheckpointError("full"))
    with pytest.raises(CheckpointError, match="full"):
        engine.close()
    return said


def test_ranks_stop_at_one_step_after_a_failed_save(pool):
    """Else one leaves the step that the others wait in; and what no step has told, `close` does."""
    assert pool.run(2, at_other_moments) == [[False, True, False, False]] * 2
