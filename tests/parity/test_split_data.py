"""Data that is split by rank before Plait sees it: every row is read once, or the split is refused by name."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from plait.errors import InputError
from tests.parity import trainers

ROWS = 16


class Rows(Dataset[Any]):
    """Some rows of the data; `noise` adds to a row what another reading does not."""

    def __init__(self, rows, *, noise=False):
        self.rows, self.noise = rows, random.Random() if noise else None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = {"row": torch.tensor(self.rows[number]), "drawn": torch.rand(())}
        if self.noise is not None:
            row["noise"] = torch.tensor(self.noise.random())
        return row


class Stream(IterableDataset[Any]):
    """The same, in their order and without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from ({"row": torch.tensor(row), "drawn": torch.rand(())} for row in self.rows)


class OnePass(IterableDataset[Any]):
    """A stream that does not begin again."""

    def __init__(self, rows):
        self.rows = iter([{"row": torch.tensor(row)} for row in rows])

    def __iter__(self):
        return self.rows


class Mine(Sampler[int]):
    """A sampler whose order depends on the rank, and does not say so."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def stream_of_datasets(rows):
    from datasets import Dataset as Rows_

    return Rows_.from_dict({"row": rows}).to_iterable_dataset(num_shards=4)


def loader_of(kind, rank, world, **settings):
    from datasets.distributed import split_dataset_by_node

    everything = list(range(ROWS))
    own, half = everything[rank::world], everything[: ROWS // 2]
    data: Any = Rows(everything)
    if kind == "distributed sampler":
        settings["sampler"] = DistributedSampler(data, world, rank, shuffle=False)
    elif kind == "sampler of other ranks":
        settings["sampler"] = DistributedSampler(data, 2 * world, rank, shuffle=False)
    elif kind == "own sampler":
        settings["sampler"] = Mine(own)
    elif kind == "equal sampler":
        settings["sampler"] = Mine(everything[::-1])
    elif kind == "noise":
        data = Rows(everything, noise=True)
    elif kind == "own rows":
        data = Rows(own)
    elif kind == "fewer rows":
        data = Rows(half if rank else everything)
    elif kind == "stream":
        data = Stream(everything)
    elif kind == "one pass":
        data = OnePass(everything)
    elif kind == "own stream":
        data = Stream(own)
    elif kind == "split stream":
        data = split_dataset_by_node(stream_of_datasets(everything), rank, world)
    elif kind == "split rows":
        from datasets import Dataset as OfDatasets

        data = split_dataset_by_node(OfDatasets.from_dict({"row": everything}), rank, world)
    return DataLoader(data, batch_size=2, **settings)


def rows_of(batches):
    return [int(row) for batch in batches for row in batch["row"]]


def in_a_loop(rank, world, kind):
    """The rows that this rank reads. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Accelerator

        torch.manual_seed(rank)
        accelerator = Accelerator(cpu=True)
        try:
            return rows_of(accelerator.prepare(loader_of(kind, rank, world)))
        except InputError as error:
            return str(error)


USED = ["plain", "distributed sampler", "equal sampler", "noise", "stream", "one pass"]


@pytest.mark.parametrize("kind", USED)
def test_a_loop_reads_every_row_once(pool, kind):
    read = pool.run(2, in_a_loop, kind)
    assert sorted(row for rows in read for row in rows) == list(range(ROWS)), read


REFUSED = {
    "sampler of other ranks": "DistributedSampler takes part 0 of 4",
    "own sampler": "first rows differ between ranks",
    "own rows": "first rows differ between ranks",
    "fewer rows": "numbers of rows differ (16, 8)",
    "own stream": "first rows differ between ranks",
    "split stream": "first rows differ between ranks",
    "split rows": "first rows differ between ranks",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_split_is_refused(pool, kind):
    said = pool.run(2, in_a_loop, kind)
    assert REFUSED[kind] in said[0] and all(isinstance(words, str) for words in said)


def in_the_trainer(rank, world, kind, workers):
    """The rows that this rank trains on. Runs in a worker."""
    with trainers.launched(rank, world), tempfile.TemporaryDirectory() as folder:
        from plait.hf import Trainer, TrainingArguments

        seen: list[int] = []

        class Reading(Trainer):
            def get_train_dataloader(self):
                return self.accelerator.prepare(loader_of(kind, rank, world, num_workers=workers))

            def compute_loss(self, model, inputs, *args, **kwargs):
                seen.extend(inputs["row"].tolist())
                return model.weight.sum()

        if workers:  # the pool's processes are daemons, which may have no children
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        made = torch.nn.Linear(2, 1)
        settings = trainers.arguments(
            TrainingArguments,
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            max_steps=ROWS // 2 // world,
            remove_unused_columns=False,
            include_num_input_tokens_seen="no",
        )
        try:
            Reading(model=made, args=settings, train_dataset=Rows([0])).train()
        except InputError as error:
            return str(error)
        return seen


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("distributed sampler", 0), ("equal sampler", 0), ("stream", 0), ("noise", 1)],
)
def test_the_trainer_reads_every_row_once(pool, kind, workers):
    read = pool.run(2, in_the_trainer, kind, workers)
    assert sorted(row for rows in read for row in rows) == list(range(ROWS)), read


@pytest.mark.parametrize(
    ("kind", "workers"), [("own rows", 0), ("own rows", 1), ("own stream", 0), ("own stream", 1)]
)
def test_the_trainer_refuses_another_split(pool, kind, workers):
    said = pool.run(2, in_the_trainer, kind, workers)
    assert all("first rows differ between ranks" in words for words in said), said
