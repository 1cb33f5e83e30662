"""Text that is read during training: a streaming data set of the `datasets` library.

Its length is unknown and nothing is cached. The library returns the position of a reader as a
state, and a new reader can continue from that state.

Note [Blocks of a streamed text]
    The text is read in blocks: documents are added until they make `data.buffer_sequences`
    sequences. A block is divided and shuffled like a prepared text, so that a block with the whole
    text gives the same sequences. Every rank reads all documents and takes its share of each batch.
    A batch therefore holds the same sequences on any number of ranks, and a run can be resumed on
    another number. A checkpoint contains the position at which the current block begins, and the
    number of sequences of the block that were used.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plait.config.schema.sections import DataSection
from plait.data.cache import digest
from plait.data.loader import shuffle_positions
from plait.data.packing import Array, Encode, SequenceSource, Stream, tokenize_documents
from plait.data.text import document_of_row, load_dataset
from plait.errors import CheckpointError, InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FINGERPRINT_DOCUMENTS = 16
"""Number of documents at the beginning of the text that its fingerprint depends on."""
_TOKENIZED_DOCUMENTS = 64
"""Number of documents per call of the tokenizer.

Blocks end after such a call, so the number decides which documents are in a block.
"""


@dataclass(frozen=True)
class StreamedText:
    """Documents of a run, in the order in which the `datasets` library yields them."""

    section: DataSection

    @property
    def description(self) -> str:
        """Short description of the text for the user."""
        return (
            f"the data set {Path(self.section.paths[0]).name}, split {self.section.split}, as it is"
            " read"
        )

    @property
    def place(self) -> str:
        """Setting that names the text, with its value, for messages."""
        return f"data.paths = {json.dumps(self.section.paths)}"

    def read(self, state: Mapping[str, Any] | None = None) -> StreamReader:
        """Return a reader that starts at the beginning, or at a state from `StreamReader.state`."""
        return StreamReader(load_dataset(self.section, streaming=True), self.section, state)

    def fingerprint(self) -> str:
        """Return a digest of the first documents and of the settings that select them.

        Raises:
            InputError: The text is empty or cannot be read.
        """
        documents = list(islice(self.read(), _FINGERPRINT_DOCUMENTS))
        if not documents:
            raise InputError(f"{self.place}: holds no rows; add more text")
        return digest([self.section.format, self.section.field, self.section.split, *documents])


class StreamReader:
    """Iterator over the documents of one pass over a data set.

    Raises:
        InputError: A row cannot be read. The message names the row.
    """

    def __init__(self, data: Any, section: DataSection, state: Mapping[str, Any] | None) -> None:
        self._data = data
        self._section = section
        self._row = 0
        if state is not None:
            data.load_state_dict(copy.deepcopy(state["rows"]))
            self._row = state["row"]
        self._rows: Iterator[Mapping[str, Any]] = iter(data)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        where = f"{self._section.paths[0]}, row {self._row}"
        try:
            row = next(self._rows)
        except StopIteration:
            raise
        except Exception as error:
            # The library and the network raise errors of many classes.
            raise InputError(
                f"{where}: cannot be read ({type(error).__name__}: {first_line(error)}); run the"
                " command again"
            ) from error
        self._row += 1
        return document_of_row(row, self._section, where)

    def state(self) -> dict[str, Any]:
        """Return the position of the next document as plain data."""
        return {"rows": copy.deepcopy(self._data.state_dict()), "row": self._row}


@dataclass(frozen=True)
class TextBlock:
    """Sequences that are read and shuffled together. See Note [Blocks of a streamed text]."""

    epoch: int
    number: int
    """Number of the block in its epoch."""
    start_state: Mapping[str, Any] | None
    """State of the reader before the block; None at the beginning of the text."""
    first: str
    """Digest of the first document of the block."""
    train: SequenceSource
    validation: Stream
    """Tokens of the documents of the block that are held out for validation."""
    ends: bool
    """True if the text ends with this block."""


@dataclass(frozen=True)
class StreamedSequences:
    """Source of the blocks of a streamed text."""

    text: StreamedText
    tokenizer: PreTrainedTokenizerBase
    encode: Encode | None
    make_sequences: Callable[[Stream, int, int], SequenceSource]
    length: int
    """Number of tokens in a sequence."""
    padding: int
    buffer: int
    """Number of sequences in a block."""
    held_out: float

    def read(
        self,
        reader: StreamReader,
        *,
        epoch: int,
        number: int,
        start_state: Mapping[str, Any] | None,
    ) -> TextBlock:
        """Read the block that begins at the position of `reader`.

        Args:
            reader: Reader of the text. It advances to the end of the block.
            epoch: Epoch of the block.
            number: Number of the block in its epoch.
            start_state: State of `reader`, or None at the beginning of the text.

        Raises:
            InputError: A row cannot be read.
        """
        tokens = {"train": _TokenBuffer(), "validation": _TokenBuffer()}
        first_digest = ""
        is_last = False
        while not is_last and tokens["train"].count < self.buffer * self.length:
            documents = list(islice(reader, _TOKENIZED_DOCUMENTS))
            is_last = len(documents) < _TOKENIZED_DOCUMENTS
            first_digest = first_digest or digest(documents[:1])
            for split, ids, scored, is_end in tokenize_documents(
                documents, self.tokenizer, held_out=self.held_out, encode=self.encode
            ):
                tokens[split].add(ids, scored, is_end)
        return TextBlock(
            epoch=epoch,
            number=number,
            start_state=start_state,
            first=first_digest,
            train=self.make_sequences(tokens["train"].stream(), self.length, self.padding),
            validation=tokens["validation"].stream(),
            ends=is_last,
        )


class _TokenBuffer:
    """Tokens of the documents of one split in a block."""

    def __init__(self) -> None:
        self.count = 0
        self._tokens: list[Array] = []
        self._scored: list[Array] = []
        self._ends: list[int] = []

    def add(self, ids: list[int], scored: list[bool] | None, is_end: bool) -> None:
        """Add the tokens of a document, or of a chunk of a long document."""
        self.count += len(ids)
        self._tokens.append(np.asarray(ids, dtype=np.uint32))
        if scored is not None:
            self._scored.append(np.asarray(scored, dtype=np.uint8))
        if is_end:
            self._ends.append(self.count)

    def stream(self) -> Stream:
        """Return all tokens as one stream."""
        if not self._tokens:
            return Stream(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint64))
        scored = np.concatenate(self._scored) if self._scored else None
        return Stream(np.concatenate(self._tokens), np.asarray(self._ends, dtype=np.uint64), scored)


class StreamedLoader:
    """Training batches of one data-parallel rank from a streamed text."""

    def __init__(
        self,
        sequences: StreamedSequences,
        batch: int,
        seed: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        self.sequences = sequences
        self.batch = batch
        self.seed = seed
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._reader: StreamReader | None = None
        self._block: TextBlock | None = None
        self._used = 0
        """Number of sequences of the current block that were used."""
        self._position = 0
        self._epoch_is_empty = True
        """True until a sequence of the current epoch has been read."""

    @property
    def length(self) -> int:
        """Number of tokens in a sequence."""
        return self.sequences.length

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """Return this rank's share of the batch at `position`.

        Args:
            position: Number of sequences that the run has consumed. It must not decrease between
                calls. Sequences between two calls are skipped.

        Returns:
            Tensors of int64 [batch / dp_size, length].
        """
        assert position >= self._position
        self._advance(position - self._position)

        share = self.batch // self.dp_size
        first = self.dp_rank * share
        last = first + share
        offset = 0
        parts = []
        # A batch can contain sequences of several blocks, each of which adds [n, length].
        for block, numbers in self._advance(self.batch):
            rank_numbers = numbers[max(first - offset, 0) : max(last - offset, 0)]
            offset += len(numbers)
            if rank_numbers:
                parts.append(block.train.take(np.asarray(rank_numbers)))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as plain data. It is equal on all ranks and layouts."""
        block = self._block or self._read_next_block()
        return {
            "position": self._position,
            "used": self._used,
            "epoch": block.epoch,
            "block": block.number,
            "begins": block.start_state,
            "first": block.first,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned.

        Raises:
            CheckpointError: The text has another document at this position now.
        """
        text = self.sequences.text
        self._position = state["position"]
        self._used = state["used"]
        self._reader = text.read(state["begins"])
        block = self.sequences.read(
            self._reader, epoch=state["epoch"], number=state["block"], start_state=state["begins"]
        )
        if block.first != state["first"] or self._used > len(block.train):
            raise CheckpointError(
                f"{text.place}: the text has changed: the checkpoint continues after"
                f" {self._position:,} sequences, and another document is at that position; restore"
                " the text of that run, or use another run.folder"
            )
        self._block = block
        self._epoch_is_empty = False

    def _advance(self, count: int) -> list[tuple[TextBlock, list[int]]]:
        """Consume the next sequences. Return each block with the numbers of its sequences."""
        selected = []
        while count:
            block = self._block or self._read_next_block()
            available = min(count, len(block.train) - self._used)
            if not available:
                self._read_next_block()
                continue
            # The first block of an epoch has the key of a prepared text, so that a text of one
            # block has the same order when it is streamed.
            key = f"{self.seed} {block.epoch}"
            if block.number:
                key = f"{key} {block.number}"
            positions = np.arange(self._used, self._used + available)
            numbers = shuffle_positions(positions, count=len(block.train), key=key)
            selected.append((block, numbers.tolist()))
            self._used += available
            self._position += available
            count -= available
        return selected

    def _read_next_block(self) -> TextBlock:
        """Read the next block. At the end of the text, this is the first block of the next epoch.

        Raises:
            InputError: The text has no sequence, or a row cannot be read.
        """
        previous = self._block
        if previous is None or previous.ends:
            if previous is not None and self._epoch_is_empty:
                raise InputError(
                    f"{self.sequences.text.place}: holds no sequence of at least 2 training"
                    " tokens; add more text"
                )
            self._reader = self.sequences.text.read()
            start_state = None
            epoch = previous.epoch + 1 if previous else 0
            number = 0
            self._epoch_is_empty = True
        else:
            assert self._reader is not None
            start_state = self._reader.state()
            epoch = previous.epoch
            number = previous.number + 1
        assert self._reader is not None
        self._block = self.sequences.read(
            self._reader, epoch=epoch, number=number, start_state=start_state
        )
        self._used = 0
        self._epoch_is_empty = self._epoch_is_empty and not len(self._block.train)
        return self._block
