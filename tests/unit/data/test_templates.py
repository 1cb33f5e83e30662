"""Conversations and instructions as tokens: what is scored is what Transformers says of a template that marks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from plait.config.schema.sections import DataSection
from plait.data.packing import IGNORED
from plait.data.prepare import Prepared, prepare
from plait.data.rows import row_text
from plait.data.templates import encoder
from plait.errors import InputError
from tests.unit.data.byte_tokenizer import tokenizer

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Is the sky blue? é"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "No, it is night."},
]


def answers(encode: Callable[[str], tuple[list[int], list[bool]]], row: dict[str, Any], form: str = "chat") -> str:
    ids, scored = encode(row_text(row, form, where="row"))
    return str(tokenizer().decode([token for token, counts in zip(ids, scored, strict=True) if counts]))


def test_what_is_scored_is_what_transformers_says() -> None:
    made = tokenizer()
    ids, scored = encoder(made, "chat", scored="answers")(row_text({"messages": CHAT}, "chat", where="row"))
    theirs = made.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids, [int(one) for one in scored]) == (theirs["input_ids"], theirs["assistant_masks"])
    everything = encoder(made, "chat", scored="all")(row_text({"messages": CHAT}, "chat", where="row"))
    assert everything == (ids, [True] * len(ids))


def test_instructions() -> None:
    in_template, plain = encoder(tokenizer(), "instruct", scored="answers"), encoder(tokenizer(None), "instruct", scored="answers")
    pair = {"prompt": "2 + 2 = ", "completion": "4"}
    assert (answers(in_template, pair, "instruct"), answers(plain, pair, "instruct")) == ("4</s>", "4</s>")
    ids, _ = in_template(row_text({"instruction": "Add.", "input": "2, 2", "output": "4"}, "instruct", where="row"))
    assert tokenizer().decode(ids) == "<user>Add.\n\n2, 2<assistant>4</s>"
    ids, _ = plain(row_text({"instruction": "Add.", "input": "", "output": "4"}, "instruct", where="row"))
    assert tokenizer().decode(ids) == "Add.4</s>"


@pytest.mark.parametrize(
    ("form", "row", "said"),
    [
        ("chat", {"text": "x"}, "has no field 'messages'; it has 'text'"),
        ("chat", {"messages": []}, "is not a list with messages"),
        ("chat", {"messages": [{"role": "user"}]}, "message 1 is not an object with the texts"),
        ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "message 1"),
        ("chat", {"messages": ["x"]}, "message 1"),
        ("instruct", {"prompt": "x"}, "has the texts prompt and completion, or instruction and output"),
        ("instruct", {"instruction": 3, "output": "x"}, "has the texts"),
        ("instruct", {"instruction": "x", "output": "x", "input": 3}, "'input' holds a int"),
    ],
)
def test_a_row_that_is_none(form: str, row: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        row_text(row, form, where="a.jsonl, line 3")
    assert str(error.value).startswith("a.jsonl, line 3: ")


def test_templates_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="has no chat template; set data.tokenizer"):
        encoder(tokenizer(None), "chat", scored="answers")
    text = row_text({"messages": CHAT}, "chat", where="row")
    with pytest.raises(InputError, match=r"refuses a conversation \(alternate!\)"):
        encoder(tokenizer("{{ raise_exception('alternate!') }}"), "chat", scored="answers")(text)
    last = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(InputError, match="writes earlier messages otherwise"):
        encoder(tokenizer(last), "chat", scored="answers")(text)
    assert all(encoder(tokenizer(last), "chat", scored="all")(text)[1])


def prepared(folder: Path, **section: Any) -> Prepared:
    tokenizer().save_pretrained(folder / "tokenizer")
    data = DataSection(tokenizer=str(folder / "tokenizer"), validation_fraction=0, sequence_length=128, **section)
    return prepare(data, cache=folder / "cache", own_tokenizer=None, say=lambda _: None)


@pytest.mark.parametrize("packing", [None, "documents"])
def test_jsonl_and_data_sets_give_the_same(tmp_path: Path, packing: str | None) -> None:
    rows = [{"messages": CHAT[: 3 + 2 * (number % 2)], "id": number} for number in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    found = prepared(tmp_path, source="jsonl", paths=(str(tmp_path / "a.jsonl"),), format="chat", packing=packing)
    other = prepared(tmp_path, source="datasets", paths=(str(tmp_path / "set"),), format="chat", packing=packing)
    everything = list(range(len(found.train)))
    ours, theirs = found.train.take(everything), other.train.take(everything)  # type: ignore[arg-type]
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert ("position_ids" in ours) == (packing == "documents")
    scored = ours["labels"][ours["labels"] != IGNORED].tolist()
    text = found.tokenizer.decode(scored)
    assert text.count("Yes.</s>") == 6 and text.count("No, it is night.</s>") == 3
    assert len(text) == 6 * 8 + 3 * 20
    assert found.identity["data.format"].startswith("chat, scored: answers") and found.identity["data.packing"] == (packing or "left out")


def test_what_the_loss_is_of_has_a_cache_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "2 + 2 = ", "completion": "4"}) + "\n")
    section = {"source": "jsonl", "paths": (str(tmp_path / "a.jsonl"),), "format": "instruct"}
    counted = [int((prepared(tmp_path, **section, scored=what).train.take([0])["labels"] != IGNORED).sum()) for what in ("answers", "all")]  # type: ignore[list-item]
    assert counted[0] < counted[1]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"source": "files", "paths": ["x"], "format": "chat"}, 'set `source` to "jsonl" or "datasets"'),
        ({"source": "jsonl", "paths": ["x"], "format": "chat", "field": "talk"}, "columns have fixed names"),
        ({"source": "jsonl", "paths": ["x"], "format": "preference"}, "use TRL's DPOTrainer, wrapped by plait.hf.wrap"),
    ],
)
def test_sections_that_contradict_themselves(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataSection(**section)


def test_a_model_from_scratch_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y"}) + "\n")
    section = DataSection(source="jsonl", paths=(str(tmp_path / "a.jsonl"),), format="instruct")
    with pytest.raises(InputError, match=r"has no chat template; set data\.tokenizer"):
        prepare(section, cache=tmp_path / "cache", own_tokenizer=None, say=lambda _: None)


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a\udfff"}]}),
        ("instruct", {"prompt": "a", "completion": "\udfff"}),
    ],
)
def test_half_of_a_character_is_refused(form: str, row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"rows.jsonl, line 3: holds '\\udfff', half of a character"):
        row_text(row, form, where="rows.jsonl, line 3")
