"""Data loaders with DeepSpeed's interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from plait.data.split_rows import StreamPart, compare_stream
from plait.engine.engine import Engine
from plait.errors import CheckpointError, InputError


class RepeatingLoader:
    """Iterator that restarts a loader whenever it is exhausted."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            # An empty loader raises StopIteration again, which ends the iteration.
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class StreamLoader:
    """Micro-batches of this data-parallel rank from an iterable data set, in the data set's order.

    Every rank reads all samples. The ranks take turns, each with one micro-batch. If the last
    samples do not suffice for all ranks, samples are repeated, as in torch's DistributedSampler.
    With `drop_last`, the last samples are dropped instead.

    A script can pass `state_dict()` in `client_state` to `engine.save_checkpoint`. The state is the
    same on every rank and can be loaded on other layouts.
    """

    def __init__(
        self,
        data: IterableDataset[Any],
        engine: Engine,
        *,
        batch_size: int,
        drop_last: bool,
        **settings: Any,
    ) -> None:
        self._samples_per_round = batch_size * engine.dp_size
        device = compare_stream(data, device=engine.device, workers=settings["num_workers"])
        self._part = StreamPart(
            data,
            batch_size=batch_size,
            ranks=engine.dp_size,
            index=engine.dp_rank,
            drop_last=drop_last,
            repeats=True,
            device=device,
        )
        self._loader: DataLoader[Any] = DataLoader(
            self._part, batch_size=batch_size, drop_last=drop_last, **settings
        )
        self._epoch = 0
        self._samples_read = 0
        """Samples of the epoch that all ranks together have read."""
        self._resumes = False
        """True if the next pass continues an epoch of a loaded state."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch, or over its remainder after a state was loaded."""
        # A pass that was abandoned starts again, unless its position was loaded.
        if not self._resumes:
            self._samples_read = 0
        self._resumes = False
        self._part.set_epoch(self._epoch)
        self._part.skipped = self._samples_read
        for batch in self._loader:
            # Counted before the step, so that a checkpoint saved in the step does not repeat the
            # batch.
            self._samples_read += self._samples_per_round
            yield batch
        self._epoch += 1
        self._samples_read = 0

    def __len__(self) -> int:
        """Return the number of micro-batches of an epoch.

        Raises:
            TypeError: The data set has no length.
        """
        return math.ceil(len(self._part) / self._part.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch, and the number of samples that all ranks have read."""
        return {"epoch": self._epoch, "read": self._samples_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position from which the next pass continues.

        Raises:
            CheckpointError: The number of samples read is not a multiple of the number that all
                ranks together read per micro-batch.
        """
        if state["read"] % self._samples_per_round:
            raise CheckpointError(
                f"the saved position is after {state['read']} samples, which is not a multiple"
                f" of the {self._samples_per_round} samples that all ranks read per micro-batch"
                " now; keep micro-batch size x data-parallel ranks as in the saved run"
            )
        self._epoch = state["epoch"]
        self._samples_read = state["read"]
        self._resumes = True


def build_loader(
    engine: Engine,
    data: Dataset[Any],
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_size: int | None = None,
    sampler: Sampler[Any] | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    workers: int = 0,
    pin_memory: bool = True,
) -> DataLoader[Any] | StreamLoader:
    """Return a loader of this data-parallel rank's micro-batches.

    Collective for an iterable data set.

    Args:
        engine: Engine that reads the micro-batches.
        data: Data set. An iterable one is read in its own order, any other in the order of torch's
            DistributedSampler.
        collate_fn: Combines samples into a micro-batch.
        batch_size: Samples per micro-batch. If None, the engine's micro-batch size.
        sampler: Replaces the DistributedSampler.
        shuffle: Whether the DistributedSampler shuffles.
        drop_last: Whether to drop an incomplete last micro-batch.
        workers: Number of worker processes.
        pin_memory: Whether to pin micro-batches in host memory, for a GPU.

    Raises:
        InputError: The data set has no length and is not iterable, or a sampler or several workers
            are given for an iterable one.
    """
    batch_size = batch_size or engine.train_micro_batch_size_per_gpu()
    # `pin_memory` is True by default, and only copies to an accelerator use pinned memory.
    pin_memory = pin_memory and engine.device.type != "cpu"
    if isinstance(data, IterableDataset):
        if sampler is not None or workers > 1:
            argument = "sampler" if sampler is not None else f"{workers} workers"
            rule = (
                f"training_data of type {type(data).__name__} with {argument}: it is read in its"
                " own order, by one reader in every process"
            )
            raise InputError(
                f"{rule}; leave data_sampler out, and use at most 1 for num_local_io_workers"
            )
        return StreamLoader(
            data,
            engine,
            batch_size=batch_size,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=workers,
            pin_memory=pin_memory,
        )

    if not hasattr(data, "__len__"):
        raise InputError(
            f"training_data of type {type(data).__name__} has no length: ranks could not share it;"
            " pass a torch.utils.data.Dataset, an IterableDataset of torch, or a data set of the"
            " `datasets` library"
        )
    rank_sampler: Sampler[Any] = sampler or DistributedSampler(
        data, num_replicas=engine.dp_size, rank=engine.dp_rank, shuffle=shuffle
    )
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=rank_sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory,
    )
