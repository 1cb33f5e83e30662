"""Data that is split by rank before Plait splits it: each rank would read a part of its part.

A sampler says it by its fields. A data set does not, so the ranks compare what they read first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from plait.checkpoint.agreement import together
from plait.data.cache import digest
from plait.data.draws import drawn_from
from plait.errors import InputError

_STREAMED_ROWS = 16
_FIELDS_OF_SPLIT = (
    ("num_replicas", "rank"),  # torch and its descendants
    ("num_processes", "process_index"),  # Accelerate and Transformers
    ("world_size", "rank"),
)
_REMEDY = (
    "let every rank have all rows in one order: leave out split_dataset_by_node, shard() and code that reads "
    "the rank, and give shuffle(), interleave_datasets() and generators of your own a seed"
)


def split_of(source: Any) -> tuple[str, int, int] | None:
    """Return (class, ranks, index) of a sampler or data set that takes one rank's part, else None."""
    for several, one in _FIELDS_OF_SPLIT:
        ranks, index = getattr(source, several, None), getattr(source, one, None)
        if isinstance(ranks, int) and isinstance(index, int) and ranks > 1:
            return type(source).__name__, ranks, index
    return None


def split_sampler(batch_sampler: Any, *, ranks: int, index: int) -> bool:
    """Return whether a batch sampler has this data-parallel rank's batches already.

    Raises:
        InputError: It takes a part that is not this rank's, or a kind of part that is not known.
    """
    source = batch_sampler
    while source is not None:
        found = split_of(source)
        if found is not None:
            name, given_ranks, given_index = found
            if isinstance(source, DistributedSampler) and (given_ranks, given_index) == (ranks, index):
                return True
            raise InputError(
                f"the DataLoader's {name} takes part {given_index} of {given_ranks}, and this process has part {index} of "
                f"{ranks} data-parallel ranks, which Plait takes itself; leave the {name} out: shuffle=True shuffles"
            )
        source = getattr(source, "sampler", None) or getattr(source, "batch_sampler", None)
    return False


def refuse_split_stream(data: Any) -> None:
    """Raise InputError for an iterable data set that says that it has one rank's part."""
    found = split_of(data)
    if found is not None:
        name, ranks, index = found
        raise InputError(f"the data set has part {index} of {ranks} already ({name}), and Plait would split it again; {_REMEDY}")


def refuse_other_rows(data: Any, *, device: torch.device, workers: int = 0, context: Any = None) -> None:
    """Raise InputError where a data set with a length has other rows on other ranks. Collective over all ranks.

    Rows are read twice, from the same random numbers. Where that gives two different rows, they cannot be compared.

    Args:
        data: The data set.
        device: Where the ranks' answers are gathered.
        workers: Of its loader. With some, the rows are read in a worker: what a data set opens at the first
            row must not be shared with workers that are forked later.
        context: Their multiprocessing context.
    """
    if not _several_ranks():
        return

    def compared() -> tuple[int, str]:
        count = len(data)
        numbers = sorted({0, min(1, count - 1), count // 2, count - 1}) if count else []
        rows = _DigestedRows(data)
        if workers and numbers:
            loader: DataLoader[str] = DataLoader(rows, batch_size=None, sampler=numbers, num_workers=1, multiprocessing_context=context)
            return count, _joined(list(loader))
        return count, _joined([rows[number] for number in numbers])

    doing = "reading the first rows of the data set"
    brings = lambda found: found[0].to_bytes(8, "little") + found[1].encode()[:32]  # noqa: E731
    _, everyone = together(compared, brings, device=device, doing=doing, raising=InputError)
    counts = [int.from_bytes(found[:8], "little") for found in everyone]
    if len(set(counts)) > 1:
        shown = ", ".join(f"{count:,}" for count in counts[:8])
        raise InputError(f"the data set: the ranks' numbers of rows differ ({shown}), so it is split by rank already; {_REMEDY}")
    rows_of = {found[8:40].rstrip(b"\0") for found in everyone}
    if len(rows_of) > 1 and b"" not in rows_of:
        raise InputError(f"the data set: its first rows differ between ranks, so samples would be left out; {_REMEDY}")


def refuse_other_stream(data: Any, *, device: torch.device, workers: int = 0, context: Any = None) -> None:
    """Raise InputError where an iterable data set begins with other rows on other ranks. Collective over all ranks."""
    refuse_split_stream(data)
    if not _several_ranks():
        return

    def read() -> str:
        rows = _FirstRows(data)
        if not workers:
            return digest(list(rows))
        return digest(list(DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context=context)))

    refuse_other_digest(read, device=device)


def refuse_other_digest(read: Any, *, device: torch.device) -> None:
    """Raise InputError where `read()`, a digest of the first rows, differs between ranks. Collective over all ranks."""
    if not _several_ranks():
        return
    doing = "reading the first rows of the data set"
    _, everyone = together(read, str.encode, device=device, doing=doing, raising=InputError)
    if len(set(everyone)) > 1:
        raise InputError(f"the data set: its first rows differ between ranks, so samples would be left out; {_REMEDY}")


def digest_of_rows(rows: list[Any]) -> str:
    """Return a digest of the content of rows; objects of unknown classes count by their class."""
    return digest([_text_of(row) for row in rows])


class _DigestedRows(Dataset[str]):
    """Digests of the rows of a data set, "" for a row that differs when it is read again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> str:
        found = []
        for _ in range(2):
            with drawn_from("first rows", number):
                found.append(digest_of_rows([self._data[number]]))
        return found[0] if found[0] == found[1] else ""


class _FirstRows(IterableDataset[str]):
    """Digests of the first rows of an iterable data set."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[str]:
        with drawn_from("first rows"):
            rows = list(islice(self._data, _STREAMED_ROWS))
        yield from (digest_of_rows([row]) for row in rows)


def _joined(digests: list[str]) -> str:
    return digest(digests) if all(digests) else ""


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _text_of(row: Any) -> str:
    try:
        return json.dumps(row, sort_keys=True, default=_plain)
    except (TypeError, ValueError):  # keys that are no texts, or a structure that holds itself
        return type(row).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
