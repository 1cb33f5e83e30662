"""Text as tokens come: pieces that add up to the tokenizer's own text of all tokens."""

import random

import pytest
import torch

from plait.inference.decode import STOP, TokenSampler
from plait.inference.generation_settings import GenerationSettings
from plait.inference.requests import GenerationRequest, TextStream, text_after

WORDS = ["[UNK]", "[PAD]", "do", "n", "'", "t", ".", "it", "s", "n't", "'s", "hello", "v", "##e", "ve", "?", ",", "##n"]  # fmt: skip


def fast_tokenizer(core, **settings):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **settings)


def word_pieces():
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: at for at, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.WordPiece()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    return fast_tokenizer(made, clean_up_tokenization_spaces=True, **special)


def streamed(tokenizer, tokens):
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in tokens), stream.remainder()]


def test_spaces_that_a_clean_up_removes():
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
    """A tokenizer with a given text for each number of tokens."""

    def __init__(self, *texts):
        self.texts = texts

    def decode(self, ids, **_):
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
)  # fmt: skip
def test_a_text_that_changes(texts, expected):
    assert streamed(Changing(*texts), list(range(len(texts)))) == expected


def marks_spaces():
    """A tokenizer that marks a space before each word and leaves the first one out, like Llama 2's."""
    tokenizers = pytest.importorskip("tokenizers")
    characters = (f"<0x{byte:02X}>" for byte in "é".encode())
    pieces = ["<unk>", "</s>", "▁The", "▁quick", "▁lazy", "▁dog", "s", ".", *characters]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    settings = {"merges": [], "unk_token": "<unk>", "byte_fallback": True}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, **settings))
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return fast_tokenizer(made, unk_token="<unk>", eos_token="</s>")


def test_the_space_between_prompt_and_answer_stays():
    tokenizer, prompt, new = marks_spaces(), [2, 3], [4, 5, 6, 7, 1]
    assert tokenizer.decode(new, skip_special_tokens=True) == "lazy dogs."
    assert text_after(tokenizer, prompt, new, skip_special_tokens=True) == " lazy dogs."
    stream = TextStream(tokenizer, prompt)
    pieces = [*(stream.add(token) for token in new), stream.remainder()]
    assert pieces == [" lazy", " dog", "s", ".", "", ""]
    assert text_after(tokenizer, [], new, skip_special_tokens=True) == "lazy dogs."
    # A character of both is the answer's.
    assert text_after(tokenizer, [2, 8], [9, 6], skip_special_tokens=True) == "és"


def test_a_stop_string_is_seen_in_the_first_word():
    settings = GenerationSettings(stop_strings=(" lazy",))
    chooser = TokenSampler([GenerationRequest((2, 3), 4, None)], settings, marks_spaces())
    scores = torch.zeros(1, 10)
    scores[0, 4] = 1
    assert chooser(scores, [0])[2].tolist() == [STOP]
