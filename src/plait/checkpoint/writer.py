"""Asynchronous writes of checkpoints from copies in host memory.

Note [Asynchronous save]
    `begin` copies the tensors of the snapshot to host memory. A thread with a process group of its
    own then runs the save (Note [Life of a save] in `plait.checkpoint.save`) while training goes
    on. Only one checkpoint is written at a time, so there is at most one copy, and its buffers are
    reused.

    Ranks learn at different moments that a save ended. An error is therefore raised where all ranks
    are at the same point: in `raise_failed` after a step, or at the next save. A rank without
    memory for a copy writes in the training thread; the other ranks' threads wait for it.
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
from plait.comm.pending import AsyncMaximum
from plait.errors import CheckpointError, CommunicationError

_MAX_MEMORY_SHARE = 0.5
"""Share of the available host memory that all ranks of a machine together may use for copies."""
_FAILED = 2


class Writer:
    """Writes the checkpoints of one engine. See Note [Asynchronous save]."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._group: dist.ProcessGroup | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[Place] | None = None
        """Current save, until its result was returned or raised on this rank."""
        self._unsettled: Future[Place] | None = None
        """Current save, until all ranks know how it ended."""
        self._outcome: AsyncMaximum | None = None
        """Outcome of the save over all ranks, requested in the previous step on a GPU."""
        self._raised = False
        """True after this rank has raised the error of the save."""
        self._buffers: dict[str, torch.Tensor] = {}

    def begin(self, snapshot: Snapshot, *, stage: bool = True) -> None:
        """Start to write a checkpoint, after the previous one has been written. Collective.

        Args:
            snapshot: Part of the checkpoint that this rank writes.
            stage: Copy the tensors and write them asynchronously. False writes them before this
                call returns.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        self.wait()
        self._unsettled = None
        self._outcome = None
        self._raised = False
        if self._pool is None:
            # Collectives of two threads on one group could be ordered differently on each rank.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="plait-checkpoint")
            self._group = self._mesh.host_group()
        if not stage:
            written = Future[Place]()
            written.set_result(write(snapshot, self._group))
            self._running = written
            return
        if not self._has_memory(snapshot):
            self._running = self._unsettled = self._write_in_this_thread(snapshot)
            return
        # Staged in this thread: the next step changes the tensors.
        staged = replace(snapshot, tensors=self._stage(snapshot))
        self._running = self._unsettled = self._pool.submit(write, staged, self._group)

    def finished(self) -> Place | None:
        """Return the checkpoint that was written since the last call.

        None while it is being written, without one, and if it failed. `raise_failed` raises its
        error on all ranks.
        """
        running = self._running
        if running is None or not running.done() or running.exception() is not None:
            return None
        return self.wait()

    def raise_failed(self) -> None:
        """Raise the error of a failed asynchronous save on all ranks. Collective during a save.

        A rank that raised alone would leave the others waiting in the step. On a GPU the outcome is
        read one step later, so that no step waits for the device.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        writing = self._unsettled
        if writing is None:
            return
        ended = writing.done()
        state = int(ended)
        if ended and writing.exception() is not None and not self._raised:
            state = _FAILED
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        group = dist.group.WORLD if distributed else None
        outcome: AsyncMaximum | None = AsyncMaximum(state, self._mesh.device, group)
        if accelerator.is_accelerator(self._mesh.device):
            outcome, self._outcome = self._outcome, outcome
        largest_state = outcome.value() if outcome is not None else 0
        if not largest_state:
            return

        # One rank's save ended. The others end at once, because the last act of a save is
        # collective.
        self._unsettled = None
        if largest_state == _FAILED:
            self._running = None
            writing.result()

    def wait(self) -> Place | None:
        """Wait for the current save.

        Returns:
            The checkpoint, or None if no save is running.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        running = self._running
        self._running = None
        if running is None:
            return None
        try:
            return running.result()
        except BaseException:
            self._raised = True
            raise

    def close(self) -> None:
        """Finish the current save and end the thread.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._pool is not None:
            self._pool.shutdown()
        self._buffers.clear()
        self.wait()

    def _write_in_this_thread(self, snapshot: Snapshot) -> Future[Place]:
        # The error is raised later, at the same point as on the ranks that write in threads.
        written = Future[Place]()
        try:
            written.set_result(write(snapshot, self._group))
        except (CheckpointError, CommunicationError) as error:
            written.set_exception(error)
        return written

    def _has_memory(self, snapshot: Snapshot) -> bool:
        """Return True if the buffers that are missing for a copy fit into host memory."""
        existing = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
        free = free_host_bytes()
        if free is None:
            return True
        return snapshot.size - existing <= _MAX_MEMORY_SHARE * free / self._mesh.ranks_here

    def _stage(self, snapshot: Snapshot) -> dict[str, torch.Tensor]:
        """Copy the tensors to host memory, pinned if they are on a device."""
        has_device = self._mesh.device.type != "cpu"
        for name, tensor in snapshot.tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                pin = has_device and tensor.device.type != "cpu"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
                self._buffers[name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=True)
        if has_device:
            # Copies into pinned memory are asynchronous.
            torch.accelerator.synchronize()
        return {name: self._buffers[name] for name in snapshot.tensors}
