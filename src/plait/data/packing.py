"""Tokenised documents on disk, and their division into sequences of equal length.

Documents are joined to one stream of tokens, with an end-of-text token after each text. The stream
is written once and read through a memory map, so that the memory of a process does not depend on
the size of the text. `Sequences` splits the stream at multiples of the length; `Documents` fills
sequences with complete documents.

With `Documents`, positions restart for each document. Transformers masks the attention between the
documents of a row if positions restart within it, no KV cache is used and no `attention_mask` is
passed. A document longer than a sequence is split into chunks, which are treated as documents.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
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
"""Label of a token that the loss does not count, as in PyTorch and Transformers."""
_BATCH_CHARACTERS = 1 << 20
"""Characters per call of the tokenizer, whose threads share the texts of a call."""
Array = np.ndarray[Any, Any]

Encode = Callable[[str], tuple[list[int], list[bool]]]
"""Function from the text of a row to its tokens, and for each token whether the loss counts it."""
TokenizedChunk = tuple[str, list[int], list[bool] | None, bool]
"""Split, tokens, which of them the loss counts (None: all), and whether the document ends here."""


@dataclass(frozen=True)
class Stream:
    """Tokens of the documents of the training or validation split, one document after the other."""

    tokens: Array
    """uint16 or uint32 [tokens]."""
    ends: Array
    """uint64 [documents]: the position after the last token of each document."""
    scored: Array | None = None
    """uint8 [tokens]: 1 if the loss counts the token. None if it counts all tokens."""

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, position: int) -> tuple[Stream, Stream]:
        """Return the first `position` tokens and the remaining ones.

        A document across the boundary becomes one document in each of the two streams.
        """
        ends = np.asarray(self.ends, dtype=np.int64)
        first_ends = ends[:0]
        if position:
            # A document that ends at the boundary has its end once.
            first_ends = np.append(ends[ends < position], position)
        first_scored = None
        second_scored = None
        if self.scored is not None:
            first_scored = self.scored[:position]
            second_scored = self.scored[position:]
        return (
            Stream(self.tokens[:position], first_ends, first_scored),
            Stream(self.tokens[position:], ends[ends > position] - position, second_scored),
        )


def write_tokens(
    folder: Path,
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: float,
    encode: Encode | None = None,
) -> None:
    """Tokenise documents and write the tokens of both splits to a folder.

    The files of a split are `<split>.bin` (little-endian uint16, or uint32 for a large vocabulary),
    `<split>.ends` and, with `encode`, `<split>.scored`. `tokens.json` describes them.

    Args:
        folder: Existing folder.
        documents: Texts, or rows in the form of `conversations.row_text`.
        tokenizer: Tokenizer of the run.
        held_out: Fraction of the documents in the validation split.
        encode: Tokenises rows. None for plain texts, whose tokens are all targets of the loss.
    """
    # Two bytes per token suffice for most vocabularies.
    dtype = np.dtype("<u2" if vocabulary_size(tokenizer) <= 1 << 16 else "<u4")
    counts = {"train": 0, "validation": 0}
    # An array takes 8 bytes per document, far less than a list of Python integers.
    ends = {"train": array("Q"), "validation": array("Q")}
    with ExitStack() as open_files:
        token_files = {}
        scored_files = {}
        for split in counts:
            token_files[split] = open_files.enter_context(open(folder / f"{split}.bin", "wb"))
            if encode:
                scored_files[split] = open_files.enter_context(
                    open(folder / f"{split}.scored", "wb")
                )

        for split, ids, scored, is_end in tokenize_documents(
            documents, tokenizer, held_out=held_out, encode=encode
        ):
            np.asarray(ids, dtype=dtype).tofile(token_files[split])
            counts[split] += len(ids)
            if scored is not None:
                np.asarray(scored, dtype=np.uint8).tofile(scored_files[split])
            if is_end:
                ends[split].append(counts[split])

    for split, positions in ends.items():
        np.asarray(positions, dtype="<u8").tofile(folder / f"{split}.ends")
    description = {
        "format": FORMAT,
        "dtype": dtype.str,
        **counts,
        "documents": {split: len(positions) for split, positions in ends.items()},
        "scored": encode is not None,
    }
    (folder / "tokens.json").write_text(json.dumps(description))


def tokenize_documents(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: float,
    encode: Encode | None,
) -> Iterator[TokenizedChunk]:
    """Yield the tokens of documents, or of chunks of long documents, in the order of the documents.

    The arguments are those of `write_tokens`.
    """
    if encode is None:
        return _tokenize_texts(documents, tokenizer, held_out)
    return _tokenize_rows(documents, encode, held_out)


def _tokenize_texts(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, held_out: float
) -> Iterator[TokenizedChunk]:
    for batch in _batches(_chunks(documents, held_out)):
        encoded = tokenizer(
            [chunk.text for chunk in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            # Transformers would warn about texts that are longer than the model's context.
            verbose=False,
        )
        for chunk, ids in zip(batch, encoded["input_ids"], strict=True):
            # Chunks of one document are not separated.
            if chunk.is_end:
                ids = [*ids, tokenizer.eos_token_id]
            yield chunk.split, ids, None, chunk.is_end


def _tokenize_rows(
    documents: Iterable[str], encode: Encode, held_out: float
) -> Iterator[TokenizedChunk]:
    for document in documents:
        ids, scored = encode(document)
        if ids:
            yield _split_name(document, held_out), ids, scored, True


def _split_name(document: str, held_out: float) -> str:
    return "validation" if is_held_out(document, held_out) else "train"


@dataclass(frozen=True)
class _TextChunk:
    """Part of a document that one call of the tokenizer receives."""

    text: str
    split: str
    is_end: bool
    """True if the document ends with this chunk."""


def _chunks(documents: Iterable[str], held_out: float) -> Iterator[_TextChunk]:
    for document in documents:
        split = _split_name(document, held_out)
        texts = list(_split_at_lines(document))
        for number, text in enumerate(texts, start=1):
            yield _TextChunk(text, split, is_end=number == len(texts))


def _batches(chunks: Iterable[_TextChunk]) -> Iterator[list[_TextChunk]]:
    batch: list[_TextChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _split_at_lines(document: str) -> Iterator[str]:
    """Split a long document after line breaks, to bound the memory of one call of the tokenizer."""
    start = 0
    while len(document) - start > _BATCH_CHARACTERS:
        end = document.rfind("\n", start, start + _BATCH_CHARACTERS) + 1
        if end <= start:
            # No line break was found, for example in a file that is one line.
            end = start + _BATCH_CHARACTERS
        yield document[start:end]
        start = end
    yield document[start:]


class SequenceSource(Protocol):
    """Sequences of one length, addressed by their number."""

    @property
    def stream(self) -> Stream:
        """Tokens that the sequences consist of."""

    @property
    def length(self) -> int:
        """Number of tokens in each sequence."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def take(self, numbers: Array) -> dict[str, torch.Tensor]:
        """Return a batch: tensors of int64 [len(numbers), length].

        Number -1 gives a sequence of padding without targets.
        """


@dataclass(frozen=True)
class Sequences:
    """Sequences that begin at multiples of the length and may span documents.

    Sequence `i` consists of the tokens `i * length` to `(i + 1) * length`. Only the last sequence
    may be shorter. The loss ignores its padding.
    """

    stream: Stream
    length: int
    padding: int
    """Token that fills the last sequence; its labels are `IGNORED`."""

    def __len__(self) -> int:
        """Return the number of sequences.

        A last sequence with a single token has no target and does not count.
        """
        full, remainder = divmod(len(self.stream), self.length)
        return full + (remainder >= 2)

    def take(self, numbers: Array) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `labels`, both int64 [len(numbers), length].

        Number -1 gives a sequence of padding without targets.
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
    """Copy tokens and labels to the beginning of a row.

    Args:
        stream: Source of the tokens.
        first: Stream position of the first token.
        last: Stream position after the last token. The stream may end before it.
        ids: Row of int64 that receives the tokens.
        labels: Row of int64 that receives the labels.

    Returns:
        The number of tokens.
    """
    # Labels are signed, because IGNORED is negative.
    tokens = stream.tokens[first:last].astype(np.int64)
    ids[: len(tokens)] = tokens
    if stream.scored is None:
        labels[: len(tokens)] = tokens
    else:
        labels[: len(tokens)] = np.where(stream.scored[first:last], tokens, IGNORED)
    return len(tokens)


def read_tokens(folder: Path) -> tuple[Stream, Stream]:
    """Return the memory-mapped streams (training split, validation split).

    Raises:
        InputError: A file was truncated or changed.
    """
    description = json.loads((folder / "tokens.json").read_text())
    dtype = np.dtype(description["dtype"])
    streams = []
    for split in ("train", "validation"):
        count = description[split]
        tokens = _map_file(folder, f"{split}.bin", dtype, count)
        ends = _map_file(folder, f"{split}.ends", np.dtype("<u8"), description["documents"][split])
        scored = None
        if description["scored"]:
            scored = _map_file(folder, f"{split}.scored", np.dtype(np.uint8), count)
        streams.append(Stream(tokens, ends, scored))
    return streams[0], streams[1]


def _map_file(folder: Path, name: str, dtype: np.dtype[Any], count: int) -> Array:
    file = folder / name
    if not file.is_file() or file.stat().st_size != count * dtype.itemsize:
        raise InputError(
            f"{file}: does not hold the {count:,} numbers that were written; delete {folder} to"
            " have the text tokenised again"
        )
    if not count:
        # An empty file cannot be mapped.
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


@dataclass(frozen=True)
class Documents:
    """Sequences, each of which is packed with as many documents as fit into it."""

    stream: Stream
    length: int
    padding: int
    """Token that fills the remainder of a sequence; its labels are `IGNORED`."""

    @cached_property
    def _chunks(self) -> tuple[Array, Array]:
        """Stream positions of the start of every chunk, and of the token after its end."""
        ends = np.asarray(self.stream.ends, dtype=np.int64)
        # Without documents there is no beginning either.
        starts = np.concatenate([[0], ends[:-1]])[: len(ends)]

        # Long documents are split: chunk i of a document starts i * length after the document.
        counts = -(-(ends - starts) // self.length)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(starts, counts) + numbers * self.length
        last = np.minimum(first + self.length, np.repeat(ends, counts))

        # A single token has no target.
        trainable = last - first >= 2
        return first[trainable], last[trainable]

    @cached_property
    def _sequences(self) -> list[list[int]]:
        """Numbers of the chunks in each sequence."""
        first, last = self._chunks
        return best_fit((last - first).tolist(), self.length)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._sequences)

    def take(self, numbers: Array) -> dict[str, torch.Tensor]:
        """Return the batch of some sequences.

        Args:
            numbers: Numbers of the sequences. -1 gives a sequence of padding without targets.

        Returns:
            `input_ids`, `labels` and `position_ids`, each int64 [len(numbers), length]. The
            label of the first token of a document is `IGNORED`, because no token precedes it.
        """
        shape = (len(numbers), self.length)
        ids = np.full(shape, self.padding, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        starts, ends = self._chunks
        for row, number in enumerate(numbers):
            column = 0
            for chunk in self._sequences[number] if number >= 0 else ():
                count = place_tokens(
                    self.stream,
                    int(starts[chunk]),
                    int(ends[chunk]),
                    ids[row, column:],
                    labels[row, column:],
                )
                labels[row, column] = IGNORED
                positions[row, column : column + count] = np.arange(count)
                column += count
            # Positions restart, so that the padding is masked like one more document.
            positions[row, column:] = np.arange(self.length - column)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack items into bins of equal capacity by best fit decreasing.

    The longest items come first, and each goes to the bin in which it leaves the least space. This
    takes at most 11/9 of the fewest possible bins (Johnson, 1974). The result is deterministic:
    equal lengths keep their order.

    Args:
        lengths: Lengths of the items, at most `capacity` each.
        capacity: Length of a bin.

    Returns:
        Indices of the items in each bin, in the order in which they were added.
    """
    bins: list[list[int]] = []
    bins_by_space: dict[int, deque[int]] = defaultdict(deque)
    # The keys of `bins_by_space`, sorted for the binary search.
    spaces: list[int] = []

    for item in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[item]
        # The smallest space that the item fits into.
        slot = bisect_left(spaces, length)
        if slot < len(spaces):
            space = spaces[slot]
            # Among bins of equal space the first to reach it is filled, so that the result is
            # deterministic.
            number = bins_by_space[space].popleft()
            if not bins_by_space[space]:
                del bins_by_space[space]
                del spaces[slot]
            bins[number].append(item)
        else:
            space = capacity
            number = len(bins)
            bins.append([item])

        remaining = space - length
        if remaining:
            if remaining not in bins_by_space:
                insort(spaces, remaining)
            bins_by_space[remaining].append(number)
    return bins
