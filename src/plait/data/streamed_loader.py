"""Training batches of a text that is read as it is needed.

The text is read in blocks: documents until they make `data.buffer_sequences` sequences. A block is
cut and shuffled as a prepared text is, and one that holds all of the text has the sequences of
that. Every rank reads all documents and takes its share of each batch, so a batch holds the same
sequences on any number of ranks, and a run goes on with others. What a checkpoint keeps is where
the block begins, and how many of its sequences were used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plait.data.cache import digest
from plait.data.loader import shuffled
from plait.data.packing import Array, Cut, Encode, Stream, tokenised
from plait.data.streamed_text import Reader, StreamedText
from plait.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOGETHER = 64
"""Documents that are tokenised in one call. The end of a block depends on it."""


@dataclass(frozen=True)
class Block:
    """Sequences that are read and shuffled together."""

    epoch: int
    number: int
    """In the epoch."""
    begins: Mapping[str, Any] | None
    """Where the reader stood before it; None at the beginning of the text."""
    first: str
    """Digest of its first document."""
    train: Cut
    validation: Stream
    """Tokens of the documents that are held out of it."""
    ends: bool
    """Whether the text ends with it."""


@dataclass(frozen=True)
class StreamedSequences:
    """How blocks of a text are read and cut."""

    text: StreamedText
    tokenizer: PreTrainedTokenizerBase
    encode: Encode | None
    cut: Callable[[Stream, int, int], Cut]
    length: int
    """Tokens of a sequence."""
    padding: int
    buffer: int
    """Sequences of a block."""
    held_out: float

    def read(
        self, reader: Reader, *, epoch: int, number: int, begins: Mapping[str, Any] | None
    ) -> Block:
        """The block that begins where `reader` stands. Raises InputError."""
        tokens = {"train": _Tokens(), "validation": _Tokens()}
        first = ""
        over = False
        while not over and tokens["train"].count < self.buffer * self.length:
            documents = list(islice(reader, _TOGETHER))
            over = len(documents) < _TOGETHER
            first = first or digest(documents[:1])
            for split, ids, scored, ends in tokenised(
                documents, self.tokenizer, held_out=self.held_out, encode=self.encode
            ):
                tokens[split].add(ids, scored, ends)
        train = self.cut(tokens["train"].stream(), self.length, self.padding)
        return Block(epoch, number, begins, first, train, tokens["validation"].stream(), over)

    def first_block(self) -> Block:
        """Of the text. Raises InputError for a row that cannot be read."""
        return self.read(self.text.read(), epoch=0, number=0, begins=None)


class _Tokens:
    """Those of a block's documents on one side."""

    def __init__(self) -> None:
        self.count = 0
        self._tokens: list[Array] = []
        self._scored: list[Array] = []
        self._ends: list[int] = []

    def add(self, ids: list[int], scored: list[bool] | None, ends: bool) -> None:
        """A document, or a part of one."""
        self.count += len(ids)
        self._tokens.append(np.asarray(ids, dtype=np.uint32))
        if scored is not None:
            self._scored.append(np.asarray(scored, dtype=np.uint8))
        if ends:
            self._ends.append(self.count)

    def stream(self) -> Stream:
        """All of them."""
        if not self._tokens:
            return Stream(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint64))
        scored = np.concatenate(self._scored) if self._scored else None
        return Stream(np.concatenate(self._tokens), np.asarray(self._ends, dtype=np.uint64), scored)


class StreamedLoader:
    """Training batches of one data-parallel rank."""

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
        self._reader: Reader | None = None
        self._block: Block | None = None
        self._used = self._position = 0
        self._empty = True
        """Whether the epoch has had no sequence so far."""

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.sequences.length

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """This rank's share of the step after `position` sequences, int64 [batch / dp_size, length]
        each. Positions go up; those that are passed over are not trained on.
        """
        assert position >= self._position
        self._take(position - self._position)
        share = self.batch // self.dp_size
        own = range(self.dp_rank * share, (self.dp_rank + 1) * share)
        taken = 0
        pieces = []
        for block, numbers in self._take(self.batch):
            inside = [number for at, number in enumerate(numbers, start=taken) if at in own]
            taken += len(numbers)
            if inside:
                pieces.append(block.train.take(np.asarray(inside)))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, the same on every rank and layout: plain data."""
        block = self._block or self._next()
        where = {
            "epoch": block.epoch,
            "block": block.number,
            "begins": block.begins,
            "first": block.first,
        }
        return {"position": self._position, "used": self._used, **where}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises CheckpointError where another document is there now."""
        text = self.sequences.text
        self._position, self._used, self._reader = (
            state["position"],
            state["used"],
            text.read(state["begins"]),
        )
        block = self.sequences.read(
            self._reader, epoch=state["epoch"], number=state["block"], begins=state["begins"]
        )
        if block.first != state["first"] or self._used > len(block.train):
            raise CheckpointError(
                f"{text.place}: the text has changed: another document is where the checkpoint goes"
                f" on, after {self._position:,} sequences; bring the text of that run back, or name"
                " another run.folder"
            )
        self._block = block
        self._empty = False

    def _take(self, count: int) -> list[tuple[Block, list[int]]]:
        """The next sequences: blocks, and their numbers in each."""
        found = []
        while count:
            block = self._block or self._next()
            here = min(count, len(block.train) - self._used)
            if not here:
                self._next()
                continue
            at = np.arange(self._used, self._used + here)
            key = f"{self.seed} {block.epoch}" + (f" {block.number}" if block.number else "")
            found.append((block, shuffled(at, count=len(block.train), key=key).tolist()))
            self._used = self._used + here
            self._position = self._position + here
            count = count - here
        return found

    def _next(self) -> Block:
        """Read the next block, the first one of the next epoch where the text has ended. Raises
        InputError for a text of nothing.
        """
        last = self._block
        if last is None or last.ends:
            if last is not None and self._empty:
                raise InputError(
                    f"{self.sequences.text.place}: holds no sequence of two training tokens; name"
                    " more text"
                )
            self._reader = self.sequences.text.read()
            begins = None
            epoch = last.epoch + 1 if last else 0
            number = 0
            self._empty = True
        else:
            assert self._reader is not None
            begins = self._reader.state()
            epoch = last.epoch
            number = last.number + 1
        assert self._reader is not None
        self._block = self.sequences.read(self._reader, epoch=epoch, number=number, begins=begins)
        self._used = 0
        self._empty = self._empty and not len(self._block.train)
        return self._block
