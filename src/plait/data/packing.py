"""Tokenised text on disk, and fixed-length sequences cut out of it.

Documents are joined to one stream of tokens with an end-of-text token after each, written once, and read through a memory map: the size of
the text does not matter to the memory of a process. Sequence `i` is tokens `i * length` to `(i + 1) * length`; only the last one may be
short, and its padding is not scored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plait.data.tokenizer import is_held_out, vocabulary_size
from plait.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "plait tokens 1"
IGNORED = -100
"""The label of a position that is not scored, as in PyTorch and Transformers."""
_BATCH_CHARACTERS = 1 << 20


def write_tokens(folder: Path, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, held_out: float) -> None:
    """Tokenise into `train.bin` and `validation.bin` (little-endian uint16, or uint32 for a large vocabulary) and `tokens.json`."""
    dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 1 << 16 else "<u4")
    counts = {"train": 0, "validation": 0}
    with open(folder / "train.bin", "wb") as train, open(folder / "validation.bin", "wb") as validation:
        files = {"train": train, "validation": validation}
        for batch in _batches(_marked(documents, held_out)):
            encoded = tokenizer([piece.text for piece in batch], add_special_tokens=False, return_attention_mask=False, verbose=False)
            for piece, ids in zip(batch, encoded["input_ids"], strict=True):
                tokens = np.asarray([*ids, tokenizer.eos_token_id] if piece.ends else ids, dtype=dtype)
                tokens.tofile(files[piece.split])
                counts[piece.split] += len(tokens)
    (folder / "tokens.json").write_text(json.dumps({"format": FORMAT, "dtype": dtype.str, **counts}))


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
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(document: str) -> Iterator[str]:
    """A long document in chunks that end with a line, so that one file of a gigabyte is not one call of the tokenizer."""
    start = 0
    while len(document) - start > _BATCH_CHARACTERS:
        cut = document.rfind("\n", start, start + _BATCH_CHARACTERS) + 1
        cut = cut if cut > start else start + _BATCH_CHARACTERS
        yield document[start:cut]
        start = cut
    yield document[start:]


@dataclass(frozen=True)
class Sequences:
    """Fixed-length sequences over a stream of tokens. Indexed by arrays of sequence numbers."""

    tokens: np.ndarray[Any, Any]
    length: int
    padding: int
    """The token that fills the last sequence; its labels are `IGNORED`."""

    def __len__(self) -> int:
        """Number of sequences. A last sequence with a single token has nothing to predict and does not count."""
        whole, rest = divmod(len(self.tokens), self.length)
        return whole + (rest >= 2)

    def take(self, numbers: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels`, both int64 [len(numbers), length]. Number -1 gives a sequence of padding, scored nowhere."""
        ids = np.full((len(numbers), self.length), self.padding, dtype=np.int64)
        labels = np.full((len(numbers), self.length), IGNORED, dtype=np.int64)
        for row, number in enumerate(numbers):
            if number >= 0:
                found = self.tokens[number * self.length : (number + 1) * self.length]
                ids[row, : len(found)] = found
                labels[row, : len(found)] = found
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def read_tokens(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The training and the validation tokens, memory-mapped. Raises InputError when a file was cut or changed."""
    facts = json.loads((folder / "tokens.json").read_text())
    dtype = np.dtype(facts["dtype"])
    found = []
    for split in ("train", "validation"):
        file = folder / f"{split}.bin"
        if not file.is_file() or file.stat().st_size != facts[split] * dtype.itemsize:
            rule = f"{file}: does not hold the {facts[split]:,} tokens that were written"
            raise InputError(f"{rule}; delete {folder} to have the text tokenised again")
        # An empty file cannot be mapped.
        found.append(np.memmap(file, dtype=dtype, mode="r") if facts[split] else np.empty(0, dtype=dtype))
    return found[0], found[1]
