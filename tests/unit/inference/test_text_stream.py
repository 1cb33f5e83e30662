"""Streamed pieces of text add up to the tokenizer's text of all tokens."""

import random

import pytest
import torch

from plait.inference.decode import STOP, TokenSampler
from plait.inference.generation_settings import GenerationSettings
from plait.inference.requests import GenerationRequest, TextStream, text_after

WORDS = [
    "[UNK]",
    "[PAD]",
    "do",
    "n",
    "'",
    "t",
    ".",
    "it",
    "s",
    "n't",
    "'s",
    "hello",
    "v",
    "##e",
    "ve",
    "?",
    ",",
    "##n",
]


def word_piece_tokenizer():
    """Return a tokenizer whose clean-up removes spaces before punctuation, like BERT's."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: token for token, word in enumerate(WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.decoder = tokenizers.decoders.WordPiece()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=True,
        unk_token="[UNK]",
        pad_token="[PAD]",
    )


def streamed(tokenizer, tokens, prompt=()):
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.add, tokens), stream.remainder()]


def test_spaces_that_a_clean_up_removes():
    """`do n ' t` becomes "don't", but only with its last token."""
    tokenizer = word_piece_tokenizer()
    ids = [WORDS.index(word) for word in ("hello", "do", "n", "'", "t", ".")]
    assert streamed(tokenizer, ids) == ["hello", " do", "", "", "n't", ".", ""]
    assert streamed(tokenizer, ids[:4]) == ["hello", " do", "", "", " n '"]

    generator = random.Random(0)
    for _ in range(2000):
        ids = generator.choices(range(1, len(WORDS)), k=generator.randint(1, 9))
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


class ScriptedTokenizer:
    """A tokenizer with a given text for each number of tokens."""

    def __init__(self, *texts):
        self.texts = texts

    def decode(self, ids, **_):
        return self.texts[len(ids) - 1]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # The text comes back.
        (("a b", "a", "a b c"), ["a b", "", " c", ""]),
        # The pieces say "a b c", one character too many.
        (("a b", "ab c"), ["a b", "", " c"]),
        (("a bcd", "a b"), ["a bcd", "", ""]),
        (("say", "pray to"), ["say", "", " to"]),
        (("x" * 300, "y" * 300 + "z"), ["x" * 300, "", "z"]),
        # The text stays changed, so the stream goes on from the new text.
        (
            ("ab", *("a" + "c" * count for count in range(1, 10)), "acccccccccd"),
            ["ab", *[""] * 7, "c" * 8, "c", "d", ""],
        ),
        (("\ufffd", "\ufffd\ufffd", "é"), ["", "", "é", ""]),
        (("a", "a\ufffd"), ["a", "", "\ufffd"]),
    ],
)
def test_a_text_that_changes(texts, expected):
    assert streamed(ScriptedTokenizer(*texts), list(range(len(texts)))) == expected


def sentence_piece_tokenizer():
    """Return a tokenizer that marks spaces before words and drops the first, like Llama 2's."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = ["<unk>", "</s>", "▁The", "▁quick", "▁lazy", "▁dog", "s", ".", "<0xC3>", "<0xA9>"]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: token for token, word in enumerate(vocabulary)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>"
    )


def test_the_space_between_prompt_and_answer_stays():
    tokenizer = sentence_piece_tokenizer()
    prompt = [2, 3]
    answer = [4, 5, 6, 7, 1]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "lazy dogs."
    assert text_after(tokenizer, prompt, answer, skip_special_tokens=True) == " lazy dogs."
    assert streamed(tokenizer, answer, prompt) == [" lazy", " dog", "s", ".", "", ""]
    assert text_after(tokenizer, [], answer, skip_special_tokens=True) == "lazy dogs."
    # A character whose bytes are in both belongs to the answer.
    assert text_after(tokenizer, [2, 8], [9, 6], skip_special_tokens=True) == "és"


def test_a_stop_string_is_recognised_in_the_first_word():
    settings = GenerationSettings(stop_strings=(" lazy",))
    request = GenerationRequest((2, 3), 4, None)
    sampler = TokenSampler([request], settings, sentence_piece_tokenizer())
    logits = torch.zeros(1, 10)
    logits[0, 4] = 1
    assert sampler(logits, [0])[2].tolist() == [STOP]
