"""A text that is read as it is needed: its sequences are those of the prepared text, on any number of ranks, from any position."""

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
from tests.unit.data.byte_tokenizer import tokenizer

LENGTH, BATCH = 16, 4
KINDS = ["disk", "parquet", "jsonl"]


def texts(count=150):
    """Texts of 1 to 40 letters, all different."""
    lengths = np.random.default_rng(3).integers(0, 38, count)
    return [
        f"{number}" + "abcdefghij"[number % 10] * int(length)
        for number, length in enumerate(lengths)
    ]


def conversations(count=60):
    found = []
    for number in range(count):
        turns = (("user", f"{number}?"), ("assistant", "Yes. " * (1 + number % 3)))
        found.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return found


def written(folder, rows, kind):
    """Write a data set that the library opens, and return its folder."""
    place, half = folder / kind, len(rows) // 2
    place.mkdir(parents=True)
    if kind == "disk":
        Dataset.from_list(rows).save_to_disk(str(place))
    for number, part in enumerate((rows[:half], rows[half:])):
        if kind == "parquet":
            Dataset.from_list(part).to_parquet(str(place / f"{number}.parquet"), batch_size=7)
        elif kind == "jsonl":
            (place / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return str(place)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A function that prepares rows, read at once or streamed."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    places = {}

    def opens(rows, *, kind="disk", fraction=0.1, **settings):
        if kind not in places:
            places[kind] = written(tmp_path, rows, kind)
        settings = {"tokenizer": str(tmp_path / "tokenizer"), "sequence_length": LENGTH, **settings}
        paths = {"source": "datasets", "paths": (places[kind],)}
        section = DataSection(**paths, validation_fraction=fraction, **settings)
        cache = tmp_path / "cache"
        return prepare(section, cache=cache, model_tokenizer=None, report=lambda _: None)

    return opens


def rows_of(found):
    return [{"text": text} for text in found]


def loader_of(data, rank=0, ranks=1):
    return data.loader(BATCH, 5, dp_rank=rank, dp_size=ranks)


def batches(loader, first, last):
    return [loader.at(step * BATCH) for step in range(first, last)]


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("packing", [None, "documents"])
@pytest.mark.parametrize("form", ["text", "chat"])
def test_one_block_is_the_prepared_text(opened, form, packing):
    """All bits are equal, in both epochs and for the held-out documents."""
    rows = rows_of(texts()) if form == "text" else conversations()
    whole = opened(rows, format=form, packing=packing)
    streamed = opened(rows, format=form, packing=packing, streaming=True)
    steps = 2 * len(whole.train) // BATCH + 1
    assert_equal(batches(loader_of(streamed), 0, steps), batches(loader_of(whole), 0, steps))
    numbers = np.arange(len(whole.validation))
    assert len(numbers) > 1
    assert_equal([streamed.validation.take(numbers)], [whole.validation.take(numbers)])


@pytest.mark.parametrize("packing", [None, "documents"])
def test_every_epoch_has_each_training_document_once(opened, packing):
    """The tokens of several blocks are those of the documents."""
    documents = texts()
    data = opened(rows_of(documents), streaming=True, buffer_sequences=30, packing=packing)
    loader, epochs, tokens = loader_of(data), 2, []
    while (state := loader.state())["epoch"] < epochs and len(tokens) < 10**6:
        assert state["block"] < 10
        tokens += loader.at(state["position"])["input_ids"].flatten().tolist()
    trained = [text for text in documents if not is_held_out(text, 0.1)]
    expected = [token for text in trained for token in tokenizer()(text)["input_ids"]]
    ends = tokenizer().eos_token_id
    counts = np.bincount([token for token in tokens if token != ends], minlength=257)
    difference = counts - np.bincount(expected, minlength=257) * epochs
    # The last batch of the loop may have begun the epoch after these; `documents` leaves out what is one token alone.
    assert 0 <= difference.max() <= BATCH * LENGTH
    assert -difference.min() <= (0 if packing is None else epochs * len(documents))
    assert state["block"] >= 0 and loader.sequences.buffer * LENGTH < len(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_every_position_on_any_number_of_ranks(opened, kind):
    """Positions are within blocks, at their ends and over those of epochs. The state passes through a checkpoint's metadata."""
    data = opened(rows_of(texts()), kind=kind, streaming=True, buffer_sequences=20)
    loader, wanted, states = loader_of(data), [], []
    for step in range(56):
        states.append(json.dumps(exact.encode(loader.state(), "state")))
        wanted += batches(loader, step, step + 1)
    skipping, kept = loader_of(data), (0, 1, 5, 6, 7)
    assert_equal([skipping.at(step * BATCH) for step in kept], [wanted[step] for step in kept])
    assert {json.loads(state)["epoch"] for state in states} >= {0, 1}
    over = next(step for step, state in enumerate(states) if json.loads(state)["epoch"])
    for step in (0, 1, 4, 5, 6, 11, 28, over - 2, over - 1, over, over + 1):
        for ranks in (1, 2, 4):
            parts = []
            for rank in range(ranks):
                again = loader_of(data, rank, ranks)
                again.restore(exact.decode(json.loads(states[step]), where="state"))
                parts.append(batches(again, step, step + 2))
            together = [
                {name: torch.cat([part[at][name] for part in parts]) for name in wanted[0]}
                for at in range(2)
            ]
            assert_equal(together, wanted[step : step + 2])


def test_blocks_above_the_text_and_batches_above_a_block(opened):
    data = opened(rows_of(texts(70)), streaming=True, buffer_sequences=1)
    found = data.loader(50, 0, dp_rank=0, dp_size=1).at(0)
    assert found["input_ids"].shape == (50, LENGTH) and (found["labels"] != IGNORED).any(1).all()


def test_a_text_that_has_changed_is_refused(opened, tmp_path):
    data = opened(rows_of(texts()), kind="jsonl", streaming=True, buffer_sequences=20)
    loader = loader_of(data)
    batches(loader, 0, 30)
    state = loader.state()
    assert state["block"]
    for file in (tmp_path / "jsonl").iterdir():
        file.write_text(file.read_text().replace('"text": "', '"text": "another '))
    words = "the text has changed: the checkpoint continues after 120 seq"
    with pytest.raises(CheckpointError, match=words):
        loader_of(data).restore(state)


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
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
def test_rows_that_cannot_be_read_are_refused_before_the_run(opened, rows, settings, words):
    with pytest.raises(InputError, match=words):
        opened(rows, streaming=True, fraction=0.0, **settings)


def test_a_row_that_cannot_be_read_later(opened):
    """The message names its number in the pass, also in a resumed run."""
    data = opened([*rows_of(texts(200)), {"text": None}], streaming=True, buffer_sequences=20)
    loader = loader_of(data)
    batches(loader, 0, 10)
    again = loader_of(data)
    again.restore(loader.state())
    with pytest.raises(InputError, match="row 200: 'text' holds a NoneType"):
        batches(again, 10, 200)


def test_a_text_of_nothing_later_does_not_turn_for_ever(opened):
    """Each document is an end-of-text token alone, and a block never has a sequence."""
    settings = {"streaming": True, "packing": None, "buffer_sequences": 1, "fraction": 0.0}
    data = opened([{"text": ""}] * 300, **settings)
    broken = data.loader(1, 0, dp_rank=0, dp_size=1)
    assert broken.at(0)["input_ids"].shape == (1, LENGTH)  # joined, they are one
    object.__setattr__(data.train, "make_sequences", lambda stream, length, padding: [])
    with pytest.raises(InputError, match="holds no sequence of at least 2 training tokens"):
        data.loader(1, 0, dp_rank=0, dp_size=1).at(0)


def test_it_needs_a_tokenizer(tmp_path):
    paths = (written(tmp_path, rows_of(texts()), "disk"),)
    section = DataSection(source="datasets", paths=paths, streaming=True)
    words = r"Plait trains none on a streamed text; set data.tokenizer"
    with pytest.raises(InputError, match=words):
        prepare(section, cache=tmp_path, model_tokenizer=None, report=lambda _: None)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"source": "jsonl", "streaming": True}, '`streaming` belongs to source "datasets", not "jsonl"'),
        ({"source": "datasets", "buffer_sequences": 7}, "`buffer_sequences` is read only with `streaming`"),
        ({"source": "datasets", "streaming": True, "buffer_sequences": 0}, "buffer_sequences"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(section, words):
    with pytest.raises(ConfigError, match=words):
        load({"train_batch_size": 1, "data": {"paths": ["a"], **section}})
