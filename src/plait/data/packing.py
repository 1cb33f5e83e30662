"""Tokenised documents on disk, and fixed-length sequences cut out of them.

Documents are joined to one stream of tokens, with an end-of-text token after each text, written
once, and read through a memory map: the size of the text does not matter to the memory of a
process. `Sequences` cuts the stream wherever a sequence ends; `Documents` keeps them whole.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from plait.data.tokenizer import is_held_out, vocabulary_size
from plait.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "plait tokens 2"
IGNORED = -100
"""The label of a position that is not scored, as in PyTorch and Transformers."""
_BATCH_CHARACTERS = 1 << 20
Array = np.ndarray[Any, Any]


Encode = Callable[[str], tuple[list[int], list[bool]]]
"""The text of a row -> its tokens, and for each whether it is scored."""


@dataclass(frozen=True)
class Stream:
    """The documents of a split, one after the other."""

    tokens: Array
    """uint16 or uint32 [tokens]."""
    ends: Array
    """uint64 [documents]: the position after the last token of each."""
    scored: Array | None = None
    """uint8 [tokens]: 1 where the loss counts a token; None where it counts all."""

    def __len__(self) -> int:
        return len(self.tokens)

    def parted(self, at: int) -> tuple[Stream, Stream]:
        """The first `at` tokens and the others. A document that is cut is one in both."""
        ends = np.asarray(self.ends, dtype=np.int64)
        marks = self.scored
        before = np.append(ends[ends < at], at) if at else ends[:0]
        return (
            Stream(self.tokens[:at], before, None if marks is None else marks[:at]),
            Stream(self.tokens[at:], ends[ends > at] - at, None if marks is None else marks[at:]),
        )


def write_tokens(
    folder: Path,
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: float,
    encode: Encode | None = None,
) -> None:
    """Tokenise into `train.bin` and `validation.bin` (little-endian uint16, or uint32 for a large
    vocabulary), `.ends` and, where `encode` says which tokens are scored, `.scored` of each, and
    `tokens.json`.
    """
    dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 1 << 16 else "<u4")
    counts = {"train": 0, "validation": 0}
    ends = {"train": array("Q"), "validation": array("Q")}
    with ExitStack() as held:
        files = {split: held.enter_context(open(folder / f"{split}.bin", "wb")) for split in counts}
        marks = (
            {split: held.enter_context(open(folder / f"{split}.scored", "wb")) for split in counts}
            if encode
            else {}
        )
        for split, ids, scored, whole in tokenised(
            documents, tokenizer, held_out=held_out, encode=encode
        ):
            np.asarray(ids, dtype=dtype).tofile(files[split])
            counts[split] += len(ids)
            if scored is not None:
                np.asarray(scored, dtype=np.uint8).tofile(marks[split])
            if whole:
                ends[split].append(counts[split])
    for split, found in ends.items():
        np.asarray(found, dtype="<u8").tofile(folder / f"{split}.ends")
    facts = {
        "documents": {split: len(found) for split, found in ends.items()},
        "scored": encode is not None,
    }
    (folder / "tokens.json").write_text(
        json.dumps({"format": FORMAT, "dtype": dtype.str, **counts, **facts})
    )


Part = tuple[str, list[int], list[bool] | None, bool]
"""(split, tokens, which are scored, whether the document ends with them)."""


def tokenised(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: float,
    encode: Encode | None,
) -> Iterator[Part]:
    """Documents, or parts of long ones, in their order."""
    return (
        _texts(documents, tokenizer, held_out)
        if encode is None
        else _rows(documents, encode, held_out)
    )


def _texts(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, held_out: float
) -> Iterator[Part]:
    for batch in _batches(_marked(documents, held_out)):
        encoded = tokenizer(
            [piece.text for piece in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        for piece, ids in zip(batch, encoded["input_ids"], strict=True):
            yield (
                piece.split,
                [*ids, tokenizer.eos_token_id] if piece.ends else ids,
                None,
                piece.ends,
            )


def _rows(documents: Iterable[str], encode: Encode, held_out: float) -> Iterator[Part]:
    for document in documents:
        ids, scored = encode(document)
        if ids:
            yield "validation" if is_held_out(document, held_out) else "train", ids, scored, True


@dataclass(frozen=True)
class _Piece:
    text: str
    split: str
    ends: bool
    """Whether a document ends here."""


def _marked(documents: Iterable[str], held_out: float) -> Iterator[_Piece]:
    for document in documents:
        split = "validation" if is_held_out(document, held_out) else "train"
        pieces = list(_pieces(document))
        for number, text in enumerate(pieces, start=1):
            yield _Piece(text, split, ends=number == len(pieces))


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """About a million characters at a time, for the tokenizer's threads."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _pieces(document: str) -> Iterator[str]:
    """A long document in chunks that end with a line, so that one file of a gigabyte is not one
    call of the tokenizer.
    """
    start = 0
    while len(document) - start > _BATCH_CHARACTERS:
        cut = document.rfind("\n", start, start + _BATCH_CHARACTERS) + 1
        cut = cut if cut > start else start + _BATCH_CHARACTERS
        yield document[start:cut]
        start = cut
    yield document[start:]


class Cut(Protocol):
    """Sequences of one length, by their number."""

    @property
    def stream(self) -> Stream:
        """The tokens that they are cut out of."""

    @property
    def length(self) -> int:
        """Tokens of each."""

    def __len__(self) -> int:
        """How many there are."""

    def take(self, numbers: Array) -> dict[str, torch.Tensor]:
        """A batch, int64 [len(numbers), length] each. Number -1 gives a sequence of padding, scored
        nowhere.
        """


@dataclass(frozen=True)
class Sequences:
    """Fixed-length sequences over a stream of tokens. Sequence `i` is tokens `i * length` to `(i +
    1) * length`; only the last one may be short, and its padding is not scored.
    """

    stream: Stream
    length: int
    padding: int
    """The token that fills the last sequence; its labels are `IGNORED`."""

    def __len__(self) -> int:
        """Number of sequences. A last sequence with a single token has nothing to predict and does
        not count.
        """
        whole, rest = divmod(len(self.stream), self.length)
        return whole + (rest >= 2)

    def take(self, numbers: Array) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels`, both int64 [len(numbers), length]. Number -1 gives a sequence
        of padding, scored nowhere.
        """
        ids = np.full((len(numbers), self.length), self.padding, dtype=np.int64)
        labels = np.full((len(numbers), self.length), IGNORED, dtype=np.int64)
        for row, number in enumerate(numbers):
            if number >= 0:
                place_tokens(
                    self.stream,
                    number * self.length,
                    (number + 1) * self.length,
                    ids[row],
                    labels[row],
                )
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def place_tokens(stream: Stream, first: int, last: int, ids: Array, labels: Array) -> int:
    """Copy tokens and labels to the beginning of a row. Returns how many."""
    found = stream.tokens[first:last].astype(np.int64)  # what is not scored is negative
    ids[: len(found)] = found
    labels[: len(found)] = (
        found if stream.scored is None else np.where(stream.scored[first:last], found, IGNORED)
    )
    return len(found)


def read_tokens(folder: Path) -> tuple[Stream, Stream]:
    """The training and the validation tokens, memory-mapped. Raises InputError when a file was cut
    or changed.
    """
    facts = json.loads((folder / "tokens.json").read_text())
    found = []
    for split in ("train", "validation"):
        tokens = _mapped(folder, f"{split}.bin", np.dtype(facts["dtype"]), facts[split])
        ends = _mapped(folder, f"{split}.ends", np.dtype("<u8"), facts["documents"][split])
        scored = (
            _mapped(folder, f"{split}.scored", np.dtype(np.uint8), facts[split])
            if facts["scored"]
            else None
        )
        found.append(Stream(tokens, ends, scored))
    return found[0], found[1]


def _mapped(folder: Path, name: str, dtype: np.dtype[Any], count: int) -> Array:
    file = folder / name
    if not file.is_file() or file.stat().st_size != count * dtype.itemsize:
        rule = f"{file}: does not hold the {count:,} numbers that were written"
        raise InputError(f"{rule}; delete {folder} to have the text tokenised again")
    # An empty file cannot be mapped.
    return np.memmap(file, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype)
