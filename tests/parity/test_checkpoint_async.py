"""Errors of checkpoints that are written while training goes on reach every rank.

test_stale_saves.py checks the content of these checkpoints.
"""

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

# Disks and memory of one rank fail here, and ranks learn of it in a given order. Only replaced
# functions and futures of the writer can simulate that.


def engine_of(world):
    return cases.engine(build("llama", torch.float32, dropout=False), settings(world, 1, 1, 1, 1))


def batch_of(rank, world):
    return cases.ragged_steps(world, steps=1)[0][rank]


def tags_in(folder):
    return [checkpoint.manifest.tag for checkpoint in list_complete(Path(folder))]


def save_on_full_disk(rank, world, folder):
    """Return the message of the step after a failed save, and the tags at the end.

    Runs on every rank.
    """
    engine = engine_of(world)
    batch = batch_of(rank, world)
    engine.train_batch([batch])
    engine.save_checkpoint(folder, tag="one")
    full = OSError(errno.ENOSPC, "No space left on device", "the disk")
    with patch.object(
        save_module,
        "write_shards",
        side_effect=full if rank == 1 else None,
        wraps=save_module.write_shards,
    ):
        engine.save_checkpoint(folder, tag="two", wait=False)
        while not engine._writer._running.done():
            time.sleep(0.01)
    with pytest.raises(CheckpointError) as raised:
        engine.train_batch([batch])

    # The run may go on, and `close` waits for the last save.
    engine.train_batch([batch])
    engine.save_checkpoint(folder, tag="three", wait=False)
    engine.close()
    return str(raised.value), tags_in(folder)


def test_a_failed_save_is_raised_at_the_next_step(pool, tmp_path):
    for message, tags in pool.run(2, save_on_full_disk, str(tmp_path)):
        assert "rank 1" in message and "No space left on device" in message
        assert tags == ["three", "one"]


def save_on_slow_disk(rank, world, folder):
    """Return the message of a save whose timeout ends before rank 1 has written.

    Runs on every rank.
    """
    engine = engine_of(world)
    write_shards = save_module.write_shards

    def write_slowly(*args):
        time.sleep(3 * rank)
        return write_shards(*args)

    def impatient_group(mesh):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=1))

    with (
        patch.object(Mesh, "host_group", impatient_group),
        patch.object(save_module, "write_shards", write_slowly),
    ):
        engine.save_checkpoint(folder, tag="one", wait=False)
        with pytest.raises(CommunicationError) as raised:
            engine.checkpoint_written(wait=True)
    engine.close()
    return str(raised.value)


def test_a_disk_that_blocks_one_rank_is_named(pool, tmp_path):
    message = pool.run(2, save_on_slow_disk, str(tmp_path))[0]
    path = f"checkpoint {tmp_path}/one"
    assert message.startswith(f"{path}: rank 0 waited for ranks that did not take part"), message
    assert f"not written yet: {tmp_path}/.one.tmp/00001.safetensors" in message
    assert "check whether a disk" in message


def save_without_memory(rank, world, folder):
    """Return the threads that write if rank 1 has no memory for a copy. Runs on every rank."""
    engine = engine_of(world)
    write_shards = save_module.write_shards
    threads = set()

    def record_thread(*args):
        threads.add(threading.current_thread().name.partition("_")[0])
        return write_shards(*args)

    with (
        patch.object(save_module, "free_host_bytes", lambda: 1000 if rank else None),
        patch.object(save_module, "write_shards", record_thread),
    ):
        engine.save_checkpoint(folder, tag="one", wait=False)
        engine.checkpoint_written(wait=True)
    return threads


def test_a_rank_without_memory_writes_at_once(pool, tmp_path):
    threads = pool.run(2, save_without_memory, str(tmp_path))
    assert threads == [{"plait-checkpoint"}, {"MainThread"}]
    assert tags_in(tmp_path) == ["one"]


def fail_at_different_moments(rank, world):
    """Return the steps that raise a failure of which rank 1 learns after rank 0.

    Runs on every rank.
    """
    engine = engine_of(world)
    batch = batch_of(rank, world)
    failure = Future[Path]()
    engine._writer._running = engine._writer._unsettled = failure
    raising_steps = []
    for step in range(4):
        if step == 1 and rank == 0:
            failure.set_exception(CheckpointError("full"))
        if step == 1 and rank == 1:
            # Rank 0 waits in the step by then.
            threading.Timer(0.05, failure.set_exception, [CheckpointError("full")]).start()
        try:
            engine.train_batch([batch])
        except CheckpointError:
            raising_steps.append(step)
        assert engine.checkpoint_written() is None

    # A failure that no step has raised is raised by `close`.
    failure = Future[Path]()
    failure.set_exception(CheckpointError("full"))
    engine._writer._running = engine._writer._unsettled = failure
    with pytest.raises(CheckpointError, match="full"):
        engine.close()
    return raising_steps


def test_ranks_raise_a_failed_save_in_the_same_step(pool):
    """If one rank left the step, the others would wait in it."""
    assert pool.run(2, fail_at_different_moments) == [[1], [1]]
