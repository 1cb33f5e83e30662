"""Tokenizers that are trained, read from a folder, or refused, and data prepared with them."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

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


def test_a_trained_tokenizer_decodes_its_tokens(tmp_path, files):
    corpus = open_corpus(files, cache=tmp_path)
    tokenizer = load_tokenizer(train_tokenizer(corpus, files, cache=tmp_path, report=_silent))
    assert vocabulary_size(tokenizer) == 300
    assert tokenizer.eos_token == END_OF_TEXT
    # A second training gives the same tokenizer.
    folder = train_tokenizer(corpus, files, cache=tmp_path / "second", report=_silent)
    assert tokenizer_digest(load_tokenizer(folder)) == tokenizer_digest(tokenizer)
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
    tokens = " ".join(load_tokenizer(folder).get_vocab())
    assert "zebra" in tokens
    assert "quokka" not in tokens


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    section = section_of(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="no text to train on"):
        prepared(section, tmp_path / "cache")


@pytest.mark.parametrize(
    ("folder", "message"),
    [("missing", "there is no such file or folder"), ("broken", "no tokenizer can be read")],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, folder, message):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=rf"data\.tokenizer.*{message}"):
        load_tokenizer(tmp_path / folder)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    bare = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match="no end-of-text token"):
        load_tokenizer(tmp_path / "bare")


def test_work_is_reported_once_and_cached(tmp_path, files):
    reports = []
    first = prepare(files, cache=tmp_path / "cache", model_tokenizer=None, report=reports.append)
    assert [line.split()[0] for line in reports] == ["training", "tokenising"]
    second = prepare(files, cache=tmp_path / "cache", model_tokenizer=None, report=reports.append)
    assert len(reports) == 2
    assert first.identity == second.identity
    assert first.train.stream.tokens.tolist() == second.train.stream.tokens.tolist()
    assert len(first.validation) > 0


def test_a_given_tokenizer_is_used(tmp_path, files):
    corpus = open_corpus(files, cache=tmp_path)
    smaller = files.model_copy(update={"vocab_size": 280})
    folder = train_tokenizer(corpus, smaller, cache=tmp_path, report=_silent)
    # data.tokenizer has precedence over the model's tokenizer.
    from_folder = prepared(files, tmp_path, model="/nowhere", tokenizer=str(folder))
    assert vocabulary_size(from_folder.tokenizer) == 280
    from_file = prepared(files, tmp_path, tokenizer=str(folder / "tokenizer.json"))
    from_model = prepared(files, tmp_path, model=str(folder))
    assert from_file.identity == from_model.identity == from_folder.identity


def test_the_end_of_a_single_document_is_the_validation_data(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT * 200)
    book = tmp_path / "book.txt"
    section = section_of(book, sequence_length=32, validation_fraction=0.1)
    tokens = prepared(section, tmp_path, validation_fraction=0.0).train.stream.tokens.tolist()
    split = prepared(section, tmp_path)
    assert "the last 10 % of the text" in split.validation_note
    held_out = split.validation.stream.tokens
    assert [*split.train.stream.tokens, *held_out] == tokens
    assert 0.1 <= len(held_out) / len(tokens) < 0.12
