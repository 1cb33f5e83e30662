"""Preparation of the `data` section: reads, tokenises and packs the text.

Every stage is cached, so that only the first process of the first run does the work. Any number of
processes may call `prepare` at the same time. All of them get the same result without
communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.schema.sections import DataSection
from plait.data.cache import build_once, digest
from plait.data.conversations import encoder, template_warnings
from plait.data.loader import BatchSource, Loader
from plait.data.packing import (
    FORMAT,
    Documents,
    Encode,
    Sequences,
    SequenceSource,
    Stream,
    read_tokens,
    write_tokens,
)
from plait.data.streamed_text import StreamedLoader, StreamedSequences, StreamedText
from plait.data.text import open_corpus
from plait.data.tokenizer import (
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    vocabulary_size,
)
from plait.errors import InputError
from plait.sizes import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_ENCODING_VERSION = "rows 2"
"""Part of the data's identity. It changes if a release encodes the same row as other tokens."""


@dataclass(frozen=True)
class PreparedData:
    """Tokenised training and validation data of a run, and its tokenizer."""

    description: str
    """Short description of the text for the user."""
    validation_note: str
    """Description for the user of how the validation text was chosen."""
    tokenizer: PreTrainedTokenizerBase
    train: SequenceSource | StreamedSequences
    """Training sequences. Those of a streamed text have no known number."""
    validation: SequenceSource
    identity: dict[str, str]
    """Properties that two runs must share to see the same sequences.

    They describe the text and the tokenizer, with digests of their content.
    """
    warnings: tuple[str, ...] = ()
    """Warnings about the data that are shown before training, one line each."""

    @property
    def size(self) -> str:
        """Size of the training text, formatted for messages."""
        if isinstance(self.train, StreamedSequences):
            return f"sequences of {self.train.length} tokens, {self.train.buffer:,} at a time"
        return (
            f"{format_count(len(self.train.stream))} tokens, {len(self.train):,} sequences of"
            f" {self.train.length}"
        )

    def loader(self, batch: int, seed: int, *, dp_rank: int, dp_size: int) -> BatchSource:
        """Return the training batches of a data-parallel rank.

        Args:
            batch: Number of sequences in a step over all ranks.
            seed: Seed of the order.
            dp_rank: Index of the rank among the data-parallel ranks.
            dp_size: Number of data-parallel ranks.
        """
        if isinstance(self.train, StreamedSequences):
            return StreamedLoader(self.train, batch, seed, dp_rank, dp_size)
        return Loader(self.train, batch, seed, dp_rank, dp_size)


def prepare(
    section: DataSection, *, cache: Path, model_tokenizer: str | None, report: Callable[[str], None]
) -> PreparedData:
    """Read and tokenise the text of the `data` section.

    Args:
        section: The `data` section of the configuration.
        cache: Folder for tokenizers and tokens.
        model_tokenizer: Location of the tokenizer that belongs to a pretrained model.
            `section.tokenizer` takes precedence.
        report: Progress callback. Receives a message before each stage that takes time.

    Raises:
        InputError: The text or the tokenizer cannot be used.
    """
    if section.streaming:
        return _prepare_streamed(section, model_tokenizer, report)
    corpus = open_corpus(section, cache=cache)
    tokenizer_location = section.tokenizer or model_tokenizer
    if tokenizer_location is None and section.format != "text":
        raise InputError(
            f'data.format = "{section.format}": a model from scratch has no tokenizer, and a'
            " tokenizer that is trained on the text has no chat template; set data.tokenizer"
        )
    tokenizer = load_tokenizer(
        tokenizer_location or train_tokenizer(corpus, section, cache=cache, report=report)
    )
    encode, encoding_key = _encoding(section, tokenizer)
    share = section.validation_fraction
    # Everything that the tokens and their split depend on. The sequence length is not part of it.
    key = digest(
        [FORMAT, corpus.fingerprint, tokenizer_digest(tokenizer), str(share), encoding_key]
    )

    def tokenise(folder: Path) -> None:
        report(f"tokenising {corpus.description}")
        write_tokens(
            folder,
            corpus.documents(),
            tokenizer,
            held_out=share,
            encode=encode,
        )

    train, validation = read_tokens(build_once(cache, "tokens", key, tokenise))
    length = section.sequence_length
    note = "none held out"
    if share:
        note = f"{100 * share:.3g} % of the documents, chosen by a hash of each"
    if share and len(validation) < 2:
        # The text has so few documents that none of them happened to be held out.
        train_tokens = len(train) - ceil(len(train) * share / length) * length
        train, validation = train.split(max(train_tokens, 0))
        note = f"the last {100 * share:.3g} % of the text, as no whole document was chosen"
    if len(train) < 2:
        raise InputError(
            f"{corpus.place}: holds {len(train)} training tokens, but at least 2 are needed; add"
            " more text"
        )

    padding = int(tokenizer.eos_token_id)
    make_sequences = _sequence_class(section)
    return PreparedData(
        description=corpus.description,
        validation_note=note,
        tokenizer=tokenizer,
        train=make_sequences(train, length, padding),
        validation=make_sequences(validation, length, padding),
        identity=_identity(
            section, f"{corpus.description} ({corpus.fingerprint[:12]})", tokenizer, encoding_key
        ),
        warnings=_warnings(section, tokenizer),
    )


def _prepare_streamed(
    section: DataSection, model_tokenizer: str | None, report: Callable[[str], None]
) -> PreparedData:
    """Prepare a streamed text, whose validation documents come from its first block."""
    tokenizer_location = section.tokenizer or model_tokenizer
    if tokenizer_location is None:
        raise InputError(
            "data.streaming: a model from scratch has no tokenizer, and Plait trains none on a"
            " streamed text; set data.tokenizer"
        )
    text = StreamedText(section)
    tokenizer = load_tokenizer(tokenizer_location)
    encode, encoding_key = _encoding(section, tokenizer)
    padding = int(tokenizer.eos_token_id)
    share = section.validation_fraction
    make_sequences = _sequence_class(section)
    sequences = StreamedSequences(
        text,
        tokenizer,
        encode,
        make_sequences,
        section.sequence_length,
        padding,
        section.buffer_sequences,
        held_out=share,
    )
    report(f"reading the first {section.buffer_sequences:,} sequences of {text.description}")
    block = sequences.read(text.read(), epoch=0, number=0, start_state=None)
    if block.ends and not len(block.train):
        raise InputError(
            f"{text.place}: holds {len(block.train.stream)} training tokens, but no sequence of at"
            " least 2; add more text"
        )
    note = "none held out"
    if share:
        note = (
            f"of the first {section.buffer_sequences:,}: {100 * share:.3g} % of the documents,"
            " chosen by a hash of each"
        )
    identity = _identity(
        section, f"{text.description} ({text.fingerprint()[:12]})", tokenizer, encoding_key
    )
    return PreparedData(
        description=text.description,
        validation_note=note,
        tokenizer=tokenizer,
        train=sequences,
        validation=make_sequences(block.validation, section.sequence_length, padding),
        identity=identity | {"data.buffer_sequences": str(section.buffer_sequences)},
        warnings=_warnings(section, tokenizer),
    )


def _encoding(
    section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[Encode | None, str]:
    """Return (function that tokenises rows, string that identifies all of its settings).

    Plain text needs no such function; the result is then (None, "").
    """
    if section.format == "text":
        return None, ""
    end = " ends" if section.append_end_of_text else ""
    encoding_key = (
        f"{_ENCODING_VERSION} {section.format} {section.scored}{end}"
        f" {getattr(tokenizer, 'chat_template', None)}"
    )
    encode = encoder(
        tokenizer,
        section.format,
        scored=section.scored,
        append_end_of_text=section.append_end_of_text,
    )
    return encode, encoding_key


def _warnings(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    if section.format == "text":
        return ()
    return tuple(template_warnings(tokenizer, append_end_of_text=section.append_end_of_text))


def _sequence_class(section: DataSection) -> Callable[[Stream, int, int], SequenceSource]:
    return Documents if section.packing == "documents" else Sequences


def _identity(
    section: DataSection, text: str, tokenizer: PreTrainedTokenizerBase, encoding_key: str
) -> dict[str, str]:
    tokenizer_id = tokenizer_digest(tokenizer)[:12]
    identity = {
        "data.text": text,
        "data.tokenizer": f"{vocabulary_size(tokenizer):,} tokens ({tokenizer_id})",
        "data.packing": section.packing or "left out",
    }
    if encoding_key:
        encoding_id = digest([encoding_key])[:12]
        identity["data.format"] = f"{section.format}, scored: {section.scored} ({encoding_id})"
    return identity
