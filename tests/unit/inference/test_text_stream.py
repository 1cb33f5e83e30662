"""Text as tokens come: pieces that add up to the tokenizer's own text of all tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from plait.inference.text_stream import TextStream

WORDS = ["[UNK]", "[PAD]", "do", "n", "'", "t", ".", "it", "s", "n't", "'s", "hello", "v", "##e", "ve", "?", ",", "##n"]


def word_pieces() -> Any:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.WordPiece()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", clean_up_tokenization_spaces=True
    )


def streamed(tokenizer: Any, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in tokens), stream.rest()]


def test_spaces_that_a_clean_up_removes() -> None:
    """`do n ' t` is "don't", but only with its last token."""
    tokenizer = word_pieces()
    ids = [WORDS.index(word) for word in ("hello", "do", "n", "'", "t", ".")]
    assert streamed(tokenizer, ids) == ["hello", " do", "", "", "n't", ".", ""]
    assert streamed(tokenizer, ids[:4]) == ["hello", " do", "", "", " n '"]
    numbers = random.Random(0)
    for _ in range(2000):
        ids = [numbers.randrange(1, len(WORDS)) for _ in range(numbers.randint(1, 9))]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


class Changing:
    """A tokenizer whose text of so many tokens is a given one."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, ids: list[int], **_: Any) -> str:
        return self.texts[len(ids) - 1]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("a b", "a", "a b c"), ["a b", "", " c", ""]),  # it came back
        (("a b", "ab c"), ["a b", "", " c"]),  # "a b c": one character too many
        (("a bcd", "a b"), ["a bcd", "", ""]),
        (("say", "pray to"), ["say", "", " to"]),
        (("x" * 300, "y" * 300 + "z"), ["x" * 300, "", "z"]),
        (("ab", *("a" + "c" * n for n in range(1, 10)), "acccccccccd"), ["ab", *[""] * 7, "c" * 8, "c", "d", ""]),  # it stays changed
        (("\ufffd", "\ufffd\ufffd", "é"), ["", "", "é", ""]),
        (("a", "a\ufffd"), ["a", "", "\ufffd"]),
    ],
)
def test_a_text_that_changes(texts: tuple[str, ...], expected: list[str]) -> None:
    assert streamed(Changing(*texts), list(range(len(texts)))) == expected
