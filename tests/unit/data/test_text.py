"""Documents that a `data` section names, and paths and rows that are refused."""

import json
import os

import pytest
from datasets import Dataset, DatasetDict

from plait.config.schema.sections import DataSection
from plait.data.text import find_files, open_corpus
from plait.errors import InputError


def _documents(cache, **section):
    return list(open_corpus(DataSection(**section), cache=cache).documents())


def _fingerprint(cache, **section):
    return open_corpus(DataSection(**section), cache=cache).fingerprint


def _write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def test_files_are_sorted_and_each_counts_once(tmp_path):
    names = "hdbgecaf"
    for name in names:
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    paths = (f"{tmp_path}/*.txt", f"{tmp_path}/b.txt", str(tmp_path))
    documents = _documents(tmp_path / "cache", source="files", paths=paths)
    assert documents == [f"text {name}" for name in sorted(names)]


def test_a_folder_means_the_text_files_below_it(tmp_path):
    (tmp_path / "deep").mkdir()
    _write(tmp_path / "deep", a="one")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\x89")
    assert find_files((str(tmp_path),), suffixes=(".txt",)) == [tmp_path / "deep" / "a.txt"]


def test_the_fingerprint_follows_the_content(tmp_path):
    section = {"source": "files", "paths": (f"{tmp_path}/*.txt",)}

    def fingerprint():
        return _fingerprint(tmp_path / "cache", **section)

    _write(tmp_path, a="one", b="two")
    before = fingerprint()
    assert fingerprint() == before
    # The modification time does not count.
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert fingerprint() == before
    _write(tmp_path, a="onf")
    assert fingerprint() != before
    # The same bytes with another boundary are another text.
    _write(tmp_path, a="onet", b="wo")
    assert fingerprint() != before


@pytest.mark.parametrize("path", ["missing.txt", "*.nothing", "empty"])
def test_a_path_without_files_is_refused(tmp_path, path):
    (tmp_path / "empty").mkdir()
    section = DataSection(source="files", paths=(str(tmp_path / path),))
    with pytest.raises(InputError, match=r"data\.paths"):
        open_corpus(section, cache=tmp_path / "cache")


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine \xff not")
    with pytest.raises(InputError, match=r"bad\.txt: the byte at offset 5 is not UTF-8"):
        _documents(tmp_path / "cache", source="files", paths=(str(tmp_path / "bad.txt"),))


def test_documents_of_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two", "text": "no"}\n')
    section = {"source": "jsonl", "paths": (str(tmp_path),), "field": "body"}
    assert _documents(tmp_path / "cache", **section) == ["one", "two"]


def test_a_bad_line_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    for line, message in (
        ('{"body": "x"}', r"line 2: has no field 'text'; it has 'body'"),
        ('{"text": 3}', r"line 2: 'text' holds a int"),
        ('["text"]', r"line 2: is not a JSON object"),
        ('{"text": ', r"line 2: not valid JSON"),
    ):
        file.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
        with pytest.raises(InputError, match=message):
            _documents(tmp_path / "cache", source="jsonl", paths=(str(file),))


def test_documents_of_the_standard_library(tmp_path):
    section = DataSection(source="python-stdlib")
    corpus = open_corpus(section, cache=tmp_path)
    assert corpus.fingerprint == open_corpus(section, cache=tmp_path).fingerprint
    texts = list(corpus.documents())
    assert len(texts) > 300
    assert any("class JSONDecoder" in text for text in texts)
    assert texts == list(corpus.documents())


@pytest.fixture
def dataset(tmp_path):
    columns = {"text": ["one", "two"], "title": ["1", "2"], "other": [1, 2]}
    rows = Dataset.from_dict(columns)
    DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "set")
    return {"source": "datasets", "paths": (str(tmp_path / "set"),)}


def test_a_data_set_from_disk(tmp_path, dataset):
    assert _documents(tmp_path, **dataset) == ["one", "two"]
    assert _documents(tmp_path, **dataset, split="test") == ["two"]
    changes = ({}, {"split": "test"}, {"field": "title"})
    assert len({_fingerprint(tmp_path, **dataset, **change) for change in changes}) == 3
    for change, message in (
        ({"split": "dev"}, r"data\.split = 'dev'.*'train', 'test'"),
        ({"field": "body"}, r"data\.field = 'body'.*text, title, other"),
        ({"field": "other"}, r"row 0: 'other' holds a int"),
    ):
        with pytest.raises(InputError, match=message):
            _documents(tmp_path, **dataset, **change)
