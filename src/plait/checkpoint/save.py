"""Writing of checkpoints, in the calling thread or in the background.

Note [Life of a save]
    1. `snapshot` selects the tensors that this rank writes. Replicated tensors are written by one
       rank only. No tensor is copied.
    2. Rank 0 creates an unpublished folder and writes a random token to it (`commit.begin`). The
       other ranks receive the token and open the folder that holds it (`commit.join`). The token
       distinguishes this folder from one that a killed save left under the same name. A shared file
       system may still list the old folder.
    3. Every rank writes its tensors, hashes them while they are written, and syncs the file. Its
       list of tensors (`00000.json`) is written last, so that a rank whose list exists has
       finished.
    4. Rank 0 gathers the hashes of these lists into `manifest.json`, publishes the folder, points
       LATEST to it, and only then deletes an older checkpoint of the same tag (`Commit.finish`).

    Steps 2 to 4 run in `run_on_all_ranks`, so an error of one rank is raised on all of them and
    rank 0 deletes the unfinished folder. Until LATEST is replaced, all earlier checkpoints can be
    loaded. Meanwhile, one of the same tag is named `.TAG.replaced`. If the process dies, the next
    save of the tag or `prune` deletes what it left.

Note [Asynchronous save]
    `Writer.begin` copies the tensors of the snapshot to host memory. A thread with its own process
    group then runs the save (Note [Life of a save]) while training continues. Only one checkpoint
    is written at a time, so there is at most one copy, and its buffers are reused.

    Ranks learn at different times that a save has ended. An error is therefore raised where all
    ranks are at the same point: in `raise_failed` after a step, or at the next save. A rank without
    memory for a copy writes in the training thread; the other ranks' threads wait for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plait._torch.tensors import local_tensor
from plait.checkpoint.commit import Commit, begin, join
from plait.checkpoint.folder import list_complete
from plait.checkpoint.format import FORMAT, LATEST, Manifest, RankManifest, rank_file, write_shards
from plait.checkpoint.places import Place, write_text
from plait.checkpoint.windows import ContentHash, Observer, TensorRecord, record_of, window_of
from plait.cluster import accelerator
from plait.cluster.host_memory import free_host_bytes
from plait.cluster.mesh import Mesh
from plait.comm.collectives import AsyncMaximum
from plait.comm.failures import run_on_all_ranks
from plait.comm.watch import WATCH
from plait.errors import CheckpointError, CommunicationError
from plait.hashing import seed_of, sha256_of

T = TypeVar("T")
VISIBLE_WITHIN_SECONDS = 5.0
"""Seconds to wait until all ranks see the folder that rank 0 created. File systems between machines
cache directory listings for a while.
"""
RANK_START = "rank."
"""Prefix of the names of tensors that belong to one rank, such as states of generators."""
_MAX_MEMORY_SHARE = 0.5
"""Share of the available host memory that all ranks of a machine together may use for copies."""
_FAILED = 2


@dataclass(frozen=True)
class Snapshot:
    """Part of a checkpoint that this rank writes.

    Unless the tensors were copied to host memory, they are those of the live model, and the
    snapshot must be written before the next step.
    """

    folder: Place
    tag: str
    mesh: Mesh
    tensors: Mapping[str, torch.Tensor]
    """Plain local tensors by name: shards to write, and the rank's own tensors under `rank.`."""
    written: Mapping[str, TensorRecord]
    """Records of the shards that this rank writes."""
    records: Mapping[str, TensorRecord]
    """Records of all tensors of the pipeline stage. Empty except on the stage's first rank."""
    values: Mapping[str, Any]
    """JSON values of the pipeline stage. Empty except on the stage's first rank."""
    metadata: Mapping[str, Any]
    """JSON values of the checkpoint. Those of rank 0 are written."""

    @property
    def size(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def snapshot(
    folder: Place,
    tag: str,
    *,
    mesh: Mesh,
    tensors: Mapping[str, torch.Tensor],
    rank_tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Snapshot:
    """Select the part of a checkpoint that this rank writes. No tensor is copied.

    Args:
        folder: Folder of checkpoints.
        tag: Name of the checkpoint in this folder.
        mesh: Mesh of the engine.
        tensors: Sharded or replicated tensors, by names that all ranks of a pipeline stage share.
        rank_tensors: Tensors that only this rank has.
        values: JSON values of the pipeline stage.
        metadata: JSON values of the checkpoint. Those of rank 0 are written.

    Raises:
        CheckpointError: The tag cannot name a folder.
    """
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST:
        raise CheckpointError(
            f"tag = {tag!r}: a tag names a folder, so it must not be empty or {LATEST}, contain"
            " '/', or start with '.'"
        )
    coordinates = mesh.coordinates
    records = {
        name: record_of(tensor).model_copy(update={"stages": (coordinates["pp"],)})
        for name, tensor in tensors.items()
    }
    written = {
        name: record for name, record in records.items() if record.is_written_by(coordinates)
    }
    local = {name: local_tensor(tensors[name]) for name in written}
    local |= {f"{RANK_START}{name}": tensor for name, tensor in rank_tensors.items()}

    if any(coordinates[axis] != 0 for axis in coordinates if axis != "pp"):
        # Lists of the stage's tensors and values are the same on all of its ranks; its first one
        # writes them.
        records = {}
        values = {}
    return Snapshot(folder, tag, mesh, local, written, records, values, metadata)


def write(rank_snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Place:
    """Write a checkpoint. Collective. See Note [Life of a save].

    Args:
        rank_snapshot: Part of the checkpoint that this rank writes.
        group: Group of all ranks with a backend for CPU tensors. None uses the default group with
            tensors on the mesh's device.

    Returns:
        The folder of the checkpoint, which is on the disk and named in LATEST.

    Raises:
        CheckpointError: A rank could not write its part; raised on all ranks. Earlier checkpoints
            are unchanged.
        CommunicationError: A rank did not answer in time.
    """
    return _Save(rank_snapshot, group).run()


class _Save:
    """Save of one checkpoint on this rank, in the steps of Note [Life of a save]."""

    def __init__(self, rank_snapshot: Snapshot, group: dist.ProcessGroup | None) -> None:
        self._snapshot = rank_snapshot
        self._folder = rank_snapshot.folder
        self._tag = rank_snapshot.tag
        self._mesh = rank_snapshot.mesh
        self._group = group
        self._device = self._mesh.device if group is None else torch.device("cpu")
        self._doing = f"checkpoint {self._folder / self._tag}"
        self._commit: Commit | None = None

    def run(self) -> Place:
        WATCH.name_group(self._group, f"all ranks, for {self._doing}")
        try:
            _, tokens = self._agree(self._make_folder, lambda token: token)
            token = tokens[0].rstrip(b"\0").decode()
            counted = self._tensors_of_earlier_stages()
            _, digests = self._agree(
                lambda: self._write_files(token, counted),
                lambda row: bytes.fromhex(row[0]) + bytes(row[1]) + bytes(row[2]),
            )
            self._agree(lambda: self._publish(digests))
        except CheckpointError:
            # Raised on all ranks, so none of them writes to the folder after this.
            if self._mesh.rank == 0 and self._commit is not None:
                self._commit.abandon()
            raise

        assert self._commit is not None
        return self._commit.target

    def _agree(
        self, work: Callable[[], T], row_of: Callable[[T], bytes] = lambda _: b""
    ) -> tuple[T, list[bytes]]:
        try:
            return run_on_all_ranks(
                work, row_of, device=self._device, activity=self._doing, group=self._group
            )
        except CommunicationError as error:
            # The group timed out. The files of the ranks that still write tell which disk is slow.
            missing = self._unwritten_files()
            if not missing:
                raise
            raise CommunicationError(
                f"{error}; not written yet: {', '.join(missing[:4])}; check whether a disk is slow"
                " or full"
            ) from error

    def _unwritten_files(self) -> list[str]:
        """Return the shard files that ranks have not finished. A rank writes its manifest last."""
        if self._commit is None:
            return []
        files = self._commit.files
        unwritten: list[str] = []
        for rank in range(self._mesh.layout.world_size):
            if not (files / rank_file(rank, "json")).exists():
                unwritten.append(str(files / rank_file(rank, "safetensors")))
        return unwritten

    def _make_folder(self) -> bytes:
        if self._mesh.rank != 0:
            return b""
        token = secrets.token_hex(16)
        self._commit = begin(self._folder, self._tag, token)
        return token.encode()

    def _write_files(self, token: str, counted: set[str]) -> tuple[str, ContentHash, ContentHash]:
        """Write the tensors and the manifest of this rank to the unpublished folder.

        Args:
            token: Token of the folder that rank 0 created.
            counted: Tensors that an earlier pipeline stage adds to the content hash.

        Returns:
            (sha256 of the rank's manifest, hash of shared tensors, hash of the rank's own tensors).
        """
        if self._commit is None:
            self._commit = _wait_and_join(self._folder, self._tag, token)
        content = ContentHash()
        rank_content = ContentHash()
        shards = write_shards(
            self._commit.files / rank_file(self._mesh.rank, "safetensors"),
            self._snapshot.tensors,
            self._observers(counted, content, rank_content),
        )
        rank_manifest = RankManifest(
            shards=shards,
            tensors=dict(self._snapshot.records),
            values=dict(self._snapshot.values),
        )
        text = rank_manifest.model_dump_json()
        write_text(self._commit.files / rank_file(self._mesh.rank, "json"), text)
        return sha256_of(text), content, rank_content

    def _publish(self, digests: list[bytes]) -> None:
        """Write the manifest from the hashes of all ranks, and commit. See `_write_files`."""
        if self._mesh.rank != 0:
            return
        assert self._commit is not None
        content = ContentHash()
        rank_content = ContentHash()
        for row in digests:
            # [sha256 of the rank's manifest (32), content hash (16), hash of its rank tensors (16)]
            content.add(row[32:48])
            rank_content.add(row[48:64])
        # Checkpoints are ordered by this number, because tags need not sort and file times may
        # change.
        newest = max(
            (checkpoint.manifest.sequence for checkpoint in list_complete(self._folder)), default=0
        )
        manifest = Manifest(
            format=FORMAT,
            tag=self._tag,
            sequence=newest + 1,
            degrees=self._mesh.layout.all_degrees,
            ranks=tuple(row[:32].hex() for row in digests),
            content=str(content),
            own_content=str(rank_content),
            metadata=dict(self._snapshot.metadata),
        )
        self._commit.finish(manifest.model_dump_json())

    def _observers(
        self, counted: set[str], content: ContentHash, rank_content: ContentHash
    ) -> dict[str, Observer]:
        """Return, for each tensor, an observer that adds the tensor to a hash.

        Over all ranks, every element of the checkpoint is added once.
        """
        coordinates = self._mesh.coordinates
        degrees = self._mesh.layout.all_degrees
        observers: dict[str, Observer] = {}
        for name, tensor in self._snapshot.tensors.items():
            record = self._snapshot.written.get(name)
            if record is None:
                observers[name] = rank_content.observer(
                    f"{self._mesh.rank}.{name}", record_of(tensor), window_of(tensor), is_first=True
                )
            elif name not in counted:
                observers[name] = content.observer(
                    name,
                    record,
                    record.window(coordinates, degrees),
                    is_first=record.begins_at(coordinates),
                )
        return observers

    def _tensors_of_earlier_stages(self) -> set[str]:
        """Return written tensors that an earlier pipeline stage also has, such as tied weights.

        The earlier stage adds them to the content hash. Collective.
        """
        names = {seed_of(name): name for name in self._snapshot.written}
        # Names are broadcast as hashes, which fit into int64.
        shared: set[str] = set()
        for stage in range(self._mesh.layout.pp - 1):
            leader = self._mesh.layout.rank(pp=stage)
            # The count is sent first, because the receivers allocate the hashes.
            count = torch.tensor([len(self._snapshot.records)], device=self._device)
            dist.broadcast(count, leader, group=self._group)
            if self._mesh.rank == leader:
                stage_hashes = torch.tensor(
                    [seed_of(name) for name in self._snapshot.records], device=self._device
                )
            else:
                stage_hashes = count.new_empty(int(count))
            dist.broadcast(stage_hashes, leader, group=self._group)

            if self._mesh.coordinates["pp"] > stage:
                shared |= {names[number] for number in stage_hashes.tolist() if number in names}
        return shared


def _wait_and_join(folder: Place, tag: str, token: str) -> Commit:
    """Wait until the folder that rank 0 created is visible, and return this rank's `Commit`.

    Raises:
        CheckpointError: The folder has not become visible in time.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while True:
        commit = join(folder, tag, token)
        if commit is not None:
            return commit
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"this machine does not see the folder that rank 0 created for {tag} in {folder};"
                " use a folder on a file system that all machines share, or a store's URL"
            )
        time.sleep(0.05)


class Writer:
    """Writer of the checkpoints of one engine. See Note [Asynchronous save]."""

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

    def begin(self, snapshot: Snapshot, *, asynchronous: bool = True) -> None:
        """Start writing a checkpoint after the previous one has been written. Collective.

        Args:
            snapshot: Part of the checkpoint that this rank writes.
            asynchronous: Whether to copy the tensors to host memory and to write them while the
                training goes on. False writes them before this call returns.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        # The buffers of the previous save are reused.
        self.wait()
        self._unsettled = None
        self._outcome = None
        self._raised = False
        if self._pool is None:
            # Collectives of two threads on one group could be ordered differently on each rank.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="plait-checkpoint")
            self._group = self._mesh.host_group()
        if not asynchronous:
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
        """Return the checkpoint that was finished since the last call, or None.

        After a failed save the result is None, and `raise_failed` raises the error on all ranks.
        """
        running = self._running
        if running is None or not running.done() or running.exception() is not None:
            return None
        return self.wait()

    def raise_failed(self) -> None:
        """Raise the error of a failed asynchronous save on all ranks. Collective during a save.

        A rank that raised the error alone would leave the other ranks waiting in the step. On a GPU
        the outcome is read one step later, so that no step waits for the device.

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

        # One rank's save ended. The others end at once, because the last operation of a save
        # is collective.
        self._unsettled = None
        if largest_state == _FAILED:
            self._running = None
            writing.result()

    def wait(self) -> Place | None:
        """Wait until the save that is running ends.

        Returns:
            The checkpoint, or None if no save is running.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        running = self._running
        # Before the result: an error is raised once.
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
        """Return True if the buffers that a copy still needs fit into host memory."""
        existing = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
        free = free_host_bytes()
        if free is None:
            return True
        # The other ranks of this machine copy at the same time.
        return snapshot.size - existing <= _MAX_MEMORY_SHARE * free / self._mesh.local_world_size

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
