"""Tokens of conversations and instructions, of which those that Transformers marks are scored."""

import json
from itertools import compress

import pytest
import torch
from datasets import Dataset

from plait.config.schema.sections import DataSection
from plait.data.conversations import encoder, row_text, template_warnings
from plait.data.packing import IGNORED
from plait.data.prepare import prepare
from plait.errors import InputError
from tests.unit.data.byte_tokenizer import TEMPLATE, tokenizer

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Is the sky blue? é"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "No, it is night."},
]


def test_scored_tokens_equal_transformers():
    text = row_text({"messages": CHAT}, "chat", where="row")
    ids, scored = encoder(tokenizer(), "chat", scored="answers")(text)
    settings = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = tokenizer().apply_chat_template(CHAT, tokenize=True, **settings)
    assert ids == expected["input_ids"]
    assert list(map(int, scored)) == expected["assistant_masks"]
    assert encoder(tokenizer(), "chat", scored="all")(text) == (ids, [True] * len(ids))


def test_instructions():
    """They need no chat template."""
    pair = {"prompt": "2 + 2 = ", "completion": "4"}
    for template in (TEMPLATE, None):
        assert encoded(tokenizer(template), pair, "instruct")[1] == "4</s>"
    row = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    expected = "<user>Add.\n\n2, 2<assistant>4</s>"
    assert encoded(tokenizer(), row, "instruct")[0] == expected
    row = {"instruction": "Add.", "input": "", "output": "4"}
    assert encoded(tokenizer(None), row, "instruct")[0] == "Add.4</s>"


PAIR = {"instruction": "x", "output": "x"}
WEIGHTED = {"role": "assistant", "content": "x", "weight": 0.5}


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("chat", {"text": "x"}, "has no field 'messages'; it has 'text'"),
        ("chat", {"messages": []}, "is not a list with messages"),
        ("chat", {"messages": [{"role": "user"}]}, "message 1 is not an object with the strings"),
        ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "message 1"),
        ("chat", {"messages": ["x"]}, "message 1"),
        ("chat", {"messages": [WEIGHTED]}, "message 1 has the weight 0.5"),
        (
            "chat",
            {"messages": CHAT, "functions": [], "tag": 1},
            "unknown columns, 'functions', 'tag'",
        ),
        ("chat", {"messages": CHAT, "tools": "no JSON"}, "'tools' is not a list of objects"),
        ("chat", {"messages": CHAT, "chat_template_kwargs": [1]}, "_kwargs' is not an object"),
        ("instruct", {"prompt": "x"}, "has the strings prompt and completion, or instruction and"),
        ("instruct", {"instruction": 3, "output": "x"}, "has the strings"),
        ("instruct", {**PAIR, "input": 3}, "'input' holds a int"),
        ("instruct", {**PAIR, "context": "y"}, "has unknown columns, 'context'"),
        (
            "instruct",
            {"prompt": "x", "completion": "x", "instruction": "y"},
            "unknown .*'instruction'",
        ),
        ("instruct", {**PAIR, "history": ["y"]}, "'history' is not a list of pairs"),
        ("instruct", {**PAIR, "system": 3}, "'system' holds a int"),
    ],
)
def test_rows_of_another_form_are_refused(form, row, message):
    with pytest.raises(InputError, match=message) as error:
        row_text(row, form, where="a.jsonl, line 3")
    assert str(error.value).startswith("a.jsonl, line 3: ")


UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TOOL_NAMES = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
WITH_TOOLS = TOOL_NAMES + "{{ '(slow)' if slowly }}" + TEMPLATE


def encoded(tokenizer, row, form="chat", *, scored="answers", **settings):
    """Return the text of a row's tokens, and the text of its scored tokens."""
    encode = encoder(tokenizer, form, scored=scored, **settings)
    ids, marks = encode(row_text(row, form, where="row"))
    return tokenizer.decode(ids), tokenizer.decode(list(compress(ids, marks)))


@pytest.mark.parametrize("packed", [False, True])
def test_tools_and_settings_of_a_row_are_used(packed):
    row = {"messages": CHAT[1:3], "tools": TOOLS, "chat_template_kwargs": {"slowly": True}}
    if packed:
        # Columns of Arrow have text instead of objects, and null for fields of other rows.
        settings = {"slowly": True, "other": None}
        row |= {"tools": json.dumps(TOOLS), "chat_template_kwargs": settings, "id": None}
    text, scored = encoded(tokenizer(WITH_TOOLS), row)
    assert text.startswith("[weather](slow)<user>")
    assert scored == "Yes.</s>"
    options = {"tools": TOOLS, "slowly": True, "tokenize": True, "return_dict": True}
    expected = tokenizer(WITH_TOOLS).apply_chat_template(CHAT[1:3], **options)
    assert text == tokenizer().decode(expected["input_ids"])


def test_calls_of_tools_need_no_content():
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
        "{% if 'tool_calls' in message %}*{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    assert encoded(tokenizer(template), {"messages": messages})[0] == "<user>?<assistant>*"


def test_columns_that_a_template_does_not_read_are_refused():
    for columns, message in (
        ({"tools": TOOLS}, "does not read `tools`"),
        ({"chat_template_kwargs": {"slowly": 1}}, "does not read 'slowly'"),
    ):
        with pytest.raises(InputError, match=message):
            encoded(tokenizer(), {"messages": CHAT, **columns})


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
def test_an_answer_of_weight_0_is_not_scored(template):
    chat = [CHAT[1], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}]
    text, scored = encoded(tokenizer(template), {"messages": chat})
    assert scored == "No, it is night.</s>"
    assert "Yes.</s>" in text


def test_system_and_history_of_an_instruction():
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    text = ("<system>s<user>a<assistant>b</s><user>c<assistant>d</s>", "b</s>d</s>")
    assert encoded(tokenizer(), row, "instruct") == text
    with pytest.raises(InputError, match="has no place for 'system'"):
        encoded(tokenizer(None), row, "instruct")
    empty = {"instruction": "c", "output": "d", "system": "", "history": []}
    assert encoded(tokenizer(None), empty, "instruct")[0] == "cd</s>"


@pytest.mark.parametrize(
    "template", [None, "{% for message in messages %}{{ message.content }}{% endfor %}"]
)
def test_a_merge_across_the_start_of_an_answer(template):
    """The prompt has the tokens that it has alone."""
    merging = tokenizer(template, merges=["= 4"])
    row = {"prompt": "2+2=", "completion": "4"}
    text, scored = encoded(merging, row, "instruct")
    assert text.startswith("2+2=4")
    assert scored.startswith("4")
    encode = encoder(merging, "instruct", scored="answers")
    ids, _ = encode(row_text(row, "instruct", where="row"))
    assert ids[:4] == merging("2+2=", add_special_tokens=False)["input_ids"]


LAST_THINKING_ONLY = UNMARKED.replace(
    "{{ message.content }}</s>", "{% if loop.last %}(thinks){% endif %}{{ message.content }}</s>"
)


def test_templates_with_thinking():
    """Qwen3's template omits earlier thinking. R1's prompt starts it, and it is never written."""
    text, scored = encoded(tokenizer(LAST_THINKING_ONLY), {"messages": CHAT[1:]})
    assert scored == "(thinks)No, it is night.</s>"
    assert text.count("(thinks)") == 1
    (warning,) = template_warnings(tokenizer(LAST_THINKING_ONLY), append_end_of_text=False)
    assert "only the last answer of such a conversation is trained on" in warning

    starting = UNMARKED.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
    with pytest.raises(InputError, match="starts generation with '<think>'"):
        encoded(tokenizer(starting), {"messages": CHAT})
    scored = encoded(tokenizer(starting), {"messages": CHAT}, scored="all")[1]
    assert scored.endswith("night.</s>")


def test_templates_with_a_clock():
    """All rows have the same date. Times of day are refused."""
    dated = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    assert encoded(tokenizer(dated), {"messages": CHAT[1:3]})[0].startswith("26 Jul 2024<user>")
    (warning,) = template_warnings(tokenizer(dated), append_end_of_text=False)
    assert "every row has 26 Jul 2024" in warning
    hour = "{% set form = '%H' %}{{ strftime_now(form) }}" + TEMPLATE
    with pytest.raises(InputError, match="reads the clock"):
        encoded(tokenizer(hour), {"messages": CHAT[1:3]})


def test_a_template_without_end_of_text(tmp_path):
    endless = TEMPLATE.replace("</s>", "\n")
    (warning,) = template_warnings(tokenizer(endless), append_end_of_text=False)
    assert "the chat template of the tokenizer ends an answer without" in warning
    assert "data.append_end_of_text" in warning
    assert not template_warnings(tokenizer(), append_end_of_text=False)
    assert not template_warnings(tokenizer(endless), append_end_of_text=True)
    row = {"messages": CHAT}
    text, scored = encoded(tokenizer(endless), row, append_end_of_text=True)
    assert text.endswith("night.\n</s>")
    assert scored.endswith("night.\n</s>")
    assert encoded(tokenizer(), row, append_end_of_text=True) == encoded(tokenizer(), row)
    assert not prepared(tmp_path, format="chat", **json_lines(tmp_path, row)).warnings


def test_templates_that_cannot_be_used_are_refused():
    with pytest.raises(InputError, match="has no chat template; set data.tokenizer"):
        encoder(tokenizer(None), "chat", scored="answers")
    text = row_text({"messages": CHAT}, "chat", where="row")
    with pytest.raises(InputError, match=r"refuses a conversation \(alternate!\)"):
        encoder(tokenizer("{{ raise_exception('alternate!') }}"), "chat", scored="answers")(text)
    last = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(InputError, match="writes earlier messages differently"):
        encoder(tokenizer(last), "chat", scored="answers")(text)
    assert all(encoder(tokenizer(last), "chat", scored="all")(text)[1])


def json_lines(folder, *rows):
    """Write the rows to a file and return the settings that name it."""
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "jsonl", "paths": (str(file),)}


def prepared(folder, **section):
    tokenizer().save_pretrained(folder / "tokenizer")
    section |= {"validation_fraction": 0, "sequence_length": 128}
    data = DataSection(tokenizer=str(folder / "tokenizer"), **section)
    return prepare(data, cache=folder / "cache", model_tokenizer=None, report=lambda _: None)


@pytest.mark.parametrize("packing", [None, "documents"])
def test_json_lines_and_data_sets_give_the_same_batches(tmp_path, packing):
    rows = [{"messages": CHAT[: 3 + 2 * (number % 2)], "id": number} for number in range(6)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    settings = {"format": "chat", "packing": packing, "ignored_columns": ("id",)}
    of_file = prepared(tmp_path, **json_lines(tmp_path, *rows), **settings)
    of_set = prepared(tmp_path, source="datasets", paths=(str(tmp_path / "set"),), **settings)
    numbers = list(range(len(of_file.train)))
    batch = of_file.train.take(numbers)
    torch.testing.assert_close(batch, of_set.train.take(numbers), rtol=0, atol=0)
    assert ("position_ids" in batch) == (packing == "documents")

    # Each of the six rows has the first answer, and three have the second one, too.
    scored = batch["labels"][batch["labels"] != IGNORED].tolist()
    text = of_file.tokenizer.decode(scored)
    assert text.count("Yes.</s>") == 6
    assert text.count("No, it is night.</s>") == 3
    assert len(text) == 6 * 8 + 3 * 20
    assert of_file.identity["data.format"].startswith("chat, scored: answers")
    assert of_file.identity["data.packing"] == (packing or "left out")


def test_each_choice_of_scored_tokens_has_a_cache(tmp_path):
    section = json_lines(tmp_path, {"prompt": "2 + 2 = ", "completion": "4"})

    def scored_tokens(choice):
        data = prepared(tmp_path, **section, format="instruct", scored=choice)
        return (data.train.take([0])["labels"] != IGNORED).sum()

    assert scored_tokens("answers") < scored_tokens("all")


def test_contradictory_sections_are_refused():
    for section, message in (
        ({"source": "files", "format": "chat"}, 'set `source` to "jsonl" or "datasets"'),
        ({"source": "jsonl", "format": "chat", "field": "talk"}, "columns have fixed names"),
        ({"source": "jsonl", "format": "preference"}, "use TRL's DPOTrainer, wrapped by plait.hf"),
    ):
        with pytest.raises(ValueError, match=message):
            DataSection(paths=["x"], **section)


def test_a_model_from_scratch_needs_a_tokenizer(tmp_path):
    file = json_lines(tmp_path, {"prompt": "x", "completion": "y"})
    section = DataSection(**file, format="instruct")
    with pytest.raises(InputError, match=r"has no chat template; set data\.tokenizer"):
        prepare(section, cache=tmp_path / "cache", model_tokenizer=None, report=lambda _: None)


def test_half_of_a_character_is_refused():
    chat = {"messages": [{"role": "user", "content": "a\udfff"}]}
    message = r"rows.jsonl, line 3: holds '\\udfff', half of a character"
    for form, row in (("chat", chat), ("instruct", {"prompt": "a", "completion": "\udfff"})):
        with pytest.raises(InputError, match=message):
            row_text(row, form, where="rows.jsonl, line 3")
