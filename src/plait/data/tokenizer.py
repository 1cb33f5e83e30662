"""Tokenizer of a run: specified by the user, from the pretrained model, or trained on the text.

All three are Transformers tokenizers, so that the tokenizer that a run saves can be opened with
`AutoTokenizer.from_pretrained`. A tokenizer without an end-of-text token is refused, because
documents could not be separated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.schema.sections import DataSection
from plait.data.cache import build_once, digest
from plait.data.text import Corpus
from plait.errors import InputError, first_line
from plait.files import is_path, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
_FORMAT = "plait byte-level BPE 1"


def is_held_out(document: str, fraction: float) -> bool:
    """Return True if a document belongs to the validation split.

    A hash of its content decides, so that equal documents are never in both splits.
    """
    return int(digest([document])[:16], 16) < fraction * 2**64


def train_tokenizer(
    corpus: Corpus, section: DataSection, *, cache: Path, report: Callable[[str], None]
) -> Path:
    """Train a byte-level BPE tokenizer on the documents that are not held out.

    Args:
        corpus: Text of the run.
        section: The `data` section. Its `vocab_size` is the largest number of entries.
        cache: Folder for tokenizers. A cached tokenizer is reused.
        report: Progress callback. It is called only if the tokenizer is not cached.

    Returns:
        The folder of the tokenizer.
    """
    fraction = section.validation_fraction
    key = digest([_FORMAT, corpus.fingerprint, str(section.vocab_size), str(fraction)])

    def train(folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        report(f"training a tokenizer with {section.vocab_size:,} entries on {corpus.description}")
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=section.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        bpe.train_from_iterator(_training_text(corpus, fraction), trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
        )
        tokenizer.save_pretrained(folder)

    return build_once(cache, "tokenizers", key, train)


def _training_text(corpus: Corpus, fraction: float) -> Iterator[str]:
    is_empty = True
    for document in corpus.documents():
        if not is_held_out(document, fraction):
            is_empty = is_empty and not document
            yield document
    if is_empty:
        raise InputError(
            f"{corpus.place}: there is no text to train on; add files with text, or lower"
            " data.validation_fraction"
        )


def load_tokenizer(place: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        place: Folder, `tokenizer.json`, or name on the hub.

    Raises:
        InputError: The tokenizer does not exist, cannot be read, or has no end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    name = str(place)
    path = user_path(place, "data.tokenizer")
    if is_path(name) and not path.exists():
        raise InputError(
            f"data.tokenizer = {name!r}: there is no such file or folder; name a folder with a"
            " tokenizer or a tokenizer.json"
        )
    tokenizer: PreTrainedTokenizerBase
    try:
        if path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
            # A tokenizer.json does not name its end-of-text token.
            if tokenizer.eos_token is None and END_OF_TEXT in tokenizer.get_vocab():
                tokenizer.eos_token = END_OF_TEXT
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                str(path) if path.exists() else name, trust_remote_code=False
            )
    except Exception as error:
        # The library raises errors of many classes for broken or missing files.
        raise InputError(
            f"data.tokenizer: no tokenizer can be read from {name!r} ({first_line(error)}); name a"
            " folder with a tokenizer, a tokenizer.json, or a name on the hub"
        ) from error
    if tokenizer.eos_token_id is None:
        remedy = "set eos_token in its tokenizer_config.json"
        if path.is_file():
            remedy = "name its folder, with eos_token in a tokenizer_config.json there"
        raise InputError(
            f"data.tokenizer: {name!r} has no end-of-text token to separate documents; {remedy}"
        )
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of rows that a model's embedding needs: the largest token id plus one."""
    return int(max(tokenizer.get_vocab().values())) + 1


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the rules of a tokenizer, independent of its location."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = backend.to_str()
    else:
        # A slow tokenizer has no serialised rules; its vocabulary stands for them.
        entries = sorted(tokenizer.get_vocab().items())
        rules = "\0".join(f"{token}\0{index}" for token, index in entries)
    return digest([rules, str(tokenizer.eos_token_id)])
