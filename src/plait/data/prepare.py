"""From the `data` section to tokenised sequences: every step is cached, so only the first process
of the first run does the work.

Any process may call `prepare`, in any order and at the same time; all get the same result without
talking to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config.schema.sections import DataSection
from plait.data.cache import built_once, digest
from plait.data.documents import Documents
from plait.data.loader import Batches, Loader
from plait.data.packing import FORMAT, Cut, Encode, Sequences, Stream, read_tokens, write_tokens
from plait.data.streamed_loader import StreamedLoader, StreamedSequences
from plait.data.streamed_text import StreamedText
from plait.data.templates import cautions_of, encoder
from plait.data.text import open_corpus
from plait.data.tokenizer import load_tokenizer, name_of, trained_tokenizer, vocabulary_size
from plait.errors import InputError
from plait.units import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_ROWS = "rows 2"
"""Part of the data's identity. It changes when a release makes other tokens of the same row."""


@dataclass(frozen=True)
class Prepared:
    """The data of a run, ready to be read."""

    description: str
    """The text in a few words, for a person."""
    validation_note: str
    """How the validation text was chosen, for a person."""
    tokenizer: PreTrainedTokenizerBase
    train: Cut | StreamedSequences
    """The second of a text that is read as it is needed, whose length is not known."""
    validation: Cut
    identity: dict[str, str]
    """What two runs must share to see the same sequences: the text and the tokenizer, as a
    description and as a digest of their content.
    """
    cautions: tuple[str, ...] = ()
    """Warnings about the data that are shown before training, one line each."""

    @property
    def size(self) -> str:
        """Of the training text, for a person."""
        if isinstance(self.train, StreamedSequences):
            return f"sequences of {self.train.length} tokens, {self.train.buffer:,} at a time"
        return (
            f"{format_count(len(self.train.stream))} tokens, {len(self.train):,} sequences of"
            f" {self.train.length}"
        )

    def loader(self, batch: int, seed: int, *, dp_rank: int, dp_size: int) -> Batches:
        """Training batches of a data-parallel rank. batch: sequences of a step over all ranks."""
        kind: Any = StreamedLoader if isinstance(self.train, StreamedSequences) else Loader
        made: Batches = kind(self.train, batch, seed, dp_rank, dp_size)
        return made


def prepare(
    section: DataSection, *, cache: Path, own_tokenizer: str | None, say: Callable[[str], None]
) -> Prepared:
    """Read, tokenise and cut the text that `section` names.

    own_tokenizer: where the model's tokenizer is, for a model that comes with weights;
    `section.tokenizer` goes before it. say: told of the steps that take time, before each. Raises
    InputError for text or a tokenizer that cannot be used.
    """
    if section.streaming:
        return _streamed(section, own_tokenizer, say)
    corpus = open_corpus(section, cache=cache)
    place = section.tokenizer or own_tokenizer
    if place is None and section.format != "text":
        rule = (
            f'data.format = "{section.format}": a model from scratch has no tokenizer, and one that'
            " is trained has no chat template"
        )
        raise InputError(f"{rule}; set data.tokenizer")
    tokenizer = load_tokenizer(place or trained_tokenizer(corpus, section, cache=cache, say=say))
    encode, template = _encoding(section, tokenizer)
    key = digest(
        [FORMAT, corpus.fingerprint, name_of(tokenizer), str(section.validation_fraction), template]
    )

    def tokenise(folder: Path) -> None:
        say(f"tokenising {corpus.description}")
        write_tokens(
            folder,
            corpus.documents(),
            tokenizer,
            held_out=section.validation_fraction,
            encode=encode,
        )

    train, validation = read_tokens(built_once(cache, "tokens", key, tokenise))
    share = section.validation_fraction
    length = section.sequence_length
    note = f"{100 * share:.3g} % of the documents, chosen by a hash of each"
    if share and len(validation) < 2:
        # A text of one or a few documents: no document happened to be held out.
        kept = len(train) - ceil(len(train) * share / length) * length
        train, validation = train.parted(max(kept, 0))
        note = f"the last {100 * share:.3g} % of the text, as no whole document was chosen"
    if len(train) < 2:
        raise InputError(f"{corpus.place}: holds {len(train)} training tokens; name more text")
    padding = int(tokenizer.eos_token_id)
    return Prepared(
        description=corpus.description,
        validation_note=note if share else "none held out",
        tokenizer=tokenizer,
        train=_cut(section)(train, length, padding),
        validation=_cut(section)(validation, length, padding),
        identity=_identity(
            section, f"{corpus.description} ({corpus.fingerprint[:12]})", tokenizer, template
        ),
        cautions=_cautions(section, tokenizer),
    )


def _streamed(
    section: DataSection, own_tokenizer: str | None, say: Callable[[str], None]
) -> Prepared:
    """What of a streamed text is known before the run: how it is read, and what is held out of its
    first block.
    """
    place = section.tokenizer or own_tokenizer
    if place is None:
        rule = (
            "data.streaming: a model from scratch has no tokenizer, and none is trained on a text"
            " that is not kept"
        )
        raise InputError(f"{rule}; set data.tokenizer")
    text = StreamedText(section)
    tokenizer = load_tokenizer(place)
    encode, template = _encoding(section, tokenizer)
    padding = int(tokenizer.eos_token_id)
    share = section.validation_fraction
    sequences = StreamedSequences(
        text,
        tokenizer,
        encode,
        _cut(section),
        section.sequence_length,
        padding,
        section.buffer_sequences,
        held_out=share,
    )
    say(f"reading the first {section.buffer_sequences:,} sequences of {text.description}")
    block = sequences.first_block()
    if block.ends and not len(block.train):
        raise InputError(
            f"{text.place}: holds {len(block.train.stream)} training tokens; name more text"
        )
    note = (
        f"of the first {section.buffer_sequences:,}: {100 * share:.3g} % of the documents, chosen"
        " by a hash of each"
    )
    identity = _identity(
        section, f"{text.description} ({text.fingerprint()[:12]})", tokenizer, template
    )
    return Prepared(
        description=text.description,
        validation_note=note if share else "none held out",
        tokenizer=tokenizer,
        train=sequences,
        validation=_cut(section)(block.validation, section.sequence_length, padding),
        identity=identity | {"data.buffer_sequences": str(section.buffer_sequences)},
        cautions=_cautions(section, tokenizer),
    )


def _encoding(
    section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[Encode | None, str]:
    """(what makes tokens of a row; None of a text, everything that this depends on)."""
    if section.format == "text":
        return None, ""
    end = " ends" if section.append_end_of_text else ""
    template = (
        f"{_ROWS} {section.format} {section.scored}{end}"
        f" {getattr(tokenizer, 'chat_template', None)}"
    )
    made = encoder(
        tokenizer,
        section.format,
        scored=section.scored,
        append_end_of_text=section.append_end_of_text,
    )
    return made, template


def _cautions(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    if section.format == "text":
        return ()
    return tuple(cautions_of(tokenizer, append_end_of_text=section.append_end_of_text))


def _cut(section: DataSection) -> Callable[[Stream, int, int], Cut]:
    return Documents if section.packing == "documents" else Sequences


def _identity(
    section: DataSection, text: str, tokenizer: PreTrainedTokenizerBase, template: str
) -> dict[str, str]:
    return {
        "data.text": text,
        "data.tokenizer": f"{vocabulary_size(tokenizer):,} tokens ({name_of(tokenizer)[:12]})",
        "data.packing": section.packing or "left out",
        **(
            {
                "data.format": (
                    f"{section.format}, scored: {section.scored} ({digest([template])[:12]})"
                )
            }
            if template
            else {}
        ),
    }
