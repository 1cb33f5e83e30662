"""Documents become one stream with an end mark after each, and the stream becomes sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data import packing
from plait.data.packing import IGNORED, Sequences, Stream, read_tokens, write_tokens
from plait.data.tokenizer import is_held_out
from plait.errors import InputError


class LetterTokenizer:
    """Tokenizer with one token per letter, and 0 for the end of a text."""

    eos_token_id = 0

    def __init__(self, *, largest=200):
        self._largest = largest
        self.texts = []

    def get_vocab(self):
        return {"end": 0, "largest": self._largest}

    def __call__(self, texts, **_):
        self.texts += texts
        return {"input_ids": [list(map(ord, text)) for text in texts]}


def tokens_of(*documents):
    tokens = []
    for document in documents:
        tokens += [*map(ord, document), 0]
    return tokens


def test_documents_are_joined_with_an_end_mark(tmp_path):
    write_tokens(tmp_path, ["ab", "", "c"], LetterTokenizer(), held_out=0)
    train, validation = read_tokens(tmp_path)
    assert train.tokens.tolist() == tokens_of("ab", "", "c")
    assert len(validation) == 0


def test_held_out_documents_are_complete_and_not_trained_on(tmp_path):
    documents = [f"document {number}" for number in range(200)]
    write_tokens(tmp_path, documents, LetterTokenizer(), held_out=0.25)
    train, validation = read_tokens(tmp_path)
    held_out = [document for document in documents if is_held_out(document, 0.25)]
    trained = [document for document in documents if document not in held_out]
    assert 20 < len(held_out) < 80
    assert validation.tokens.tolist() == tokens_of(*held_out)
    assert train.tokens.tolist() == tokens_of(*trained)


def test_a_long_document_is_tokenised_in_parts_of_lines(tmp_path, monkeypatch):
    """The tokens are those of one document."""
    # Documents are longer than this limit, which is 10 million in use.
    monkeypatch.setattr(packing, "_BATCH_CHARACTERS", 10)
    documents = ["one\ntwo\nthree\n", "without any end of a line", "x"]
    tokenizer = LetterTokenizer()
    write_tokens(tmp_path, documents, tokenizer, held_out=0)
    assert tokenizer.texts[:2] == ["one\ntwo\n", "three\n"]
    assert read_tokens(tmp_path)[0].tokens.tolist() == tokens_of(*documents)


@pytest.mark.parametrize(("largest", "width"), [(65_535, 2), (65_536, 4)])
def test_tokens_take_as_many_bytes_as_they_need(tmp_path, largest, width):
    tokenizer = LetterTokenizer(largest=largest)
    write_tokens(tmp_path, [chr(largest)], tokenizer, held_out=0)
    train, _ = read_tokens(tmp_path)
    assert train.tokens.itemsize == width
    assert train.tokens[0] == largest


def test_a_truncated_file_is_refused(tmp_path):
    write_tokens(tmp_path, ["abc"], LetterTokenizer(), held_out=0)
    (tmp_path / "train.bin").write_bytes(b"\0\0")
    with pytest.raises(InputError, match=r"train\.bin: does not hold the 4 numbers"):
        read_tokens(tmp_path)


@given(count=st.integers(0, 60), length=st.integers(2, 9))
def test_sequences_hold_every_token_once(count, length):
    tokens = np.arange(1, count + 1, dtype=np.uint16)
    sequences = Sequences(Stream(tokens, np.array([len(tokens)])), length, padding=0)
    batch = sequences.take(np.arange(len(sequences)))
    scored = batch["labels"][batch["labels"] != IGNORED].tolist()
    # A single token at the end has nothing to predict.
    omitted = 1 if count % length == 1 else 0
    assert scored == tokens.tolist()[: count - omitted]
    assert batch["input_ids"].shape == (len(sequences), length)
    assert not batch["input_ids"][batch["labels"] == IGNORED].any()


def test_a_sequence_of_padding_is_not_scored():
    stream = Stream(np.arange(8, dtype=np.uint16), np.array([8]))
    batch = Sequences(stream, 4, padding=7).take(np.array([1, -1]))
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7], [7, 7, 7, 7]]
    assert batch["labels"].tolist() == [[4, 5, 6, 7], [IGNORED] * 4]
