"""Loaders of data as DeepSpeed makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from plait.data.split_rows import refuse_other_stream, refuse_split_stream
from plait.data.stream_part import StreamPart, is_of_datasets
from plait.engine.engine import Engine
from plait.errors import CheckpointError, InputError


class RepeatingLoader:
    """An iterator that begins a loader again at its end, for ever."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class StreamLoader:
    """Micro-batches of this data-parallel rank's samples of an iterable data set, in its own order.
    Every rank reads all of it, and they take turns with a micro-batch each; at the end samples are
    repeated where those left do not suffice for all ranks, as torch's DistributedSampler does, or
    dropped with `drop_last`.

    `state_dict()` belongs into `client_state` of `engine.save_checkpoint`: it is the same on every
    rank, and fits other layouts.
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
        self._round = batch_size * engine.dp_size
        compared = is_of_datasets(data) or bool(settings.get("num_workers"))
        self._part = StreamPart(
            data,
            batch_size=batch_size,
            ranks=engine.dp_size,
            index=engine.dp_rank,
            drop_last=drop_last,
            repeats=True,
            device=None if compared else engine.device,
        )
        self._loader: DataLoader[Any] = DataLoader(
            self._part, batch_size=batch_size, drop_last=drop_last, **settings
        )
        self._epoch = self._read = self._skipped = 0
        self._goes_on = False

    def __iter__(self) -> Iterator[Any]:
        """A pass over the data: the rest of one that was not read to its end when the state was
        saved, else a new one.
        """
        if not self._goes_on:
            self._read = 0
        self._goes_on = False
        self._part.set_epoch(self._epoch)
        self._part.skipped = self._read
        for batch in self._loader:
            self._read += self._round
            yield batch
        self._epoch = self._epoch + 1
        self._read = 0

    def __len__(self) -> int:
        """Micro-batches of a pass. Raises TypeError where the data has no length."""
        return math.ceil(len(self._part) / self._part.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of `epoch`."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: epoch, and samples of it that were read by all ranks."""
        return {"epoch": self._epoch, "read": self._read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next pass goes on from there. Raises CheckpointError where no whole number of
        micro-batches of all ranks was read.
        """
        if state["read"] % self._round:
            raise CheckpointError(
                f"the data was left after {state['read']} samples, and a micro-batch of all ranks"
                f" has {self._round} here; keep micro-batch times data-parallel ranks"
            )
        self._epoch, self._read, self._goes_on = state["epoch"], state["read"], True


def loader_of(
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
    """Micro-batches of this data-parallel rank's samples, in the order of torch's
    DistributedSampler; of a data set that is iterated in its own. Collective then. Raises
    InputError for what has neither a length nor an order.
    """
    if isinstance(data, IterableDataset):
        if sampler is not None or workers > 1:
            what = "sampler" if sampler is not None else f"{workers} workers"
            rule = (
                f"training_data of type {type(data).__name__} with {what}: it is read in its own"
                " order, by one reader in every process"
            )
            raise InputError(f"{rule}; leave data_sampler out, and num_local_io_workers at most 1")
        refuse_split_stream(data)
        if is_of_datasets(data) or workers:
            refuse_other_stream(data, device=engine.device, workers=workers)
        size = batch_size or engine.train_micro_batch_size_per_gpu()
        pin = pin_memory and engine.device.type != "cpu"
        return StreamLoader(
            data,
            engine,
            batch_size=size,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=workers,
            pin_memory=pin,
        )
    if not hasattr(data, "__len__"):
        raise InputError(
            f"training_data of type {type(data).__name__} has no length: ranks could not share it;"
            " pass a torch.utils.data.Dataset, an IterableDataset of torch, or a data set of the"
            " `datasets` library"
        )
    found: Sampler[Any] = sampler or DistributedSampler(
        data, num_replicas=engine.dp_size, rank=engine.dp_rank, shuffle=shuffle
    )
    return DataLoader(
        data,
        batch_size=batch_size or engine.train_micro_batch_size_per_gpu(),
        sampler=found,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory and engine.device.type != "cpu",
    )
