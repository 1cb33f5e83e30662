"""Data that is split by rank before Plait sees it: rows are read once, or the split is refused."""

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
ALL_ROWS = list(range(ROWS))


class Rows(Dataset[Any]):
    """Some rows. With `noise`, each reading of a row has another random number."""

    def __init__(self, rows, *, noise=False):
        self.rows = rows
        self.noise = random.Random() if noise else None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = {"row": torch.tensor(self.rows[index]), "drawn": torch.rand(())}
        if self.noise is not None:
            row["noise"] = torch.tensor(self.noise.random())
        return row


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from ({"row": torch.tensor(row), "drawn": torch.rand(())} for row in self.rows)


class OnePass(IterableDataset[Any]):
    """A stream that can be read once."""

    def __init__(self, rows):
        self.iterator = iter([{"row": torch.tensor(row)} for row in rows])

    def __iter__(self):
        return self.iterator


class FixedOrder(Sampler[int]):
    """A sampler with a given order, which can differ between ranks."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def dataset_of(kind, rank, world):
    from datasets import Dataset as LibraryDataset
    from datasets.distributed import split_dataset_by_node

    rows_of_rank = ALL_ROWS[rank::world]
    library_rows = LibraryDataset.from_dict({"row": ALL_ROWS})
    match kind:
        case "noise":
            return Rows(ALL_ROWS, noise=True)
        case "own rows":
            return Rows(rows_of_rank)
        case "fewer rows":
            return Rows(ALL_ROWS[: ROWS // 2] if rank else ALL_ROWS)
        case "stream":
            return Stream(ALL_ROWS)
        case "one pass":
            return OnePass(ALL_ROWS)
        case "own stream":
            return Stream(rows_of_rank)
        case "split stream":
            return split_dataset_by_node(library_rows.to_iterable_dataset(4), rank, world)
        case "split rows":
            return split_dataset_by_node(library_rows, rank, world)
    return Rows(ALL_ROWS)


def loader_of(kind, rank, world, **settings):
    data: Any = dataset_of(kind, rank, world)
    samplers = {
        "distributed sampler": lambda: DistributedSampler(data, world, rank, shuffle=False),
        "sampler of other ranks": lambda: DistributedSampler(data, 2 * world, rank, shuffle=False),
        "own sampler": lambda: FixedOrder(ALL_ROWS[rank::world]),
        "equal sampler": lambda: FixedOrder(ALL_ROWS[::-1]),
    }
    sampler = samplers[kind]() if kind in samplers else None
    return DataLoader(data, batch_size=2, sampler=sampler, **settings)


def read_in_a_loop(rank, world, kind):
    """Return the rows that this rank reads, or the message. Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Accelerator

        torch.manual_seed(rank)
        accelerator = Accelerator(cpu=True)
        try:
            batches = list(accelerator.prepare(loader_of(kind, rank, world)))
        except InputError as error:
            return str(error)
        return torch.cat([batch["row"] for batch in batches]).tolist()


@pytest.mark.parametrize(
    "kind", ["plain", "distributed sampler", "equal sampler", "noise", "stream", "one pass"]
)
def test_a_loop_reads_every_row_once(pool, kind):
    first, second = pool.run(2, read_in_a_loop, kind)
    assert sorted(first + second) == ALL_ROWS, (first, second)


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
    first, second = pool.run(2, read_in_a_loop, kind)
    assert REFUSED[kind] in first
    assert isinstance(second, str)


def read_in_the_trainer(rank, world, kind, workers):
    """Return the rows that this rank trains on, or the message. Runs on every rank."""
    with trainers.launched(rank, world), tempfile.TemporaryDirectory() as folder:
        from plait.hf import Trainer, TrainingArguments

        rows: list[int] = []

        class ReadingTrainer(Trainer):
            def get_train_dataloader(self):
                return self.accelerator.prepare(loader_of(kind, rank, world, num_workers=workers))

            def compute_loss(self, model, inputs, *args, **kwargs):
                rows.extend(inputs["row"].tolist())
                return model.weight.sum()

        if workers:
            # The processes of the pool are daemons, which may have no children.
            process: Any = multiprocessing.current_process()
            process._config["daemon"] = False
        arguments = trainers.arguments(
            TrainingArguments,
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            max_steps=ROWS // 2 // world,
            remove_unused_columns=False,
            include_num_input_tokens_seen="no",
        )
        try:
            ReadingTrainer(torch.nn.Linear(2, 1), arguments, train_dataset=Rows([0])).train()
        except InputError as error:
            return str(error)
        return rows


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("distributed sampler", 0), ("equal sampler", 0), ("stream", 0), ("noise", 1)],
)
def test_the_trainer_reads_every_row_once(pool, kind, workers):
    first, second = pool.run(2, read_in_the_trainer, kind, workers)
    assert sorted(first + second) == ALL_ROWS, (first, second)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["own rows", "own stream"])
def test_the_trainer_refuses_another_split(pool, kind, workers):
    for message in pool.run(2, read_in_the_trainer, kind, workers):
        assert "first rows differ between ranks" in message
