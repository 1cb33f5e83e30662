"""Tokenizers that are trained, read from a folder, and refused; and the whole way from a `data` section to sequences."""

import pytest

from plait.config.schema.sections import DataSection
from plait.data.prepare import prepare
from plait.data.text import Corpus, open_corpus
from plait.data.tokenizer import (
    END_OF_TEXT,
    is_held_out,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    vocabulary_size,
)
from plait.errors import InputError

pytest.importorskip("tokenizers")

TEXT = "def add(a, b):\n    return a + b  # größer, 你好 🙂\n\n\nclass Number:\n    value = 1\n"


def section_of(paths, **fields):
    fields = {"vocab_size": 300, "sequence_length": 16, "validation_fraction": 0.2, **fields}
    return DataSection(source="files", paths=(str(paths),), **fields)


@pytest.fixture
def files(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(TEXT * 3 + str(number))
    return section_of(f"{tmp_path}/*.txt")


def _silent(_):
    pass


def prepared(section, cache, *, model=None, **changes):
    changed = section.model_copy(update=changes)
    return prepare(changed, cache=cache, model_tokenizer=model, report=_silent)


def test_a_trained_tokenizer_gives_every_text_back(tmp_path, files):
    corpus = open_corpus(files, cache=tmp_path)
    tokenizer = load_tokenizer(train_tokenizer(corpus, files, cache=tmp_path, report=_silent))
    assert vocabulary_size(tokenizer) == 300
    assert tokenizer.eos_token == END_OF_TEXT
    again = load_tokenizer(train_tokenizer(corpus, files, cache=tmp_path / "again", report=_silent))
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)
    for text in (TEXT, "  leading", "never seen ж\t\r\n\0"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_held_out_text_does_not_train_the_tokenizer(tmp_path):
    section = section_of("unused", vocab_size=400, validation_fraction=0.5)
    documents = [f"{number} " + "zebra" * 50 for number in range(40)]
    others = [document.replace("zebra", "quokka") for document in documents]
    held_out = [document for document in others if is_held_out(document, 0.5)]
    trained = [document for document in documents if not is_held_out(document, 0.5)]
    corpus = Corpus("made up", "1", "data.paths", lambda: iter([*trained, *held_out]))
    folder = train_tokenizer(corpus, section, cache=tmp_path, report=_silent)
    words = load_tokenizer(folder).get_vocab()
    assert any("zebra" in word for word in words)
    assert not any("quokka" in word for word in words)


def test_text_without_a_letter_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    section = section_of(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="no text to train on"):
        prepared(section, tmp_path / "cache")


@pytest.mark.parametrize(
    ("place", "words"),
    [("missing", "there is no such file or folder"), ("broken", "no tokenizer can be read")],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, place, words):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=rf"data\.tokenizer.*{words}"):
        load_tokenizer(tmp_path / place)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match="no end-of-text token"):
        load_tokenizer(tmp_path / "bare")


def test_work_is_told_once_and_cached(tmp_path, files):
    said = []
    first = prepare(files, cache=tmp_path / "cache", model_tokenizer=None, report=said.append)
    assert [line.split()[0] for line in said] == ["training", "tokenising"]
    second = prepare(files, cache=tmp_path / "cache", model_tokenizer=None, report=said.append)
    assert len(said) == 2
    assert first.identity == second.identity
    assert first.train.stream.tokens.tolist() == second.train.stream.tokens.tolist()
    assert len(first.validation) > 0


def test_a_tokenizer_of_ones_own_is_used(tmp_path, files):
    corpus = open_corpus(files, cache=tmp_path)
    smaller = files.model_copy(update={"vocab_size": 280})
    other = train_tokenizer(corpus, smaller, cache=tmp_path, report=_silent)
    found = prepared(files, tmp_path, model="/nowhere", tokenizer=str(other))
    assert vocabulary_size(found.tokenizer) == 280
    file = prepared(files, tmp_path, tokenizer=str(other / "tokenizer.json"))
    models = prepared(files, tmp_path, model=str(other))
    assert file.identity == models.identity == found.identity


def test_one_long_document_gives_its_end_for_validation(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT * 200)
    book = tmp_path / "book.txt"
    section = section_of(book, sequence_length=32, validation_fraction=0.1)
    every = prepared(section, tmp_path, validation_fraction=0.0).train.stream.tokens.tolist()
    found = prepared(section, tmp_path)
    assert "the last 10 % of the text" in found.validation_note
    held_out = found.validation.stream.tokens
    assert [*found.train.stream.tokens, *held_out] == every
    assert 0.1 <= len(held_out) / len(every) < 0.12
