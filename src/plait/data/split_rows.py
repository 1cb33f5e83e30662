"""Division of a data set between data-parallel ranks, and checks that it is not divided already.

A sampler has fields that show the split. A map-style data set has none, so the ranks compare the
first rows that they read.

Ranks that share a batch, such as pipeline stages and tensor-parallel ranks, each read it
themselves. The states of their random generators may differ, because dropout draws from these
generators. A collator that masks tokens at random could then give each of these ranks a different
batch. `seeded_generators` gives collators the same random numbers on all of them.

`StreamPart` is a rank's part of an iterable data set, whose length may be unknown. Batches are
formed as a single process forms them, and distributed in rounds of one batch per rank.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from plait.comm.failures import run_on_all_ranks
from plait.data.cache import digest
from plait.errors import InputError
from plait.hashing import seed_of

_COMPARED_ROWS = 16
"""Number of rows of an iterable data set that ranks compare."""
_SPLIT_FIELDS = (
    ("num_replicas", "rank"),  # torch and subclasses of its samplers
    ("num_processes", "process_index"),  # Accelerate and Transformers
    ("world_size", "rank"),
)
"""Names of the attributes with the number of ranks and the index of a rank."""
_REMEDY = (
    "let every rank have all rows in one order: leave out split_dataset_by_node, shard() and code"
    " that reads the rank, and give shuffle(), interleave_datasets() and generators of your own a"
    " seed"
)


@contextmanager
def seeded_generators(*seed_parts: object) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU), and restore their states at exit."""
    seed = seed_of(" ".join(map(str, seed_parts)))
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # torch.manual_seed would also seed the generators of the devices, which are not restored.
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def split_of(source: Any) -> tuple[str, int, int] | None:
    """Return (class name, number of ranks, index) of a split sampler or data set, or None."""
    for ranks_field, index_field in _SPLIT_FIELDS:
        ranks = getattr(source, ranks_field, None)
        index = getattr(source, index_field, None)
        if isinstance(ranks, int) and isinstance(index, int) and ranks > 1:
            return type(source).__name__, ranks, index
    return None


def split_sampler(batch_sampler: Any, *, ranks: int, index: int) -> bool:
    """Return whether a batch sampler yields only the batches of this data-parallel rank.

    Raises:
        InputError: The sampler yields another rank's batches, or its class is unknown.
    """
    source = batch_sampler
    while source is not None:
        split = split_of(source)
        if split is not None:
            name, sampler_ranks, sampler_index = split
            matches = (sampler_ranks, sampler_index) == (ranks, index)
            if matches and isinstance(source, DistributedSampler):
                return True
            raise InputError(
                f"the DataLoader's {name} takes part {sampler_index} of {sampler_ranks}, and Plait "
                f"splits batches itself, part {index} of {ranks} for this data-parallel rank; "
                f"leave the {name} out, and pass shuffle=True to the DataLoader to shuffle"
            )
        source = getattr(source, "sampler", None) or getattr(source, "batch_sampler", None)
    return False


def refuse_differing_rows(
    data: Any, *, device: torch.device, workers: int = 0, context: Any = None
) -> None:
    """Raise InputError if the rows of a data set with a length differ between ranks.

    Collective over all ranks. Each compared row is read twice, with the same random numbers. If the
    two differ, the data set is random and ranks are not compared.

    Args:
        data: The data set.
        device: Device of the collective.
        workers: Number of workers of its loader. If there are any, a worker reads the rows: files
            that a data set opens at the first row must not be shared with workers that are forked
            later.
        context: The workers' multiprocessing context.
    """
    if not _has_several_ranks():
        return

    def read() -> tuple[int, str]:
        count = len(data)
        if not count:
            return 0, _digest_of_digests([])
        numbers = sorted({0, min(1, count - 1), count // 2, count - 1})
        rows = _RowDigests(data)
        if not workers:
            # A loader would draw a random number in this process.
            return count, _digest_of_digests([rows[number] for number in numbers])
        loader: DataLoader[str] = DataLoader(
            rows,
            batch_size=None,
            sampler=numbers,
            num_workers=1,
            multiprocessing_context=context,
        )
        return count, _digest_of_digests(list(loader))

    def pack(answer: tuple[int, str]) -> bytes:
        # 8 bytes with the number of rows, and 32 bytes with a digest: all zero if rows are random.
        count, rows_digest = answer
        return count.to_bytes(8, "little") + rows_digest.encode()[:32]

    activity = "reading the first rows of the data set"
    _, answers = run_on_all_ranks(
        read, pack, device=device, activity=activity, error_class=InputError
    )
    counts = [int.from_bytes(answer[:8], "little") for answer in answers]
    if len(set(counts)) > 1:
        shown = ", ".join(f"{count:,}" for count in counts[:8])
        raise InputError(
            f"the data set: the ranks' numbers of rows differ ({shown}), so it is split by rank"
            f" already; {_REMEDY}"
        )
    digests = {answer[8:40].rstrip(b"\0") for answer in answers}
    if b"" not in digests:
        _refuse_different(digests)


def compare_stream(
    data: Any, *, device: torch.device, workers: int, context: Any = None
) -> torch.device | None:
    """Check that an iterable data set is not split by rank already.

    Collective over all ranks. The first rows of a data set of the library `datasets` are compared
    here, because such a data set restarts whenever it is read. For any other data set, `StreamPart`
    compares the first rows while it reads them. This is not possible in workers, because they run
    no collectives. With workers, the first rows of any data set are therefore compared here.

    Args:
        data: The data set.
        device: Device of the collective.
        workers: Number of workers of its loader.
        context: The workers' multiprocessing context.

    Returns:
        The device if the first rows have yet to be compared, by `StreamPart`. None otherwise.

    Raises:
        InputError: Fields of the data set show that it is one rank's part, or the first rows differ
            between ranks.
    """
    split = split_of(data)
    if split is not None:
        name, ranks, index = split
        raise InputError(
            f"the data set has part {index} of {ranks} already ({name}), and Plait would split it"
            f" again; {_REMEDY}"
        )
    is_of_datasets = type(data).__module__.partition(".")[0] == "datasets"
    if not is_of_datasets and not workers:
        return device

    def read() -> str:
        rows = _FirstRowDigests(data)
        if not workers:
            return digest(list(rows))
        loader: DataLoader[str] = DataLoader(
            rows, batch_size=None, num_workers=1, multiprocessing_context=context
        )
        return digest(list(loader))

    refuse_differing_digest(read, device=device)
    return None


def refuse_differing_digest(read: Any, *, device: torch.device) -> None:
    """Raise InputError if the digests that `read()` returns differ between ranks.

    Collective over all ranks. An error of `read` is raised on all of them.
    """
    if not _has_several_ranks():
        return
    activity = "reading the first rows of the data set"
    _, digests = run_on_all_ranks(
        read, str.encode, device=device, activity=activity, error_class=InputError
    )
    _refuse_different(set(digests))


def _refuse_different(digests: set[bytes]) -> None:
    """Raise InputError if the digests of the ranks differ."""
    if len(digests) > 1:
        raise InputError(
            "the data set: its first rows differ between ranks, so samples would be left out;"
            f" {_REMEDY}"
        )


def digest_of_rows(rows: list[Any]) -> str:
    """Return a digest of rows. Objects of unknown classes contribute only their class name."""
    return digest([_row_text(row) for row in rows])


class _RowDigests(Dataset[str]):
    """Digests of the rows of a data set, or "" for a row that differs when it is read again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> str:
        digests = []
        for _ in range(2):
            with seeded_generators("first rows", number):
                digests.append(digest_of_rows([self._data[number]]))
        return digests[0] if digests[0] == digests[1] else ""


class _FirstRowDigests(IterableDataset[str]):
    """Digests of the first rows of an iterable data set."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[str]:
        with seeded_generators("first rows"):
            rows = list(islice(self._data, _COMPARED_ROWS))
        for row in rows:
            yield digest_of_rows([row])


def _digest_of_digests(digests: list[str]) -> str:
    """Return one digest for several rows, or "" if a row is random."""
    return digest(digests) if all(digests) else ""


def _has_several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _row_text(row: Any) -> str:
    try:
        return json.dumps(row, sort_keys=True, default=_plain_value)
    except (TypeError, ValueError):
        # Keys have different types, or the structure is circular.
        return type(row).__name__


def _plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    if hasattr(value, "tolist"):
        return value.tolist()
    return type(value).__name__


class RoundPlan:
    """Record of the ranks that have a batch of their own in each round of an epoch.

    Attributes:
        ranks: Number of data-parallel ranks.
    """

    ranks: int
    _last_round: tuple[int, int] | None = None
    """Number of an incomplete last round, and number of its batches."""

    def samples(self, position: int) -> int | None:
        """Return the number of samples in this rank's batch at a position of the epoch.

        Returns:
            None if this equals the number of rows of the batch. A collator may make one row of
            several samples.
        """
        return None

    def present(self, position: int) -> int:
        """Return the number of ranks whose batch at a position is not a filler.

        The position must have been read."""
        if self._last_round is not None and position == self._last_round[0]:
            return self._last_round[1]
        return self.ranks

    @property
    def present_last(self) -> int:
        """Number of ranks with a batch of their own at the end of an epoch that was read."""
        return self._last_round[1] if self._last_round is not None else self.ranks


class StreamPart(RoundPlan, IterableDataset[Any]):
    """Part of an iterable data set that one data-parallel rank trains on.

    Every rank reads the full data set.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        ranks: int,
        index: int,
        drop_last: bool,
        repeats: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Create the part of one rank.

        Args:
            dataset: The iterable data set that all ranks read.
            batch_size: Samples per batch of a rank.
            ranks: Number of data-parallel ranks.
            index: This rank's index among them.
            drop_last: Whether the last samples are left out if they do not fill a batch per rank.
            repeats: Whether samples are repeated if the last ones do not suffice for all ranks.
                Otherwise a rank without a batch gets the batch of another rank.
            device: Device of the collectives that compare the first samples between ranks, as
                `compare_stream` returns it. None: no comparison.
        """
        self.dataset = dataset
        self.batch_size = batch_size
        self.ranks = ranks
        self.index = index
        self.drop_last = drop_last
        self.repeats = repeats
        self._device = device
        self.epoch = 0
        self.skipped = 0
        """Number of samples, over all ranks, that the next pass reads and leaves out."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of shuffled data sets."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        samples = len(self.dataset)
        samples_per_round = self.batch_size * self.ranks
        if self.drop_last:
            return (samples // samples_per_round) * self.batch_size
        return math.ceil(samples / samples_per_round) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self._last_round = None
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)

        size = self.batch_size
        round_number = 0
        round_samples: list[Any] = []
        samples: Iterator[Any] = islice(self.dataset, self.skipped, None)
        if self._device is not None and get_worker_info() is None:
            samples = chain(self._compare_first_round(samples), samples)
        for sample in samples:
            round_samples.append(sample)
            if len(round_samples) == size * self.ranks:
                yield from round_samples[self.index * size : (self.index + 1) * size]
                round_samples = []
                round_number += 1

        if not round_samples or self.drop_last:
            return
        if self.ranks > 1 and (self.repeats or get_worker_info() is not None):
            # The training process cannot read `_last_round` from a worker, so samples are repeated
            # as Accelerate does.
            filled = round_samples * math.ceil(size * self.ranks / len(round_samples))
            yield from filled[self.index * size : (self.index + 1) * size]
            return
        self._last_round = round_number, math.ceil(len(round_samples) / size)
        # A rank without samples gets the first batch, because steps are collective.
        batch = round_samples[self.index * size : (self.index + 1) * size]
        yield from batch or round_samples[:size]

    def _compare_first_round(self, samples: Iterator[Any]) -> list[Any]:
        """Return the samples of the first round after comparing them between ranks.

        Collective over all ranks. All ranks read the samples with the same random numbers, and only
        once: a data set may read a stream that cannot start over.
        """
        assert self._device is not None
        first_round: list[Any] = []

        def read() -> str:
            with seeded_generators("first rows", self.epoch):
                first_round.extend(islice(samples, self.batch_size * self.ranks))
            return digest_of_rows(first_round)

        refuse_differing_digest(read, device=self._device)
        # Once is enough: later epochs read the same data set.
        self._device = None
        return first_round
