"""Streamed texts give the sequences of the prepared text, on any number of ranks."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from plait import exact
from plait.config.resolving.resolve import load
from plait.config.schema.sections import DataSection
from plait.data.packing import IGNORED
from plait.data.prepare import prepare
from plait.data.tokenizer import is_held_out
from plait.errors import CheckpointError, ConfigError, InputError
from tests.unit.data.byte_tokenizer import END_OF_TEXT, tokenizer

LENGTH = 16
BATCH = 4
KINDS = ["disk", "parquet", "jsonl"]


def texts(count=150):
    """Return different texts of 1 to 40 letters."""
    lengths = np.random.default_rng(3).integers(0, 38, count)
    return [f"{n}" + "abcdefghij"[n % 10] * int(length) for n, length in enumerate(lengths)]


def rows_of(documents):
    return [{"text": text} for text in documents]


def conversations(count=60):
    rows = []
    for number in range(count):
        question = {"role": "user", "content": f"{number}?"}
        answer = {"role": "assistant", "content": "Yes. " * (1 + number % 3)}
        rows.append({"messages": [question, answer]})
    return rows


def save(rows, folder, kind):
    """Write a data set that the library opens. Kinds other than "disk" have two files."""
    folder.mkdir(parents=True)
    if kind == "disk":
        Dataset.from_list(rows).save_to_disk(str(folder))
        return
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        file = folder / f"{number}.{kind}"
        if kind == "parquet":
            Dataset.from_list(part).to_parquet(str(file), batch_size=7)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in part))


@pytest.fixture
def prepare_rows(tmp_path, monkeypatch):
    """Function that prepares rows, read at once or streamed."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    tokenizer().save_pretrained(tmp_path / "tokenizer")

    def prepare_data(rows, *, kind="disk", fraction=0.1, **settings):
        folder = tmp_path / kind
        if not folder.exists():
            save(rows, folder, kind)
        section = DataSection(
            source="datasets",
            paths=(str(folder),),
            tokenizer=str(tmp_path / "tokenizer"),
            sequence_length=LENGTH,
            validation_fraction=fraction,
            **settings,
        )
        cache = tmp_path / "cache"
        return prepare(section, cache=cache, model_tokenizer=None, report=lambda _: None)

    return prepare_data


def loader_of(data, rank=0, ranks=1):
    return data.loader(BATCH, 5, dp_rank=rank, dp_size=ranks)


def batches(loader, first, last):
    return [loader.at(step * BATCH) for step in range(first, last)]


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("packing", [None, "documents"])
@pytest.mark.parametrize("form", ["text", "chat"])
def test_one_block_is_the_prepared_text(prepare_rows, form, packing):
    """Batches are equal in two epochs, and so is the validation data."""
    rows = rows_of(texts()) if form == "text" else conversations()
    prepared = prepare_rows(rows, format=form, packing=packing)
    streamed = prepare_rows(rows, format=form, packing=packing, streaming=True)
    steps = 2 * len(prepared.train) // BATCH + 1
    assert_equal(batches(loader_of(streamed), 0, steps), batches(loader_of(prepared), 0, steps))
    numbers = np.arange(len(prepared.validation))
    assert len(numbers) > 1
    assert_equal(streamed.validation.take(numbers), prepared.validation.take(numbers))


@pytest.mark.parametrize("packing", [None, "documents"])
def test_every_epoch_has_each_training_document_once(prepare_rows, packing):
    """The tokens of several blocks are those of the documents."""
    epochs = 2
    documents = texts()
    data = prepare_rows(rows_of(documents), streaming=True, buffer_sequences=30, packing=packing)
    loader = loader_of(data)
    tokens = []
    while (state := loader.state())["epoch"] < epochs and len(tokens) < 10**6:
        assert 0 <= state["block"] < 10
        tokens += loader.at(state["position"])["input_ids"].flatten().tolist()

    trained = [text for text in documents if not is_held_out(text, 0.1)]
    expected = tokenizer()("".join(trained))["input_ids"]
    assert loader.sequences.buffer * LENGTH < len(expected), "there is only one block"
    counts = np.bincount(tokens, minlength=257)[:END_OF_TEXT]
    difference = counts - np.bincount(expected, minlength=257)[:END_OF_TEXT] * epochs
    # The last batch may contain the beginning of the next epoch.
    assert 0 <= difference.max() <= BATCH * LENGTH
    # Packing of documents omits a last part of a single token.
    assert -difference.min() <= (0 if packing is None else epochs * len(documents))


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_resumes_on_any_number_of_ranks(prepare_rows, kind):
    """The positions include ends of blocks and of an epoch."""
    data = prepare_rows(rows_of(texts()), kind=kind, streaming=True, buffer_sequences=20)
    loader = loader_of(data)
    expected = []
    states = []
    for step in range(56):
        # The state passes through a checkpoint's metadata.
        states.append(json.dumps(exact.encode(loader.state(), "state")))
        expected += batches(loader, step, step + 1)

    skipping = loader_of(data)
    for step in (0, 1, 5, 6, 7):
        assert_equal(skipping.at(step * BATCH), expected[step])

    epochs = [json.loads(state)["epoch"] for state in states]
    second = epochs.index(1)
    for step in (0, 1, 4, 5, 6, 11, 28, second - 2, second - 1, second, second + 1):
        for ranks in (1, 2, 4):
            parts = []
            for rank in range(ranks):
                resumed = loader_of(data, rank, ranks)
                resumed.restore(exact.decode(json.loads(states[step]), where="state"))
                parts.append(batches(resumed, step, step + 2))
            for index, of_ranks in enumerate(zip(*parts, strict=True)):
                for name, tensor in expected[step + index].items():
                    assert torch.equal(torch.cat([part[name] for part in of_ranks]), tensor)


def test_a_batch_that_is_larger_than_a_block(prepare_rows):
    data = prepare_rows(rows_of(texts(70)), streaming=True, buffer_sequences=1)
    batch = data.loader(50, 0, dp_rank=0, dp_size=1).at(0)
    assert batch["input_ids"].shape == (50, LENGTH)
    assert (batch["labels"] != IGNORED).any(1).all()


def test_a_text_that_has_changed_is_refused(prepare_rows, tmp_path):
    data = prepare_rows(rows_of(texts()), kind="jsonl", streaming=True, buffer_sequences=20)
    loader = loader_of(data)
    batches(loader, 0, 30)
    state = loader.state()
    assert state["block"]
    for file in (tmp_path / "jsonl").iterdir():
        file.write_text(file.read_text().replace('"text": "', '"text": "another '))
    message = "the text has changed: the checkpoint continues after 120 seq"
    with pytest.raises(CheckpointError, match=message):
        loader_of(data).restore(state)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"text": "abc"}, {"text": None}], {}, "row 1: 'text' holds a NoneType and not a string"),
        ([{"words": "abc"}], {}, "row 0: has no field 'text'; it has 'words'; set data.field"),
        ([{"text": ""}], {"packing": "documents"}, "holds 1 training tokens"),
        ([{"text": ""}] * 300, {"packing": "documents"}, "holds 300 training tokens"),
        (
            [{"text": "abc"}],
            {"split": "test"},
            "has no such split; set data.split to one of 'train'",
        ),
        ([{"messages": []}], {"format": "chat"}, "row 0: 'messages' is not a list with messages"),
    ],
)
def test_unreadable_first_rows_are_refused_before_the_run(prepare_rows, rows, settings, message):
    with pytest.raises(InputError, match=message):
        prepare_rows(rows, streaming=True, fraction=0.0, **settings)


def test_an_unreadable_later_row_is_named(prepare_rows):
    """Rows are counted from the start of the data, also in a resumed run."""
    data = prepare_rows([*rows_of(texts(200)), {"text": None}], streaming=True, buffer_sequences=20)
    loader = loader_of(data)
    batches(loader, 0, 10)
    resumed = loader_of(data)
    resumed.restore(loader.state())
    with pytest.raises(InputError, match="row 200: 'text' holds a NoneType"):
        batches(resumed, 10, 200)


def test_a_text_without_sequences_is_refused(prepare_rows):
    """Otherwise the loader would read the text forever."""
    settings = {"streaming": True, "packing": None, "buffer_sequences": 1, "fraction": 0.0}
    data = prepare_rows([{"text": ""}] * 300, **settings)
    # The end-of-text tokens of empty documents make a sequence.
    batch = data.loader(1, 0, dp_rank=0, dp_size=1).at(0)
    assert batch["input_ids"].shape == (1, LENGTH)
    # No text that passes the checks before the run has no sequence.
    object.__setattr__(data.train, "make_sequences", lambda stream, length, padding: [])
    with pytest.raises(InputError, match="holds no sequence of at least 2 training tokens"):
        data.loader(1, 0, dp_rank=0, dp_size=1).at(0)


def test_a_streamed_text_needs_a_tokenizer(tmp_path):
    save(rows_of(texts()), tmp_path / "disk", "disk")
    section = DataSection(source="datasets", paths=(str(tmp_path / "disk"),), streaming=True)
    message = r"Plait trains none on a streamed text; set data.tokenizer"
    with pytest.raises(InputError, match=message):
        prepare(section, cache=tmp_path, model_tokenizer=None, report=lambda _: None)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "jsonl", "streaming": True}, '`streaming` belongs to source "datasets"'),
        ({"source": "datasets", "buffer_sequences": 7}, "is read only with `streaming`"),
        ({"source": "datasets", "streaming": True, "buffer_sequences": 0}, "buffer_sequences"),
    ],
)
def test_settings_that_exclude_each_other(section, message):
    with pytest.raises(ConfigError, match=message):
        load({"train_batch_size": 1, "data": {"paths": ["a"], **section}})
