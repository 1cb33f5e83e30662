"""Loaders of data as DeepSpeed makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from plait.engine.engine import Engine
from plait.errors import InputError


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
) -> DataLoader[Any]:
    """Micro-batches of this data-parallel rank's samples, in the order of torch's DistributedSampler. Raises InputError for a stream."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise InputError(
            "a data set without a length: ranks would all read the same of a stream; make a DataLoader of your own over the part of "
            "engine.plait.dp_rank"
        )
    found: Sampler[Any] = sampler or DistributedSampler(data, num_replicas=engine.dp_size, rank=engine.dp_rank, shuffle=shuffle)
    return DataLoader(
        data,
        batch_size=batch_size or engine.train_micro_batch_size_per_gpu(),
        sampler=found,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory and engine.device.type != "cpu",
    )
