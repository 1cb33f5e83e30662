"""Refusal of data that is already split by rank, of which each rank would read a part of its part.

A sampler has fields that show the split. A data set has none, so the ranks compare the rows that
they read first.
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
"""Rows of an iterable data set that ranks compare."""
_FIELDS_OF_SPLIT = (
    ("num_replicas", "rank"),  # torch and its descendants
    ("num_processes", "process_index"),  # Accelerate and Transformers
    ("world_size", "rank"),
)
_REMEDY = (
    "let every rank have all rows in one order: leave out split_dataset_by_node, shard() and code"
    " that reads the rank, and give shuffle(), interleave_datasets() and generators of your own a"
    " seed"
)


def split_of(source: Any) -> tuple[str, int, int] | None:
    """Return (class, ranks, index) if a sampler or data set reads one rank's part, else None."""
    for ranks_field, index_field in _FIELDS_OF_SPLIT:
        ranks = getattr(source, ranks_field, None)
        index = getattr(source, index_field, None)
        if isinstance(ranks, int) and isinstance(index, int) and ranks > 1:
            return type(source).__name__, ranks, index
    return None


def split_sampler(batch_sampler: Any, *, ranks: int, index: int) -> bool:
    """Return whether a batch sampler yields only the batches of this data-parallel rank.

    Raises:
        InputError: It yields another rank's batches, or the class of its sampler is unknown.
    """
    source = batch_sampler
    while source is not None:
        split = split_of(source)
        if split is not None:
            name, given_ranks, given_index = split
            if isinstance(source, DistributedSampler) and (given_ranks, given_index) == (
                ranks,
                index,
            ):
                return True
            raise InputError(
                f"the DataLoader's {name} takes part {given_index} of {given_ranks}, and Plait "
                f"splits batches itself, part {index} of {ranks} for this data-parallel rank; "
                f"leave the {name} out, and pass shuffle=True to the DataLoader to shuffle"
            )
        source = getattr(source, "sampler", None) or getattr(source, "batch_sampler", None)
    return False


def refuse_split_stream(data: Any) -> None:
    """Raise InputError for an iterable data set whose fields show that it is one rank's part."""
    split = split_of(data)
    if split is not None:
        name, ranks, index = split
        part = f"part {index} of {ranks} already ({name})"
        raise InputError(f"the data set has {part}, and Plait would split it again; {_REMEDY}")


def refuse_other_rows(
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
    if not _several_ranks():
        return

    def compared() -> tuple[int, str]:
        count = len(data)
        numbers = sorted({0, min(1, count - 1), count // 2, count - 1}) if count else []
        rows = _DigestedRows(data)
        if workers and numbers:
            loader: DataLoader[str] = DataLoader(
                rows,
                batch_size=None,
                sampler=numbers,
                num_workers=1,
                multiprocessing_context=context,
            )
            return count, _joined(list(loader))
        return count, _joined([rows[number] for number in numbers])

    doing = "reading the first rows of the data set"
    # 8 bytes with the number of rows, and 32 bytes with a digest: all zero if rows are random.
    brings = lambda answer: answer[0].to_bytes(8, "little") + answer[1].encode()[:32]  # noqa: E731
    _, answers = together(compared, brings, device=device, doing=doing, raising=InputError)
    counts = [int.from_bytes(answer[:8], "little") for answer in answers]
    if len(set(counts)) > 1:
        shown = ", ".join(f"{count:,}" for count in counts[:8])
        rule = f"the ranks' numbers of rows differ ({shown}), so it is split by rank already"
        raise InputError(f"the data set: {rule}; {_REMEDY}")
    digests = {answer[8:40].rstrip(b"\0") for answer in answers}
    if b"" not in digests:
        _refuse_different(digests)


def refuse_other_stream(
    data: Any, *, device: torch.device, workers: int = 0, context: Any = None
) -> None:
    """Raise InputError if the first rows of an iterable data set differ between ranks.

    Collective over all ranks. The arguments are those of `refuse_other_rows`.
    """
    refuse_split_stream(data)
    if not _several_ranks():
        return

    def read() -> str:
        rows = _FirstRows(data)
        if not workers:
            return digest(list(rows))
        return digest(
            list(DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context=context))
        )

    refuse_other_digest(read, device=device)


def refuse_other_digest(read: Any, *, device: torch.device) -> None:
    """Raise InputError if `read()`, a digest of the first rows, differs between ranks.

    Collective over all ranks. An error of `read` is raised on all of them.
    """
    if not _several_ranks():
        return
    doing = "reading the first rows of the data set"
    _, digests = together(read, str.encode, device=device, doing=doing, raising=InputError)
    _refuse_different(set(digests))


def _refuse_different(digests: set[bytes]) -> None:
    """Raise InputError if the digests of the ranks differ."""
    if len(digests) > 1:
        raise InputError(
            "the data set: its first rows differ between ranks, so samples would be left out;"
            f" {_REMEDY}"
        )


def digest_of_rows(rows: list[Any]) -> str:
    """Return a digest of rows. An object of an unknown class counts by its class only."""
    return digest([_text_of(row) for row in rows])


class _DigestedRows(Dataset[str]):
    """Digests of the rows of a data set, or "" for a row that differs when it is read again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> str:
        digests = []
        for _ in range(2):
            with drawn_from("first rows", number):
                digests.append(digest_of_rows([self._data[number]]))
        return digests[0] if digests[0] == digests[1] else ""


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
    except (TypeError, ValueError):  # keys that are not strings, or a circular structure
        return type(row).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
