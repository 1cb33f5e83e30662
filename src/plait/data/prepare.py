"""From the `data` section to tokenised sequences: every step is cached, so only the first process of the first run does the work.

Any process may call `prepare`, in any order and at the same time; all get the same result without talking to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.schema.sections import DataSection
from plait.data.cache import built_once, digest
from plait.data.documents import Documents
from plait.data.packing import FORMAT, Cut, Sequences, read_tokens, write_tokens
from plait.data.templates import encoder
from plait.data.text import open_corpus
from plait.data.tokenizer import load_tokenizer, name_of, trained_tokenizer, vocabulary_size
from plait.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prepared:
    """The data of a run, ready to be read."""

    description: str
    """The text in a few words, for a person."""
    validation_note: str
    """How the validation text was chosen, for a person."""
    tokenizer: PreTrainedTokenizerBase
    train: Cut
    validation: Cut
    identity: dict[str, str]
    """What two runs must share to see the same sequences: the text and the tokenizer, as a description and as a digest of their content."""


def prepare(section: DataSection, *, cache: Path, own_tokenizer: str | None, say: Callable[[str], None]) -> Prepared:
    """Read, tokenise and cut the text that `section` names.

    own_tokenizer: where the model's tokenizer is, for a model that comes with weights; `section.tokenizer` goes before it.
    say: told of the steps that take time, before each. Raises InputError for text or a tokenizer that cannot be used.
    """
    corpus = open_corpus(section, cache=cache)
    place = section.tokenizer or own_tokenizer
    if place is None and section.format != "text":
        rule = f'data.format = "{section.format}": a model from scratch has no tokenizer, and one that is trained has no chat template'
        raise InputError(f"{rule}; set data.tokenizer")
    tokenizer = load_tokenizer(place or trained_tokenizer(corpus, section, cache=cache, say=say))
    tokenizer_name = name_of(tokenizer)
    encode = None if section.format == "text" else encoder(tokenizer, section.format, scored=section.scored)
    template = "" if encode is None else f"{section.format} {section.scored} {getattr(tokenizer, 'chat_template', None)}"
    key = digest([FORMAT, corpus.fingerprint, tokenizer_name, str(section.validation_fraction), template])

    def tokenise(folder: Path) -> None:
        say(f"tokenising {corpus.description}")
        write_tokens(folder, corpus.documents(), tokenizer, held_out=section.validation_fraction, encode=encode)

    train, validation = read_tokens(built_once(cache, "tokens", key, tokenise))
    share, length = section.validation_fraction, section.sequence_length
    note = f"{100 * share:.3g} % of the documents, chosen by a hash of each"
    if share and len(validation) < 2:
        # A text of one or a few documents: no document happened to be held out.
        kept = len(train) - ceil(len(train) * share / length) * length
        train, validation = train.parted(max(kept, 0))
        note = f"the last {100 * share:.3g} % of the text, as no whole document was chosen"
    if len(train) < 2:
        raise InputError(f"{corpus.place}: holds {len(train)} training tokens; name more text")
    padding, cut = int(tokenizer.eos_token_id), Documents if section.packing == "documents" else Sequences
    return Prepared(
        description=corpus.description,
        validation_note=note if share else "none held out",
        tokenizer=tokenizer,
        train=cut(train, length, padding),
        validation=cut(validation, length, padding),
        identity={
            "data.text": f"{corpus.description} ({corpus.fingerprint[:12]})",
            "data.tokenizer": f"{vocabulary_size(tokenizer):,} tokens ({tokenizer_name[:12]})",
            "data.packing": section.packing,
            **({} if encode is None else {"data.format": f"{section.format}, scored: {section.scored} ({digest([template])[:12]})"}),
        },
    )
