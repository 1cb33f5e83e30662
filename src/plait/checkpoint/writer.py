"""Writing checkpoints beside the training: a copy is staged in host memory, and a thread with a
process group of its own writes it.

One checkpoint is written at a time, so that at most one copy is in memory; its buffers are used
again. Ranks learn at different moments that it ended, so an error is raised where all of them are
at the same place: at the next step or save. A rank without room for a copy writes in the training
thread, and the others wait for it at the end of theirs.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist

from plait.checkpoint.places import Place
from plait.checkpoint.save import Snapshot, write
from plait.cluster import accelerator
from plait.cluster.host_memory import free_host_bytes
from plait.cluster.mesh import Mesh
from plait.comm.largest import Largest
from plait.errors import CheckpointError, CommunicationError

_SHARE = 0.5
"""Of the available host memory, which all ranks of a machine together may stage."""


_FAILED = 2


class Writer:
    """For one engine."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._group: dist.ProcessGroup | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[Place] | None = None
        self._unsettled: Future[Place] | None = None
        """What was begun, until all ranks know how it ended."""
        self._asked: Largest | None = None
        """How it ended, asked in the step before."""
        self._raised = False
        """Whether its error was raised here."""
        self._buffers: dict[str, torch.Tensor] = {}

    def begin(self, taken: Snapshot, *, stage: bool = True) -> None:
        """Copy the tensors, and write them while training goes on. The checkpoint before is waited
        for. `stage` False: write now. Collective. Raises CheckpointError for the one before.
        """
        self.wait()
        self._unsettled = None
        self._asked = None
        self._raised = False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="plait-checkpoint")
            self._group = self._mesh.host_group()
        if not stage:
            written = Future[Place]()
            written.set_result(write(taken, self._group))
            self._running = written
            return
        if not self._has_room(taken):
            self._running = self._unsettled = self._written_here(taken)
            return
        self._running = self._unsettled = self._pool.submit(
            write, replace(taken, tensors=self._staged(taken)), self._group
        )

    def finished(self) -> Place | None:
        """The checkpoint that was written since the last call; None while it is being written,
        where there was none, and where it failed, which `raise_failed` tells all ranks.
        """
        done = (
            self._running is not None and self._running.done() and self._running.exception() is None
        )
        return self.wait() if done else None

    def raise_failed(self) -> None:
        """Raise CheckpointError, on all ranks, if the checkpoint that was being written has failed.
        Collective, while one is written: a rank that raised alone would leave the others in the
        step. A device is not waited for: there the answer is read a step later.
        """
        writing = self._unsettled
        if writing is None:
            return
        ended = writing.done()
        state = (
            _FAILED
            if ended and writing.exception() is not None and not self._raised
            else int(ended)
        )
        several = dist.is_initialized() and dist.get_world_size() > 1
        asked: Largest | None = Largest(
            state, self._mesh.device, dist.group.WORLD if several else None
        )
        if accelerator.is_one(self._mesh.device):
            asked, self._asked = self._asked, asked
        everywhere = asked.value() if asked is not None else 0
        if not everywhere:
            return
        self._unsettled = None  # it ended everywhere, or does at once: its last act is collective
        if everywhere == _FAILED:
            self._running = None
            writing.result()

    def wait(self) -> Place | None:
        """`finished`, when it is."""
        running = self._running
        self._running = None
        try:
            return running.result() if running is not None else None
        except BaseException:
            self._raised = True
            raise

    def close(self) -> None:
        """End the thread; what it writes is finished first. Raises CheckpointError where it could
        not be written.
        """
        if self._pool is not None:
            self._pool.shutdown()
        self._buffers.clear()
        self.wait()

    def _written_here(self, taken: Snapshot) -> Future[Place]:
        """What other ranks have of their threads: an error is raised later, with them."""
        written = Future[Place]()
        try:
            written.set_result(write(taken, self._group))
        except (CheckpointError, CommunicationError) as error:
            written.set_exception(error)
        return written

    def _has_room(self, taken: Snapshot) -> bool:
        """Of new buffers; those that are there are used again."""
        have = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
        free = free_host_bytes()
        return free is None or taken.size - have <= _SHARE * free / self._mesh.ranks_here

    def _staged(self, taken: Snapshot) -> dict[str, torch.Tensor]:
        pinned = self._mesh.device.type != "cpu"
        for name, tensor in taken.tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                pin = pinned and tensor.device.type != "cpu"
                buffer = self._buffers[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=pin
                )
            buffer.copy_(tensor.detach(), non_blocking=True)
        if pinned:
            torch.accelerator.synchronize()
        return {name: self._buffers[name] for name in taken.tensors}
