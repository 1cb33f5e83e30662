"""The tokenizer of a run: the user's own, the one stored with the model's weights, or a byte-level
BPE trained on the text and cached.

All three become one Transformers tokenizer, so what a run saves opens in
`AutoTokenizer.from_pretrained`. A tokenizer without an end-of-text token is refused: documents
could not be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.schema.sections import DataSection
from plait.data.cache import built_once, digest
from plait.data.text import Corpus
from plait.errors import InputError, first_line
from plait.files import is_path, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
_FORMAT = "plait byte-level BPE 1"


def is_held_out(document: str, fraction: float) -> bool:
    """Whether a document belongs to the validation text: by its content, so the same document is
    never on both sides.
    """
    return int(digest([document])[:16], 16) < fraction * 2**64


def trained_tokenizer(
    corpus: Corpus, section: DataSection, *, cache: Path, say: Callable[[str], None]
) -> Path:
    """The folder of a byte-level BPE with at most `section.vocab_size` entries, trained on the
    documents that are not held out.

    say: told before a tokenizer is trained, not when it is found in the cache.
    """
    fraction = section.validation_fraction
    key = digest([_FORMAT, corpus.fingerprint, str(section.vocab_size), str(fraction)])

    def train(folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        say(f"training a tokenizer with {section.vocab_size:,} entries on {corpus.description}")
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
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
        )
        wrapped.save_pretrained(folder)

    return built_once(cache, "tokenizers", key, train)


def _training_text(corpus: Corpus, fraction: float) -> Iterator[str]:
    empty = True
    for document in corpus.documents():
        if not is_held_out(document, fraction):
            empty = empty and not document
            yield document
    if empty:
        raise InputError(
            f"{corpus.place}: there is no text to train on; name more, or lower"
            " data.validation_fraction"
        )


def load_tokenizer(place: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, a `tokenizer.json`, or on the hub. Raises InputError when it
    cannot be used.
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
            if tokenizer.eos_token is None and END_OF_TEXT in tokenizer.get_vocab():
                tokenizer.eos_token = END_OF_TEXT
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                str(path) if path.exists() else name, trust_remote_code=False
            )
    # the library raises OSError, ValueError, KeyError and errors of its own for broken or missing
    # files
    except Exception as error:
        rule = f"data.tokenizer: no tokenizer can be read from {name!r} ({first_line(error)})"
        raise InputError(
            f"{rule}; name a folder with a tokenizer, a tokenizer.json, or a name on the hub"
        ) from error
    if tokenizer.eos_token_id is None:
        rule = f"data.tokenizer: {name!r} has no end-of-text token to part documents"
        raise InputError(f"{rule}; set eos_token in its tokenizer_config.json")
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest token the tokenizer can give: the rows that a model's embedding
    needs.
    """
    return int(max(tokenizer.get_vocab().values())) + 1


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal exactly for tokenizers that cut text in the same way, wherever they were read from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = (
        backend.to_str()
        if backend is not None
        else "\0".join(f"{token}\0{i}" for token, i in sorted(tokenizer.get_vocab().items()))
    )
    return digest([rules, str(tokenizer.eos_token_id)])
