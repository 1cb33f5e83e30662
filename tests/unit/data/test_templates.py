"""Conversations and instructions as tokens: the scored tokens are those that Transformers marks."""

import json

import pytest
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


def test_what_is_scored_is_what_transformers_says():
    made = tokenizer()
    text = row_text({"messages": CHAT}, "chat", where="row")
    ids, scored = encoder(made, "chat", scored="answers")(text)
    marks = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = made.apply_chat_template(CHAT, tokenize=True, **marks)
    assert (ids, [int(one) for one in scored]) == (theirs["input_ids"], theirs["assistant_masks"])
    assert encoder(made, "chat", scored="all")(text) == (ids, [True] * len(ids))


def test_instructions():
    pair = {"prompt": "2 + 2 = ", "completion": "4"}
    for template in (TEMPLATE, None):
        assert encoded(tokenizer(template), pair, "instruct")[1] == "4</s>"
    for template, given, text in (
        (TEMPLATE, "2, 2", "<user>Add.\n\n2, 2<assistant>4</s>"),
        (None, "", "Add.4</s>"),
    ):
        row = {"instruction": "Add.", "input": given, "output": "4"}
        assert encoded(tokenizer(template), row, "instruct")[0] == text


@pytest.mark.parametrize(
    ("form", "row", "words"),
    [
        ("chat", {"text": "x"}, "has no field 'messages'; it has 'text'"),
        ("chat", {"messages": []}, "is not a list with messages"),
        ("chat", {"messages": [{"role": "user"}]}, "message 1 is not an object with the strings"),
        ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "message 1"),
        ("chat", {"messages": ["x"]}, "message 1"),
        ("instruct", {"prompt": "x"}, "has the strings prompt and completion, or instruction and output"),
        ("instruct", {"instruction": 3, "output": "x"}, "has the strings"),
        ("instruct", {"instruction": "x", "output": "x", "input": 3}, "'input' holds a int"),
        ("chat", {"messages": CHAT, "functions": [], "tag": 1}, "has unknown columns, 'functions', 'tag', besides the known ones .messages, tools"),
        ("chat", {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "message 1 has the weight 0.5"),
        ("chat", {"messages": CHAT, "tools": "no JSON"}, "'tools' is not a list of objects"),
        ("chat", {"messages": CHAT, "chat_template_kwargs": [1]}, "'chat_template_kwargs' is not an object"),
        ("instruct", {"instruction": "x", "output": "x", "context": "y"}, "has unknown columns, 'context'"),
        ("instruct", {"prompt": "x", "completion": "x", "instruction": "y"}, "has unknown columns, 'instruction'"),
        ("instruct", {"instruction": "x", "output": "x", "history": ["y"]}, "'history' is not a list of pairs"),
        ("instruct", {"instruction": "x", "output": "x", "system": 3}, "'system' holds a int"),
    ],
)  # fmt: skip
def test_a_row_that_is_none(form, row, words):
    with pytest.raises(InputError, match=words) as error:
        row_text(row, form, where="a.jsonl, line 3")
    assert str(error.value).startswith("a.jsonl, line 3: ")


UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TOOL_NAMES = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
WITH_TOOLS = TOOL_NAMES + "{{ '(slow)' if slowly }}" + TEMPLATE


def encoded(made, row, form="chat", *, scored="answers", **settings):
    """The text of a row's tokens, and of those that are scored."""
    encode = encoder(made, form, scored=scored, **settings)
    ids, marks = encode(row_text(row, form, where="row"))
    scored_ids = [token for token, counts in zip(ids, marks, strict=True) if counts]
    return made.decode(ids), made.decode(scored_ids)


@pytest.mark.parametrize("packed", [False, True])
def test_tools_and_settings_of_a_row_are_used(packed):
    made = tokenizer(WITH_TOOLS)
    row = {"messages": CHAT[1:3], "tools": TOOLS, "chat_template_kwargs": {"slowly": True}}
    if packed:  # as columns of objects are stored in Arrow, where what other rows have is null
        settings = {"slowly": True, "other": None}
        row |= {"tools": json.dumps(TOOLS), "chat_template_kwargs": settings, "id": None}
    text, scored = encoded(made, row)
    assert text.startswith("[weather](slow)<user>") and scored == "Yes.</s>"
    options = {"tools": TOOLS, "slowly": True, "tokenize": True, "return_dict": True}
    theirs = made.apply_chat_template(CHAT[1:3], **options)
    assert text == made.decode(theirs["input_ids"])


def test_calls_of_tools_need_no_content():
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% if 'tool_calls' in message %}*{% endif %}{% endfor %}"
    messages = [
        {"role": "user", "content": "?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    assert encoded(tokenizer(template), {"messages": messages})[0] == "<user>?<assistant>*"


def test_what_a_template_does_not_read_is_refused():
    for more, said in (
        ({"tools": TOOLS}, "does not read `tools`"),
        ({"chat_template_kwargs": {"slowly": 1}}, "does not read 'slowly'"),
    ):
        with pytest.raises(InputError, match=said):
            encoded(tokenizer(), {"messages": CHAT, **more})


@pytest.mark.parametrize("marks", [True, False])
def test_an_answer_of_weight_0_is_not_scored(marks):
    template = TEMPLATE if marks else UNMARKED
    chat = [CHAT[1], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}]
    text, scored = encoded(tokenizer(template), {"messages": chat})
    assert scored == "No, it is night.</s>" and "Yes.</s>" in text


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
def test_a_merge_over_the_edge_of_an_answer(template):
    made = tokenizer(template, merges=["= 4"])
    row = {"prompt": "2+2=", "completion": "4"}
    text, scored = encoded(made, row, "instruct")
    assert text.startswith("2+2=4") and scored.startswith("4")
    encode = encoder(made, "instruct", scored="answers")
    ids, _ = encode(row_text(row, "instruct", where="row"))
    # The prompt's tokens are those that it has alone.
    assert ids[:4] == made("2+2=", add_special_tokens=False)["input_ids"]


THINKS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% if loop.last %}(thinks){% endif %}{{ message.content }}</s>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_templates_that_think():
    """Qwen3's template leaves out earlier thinking. R1's asks for it and never writes it."""
    assert encoded(tokenizer(THINKS), {"messages": CHAT[1:]})[1] == "(thinks)No, it is night.</s>"
    (caution,) = template_warnings(tokenizer(THINKS), append_end_of_text=False)
    assert "only the last answer of such a conversation is trained on" in caution
    asks = UNMARKED.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
    with pytest.raises(InputError, match="starts generation with '<think>'"):
        encoded(tokenizer(asks), {"messages": CHAT})
    assert encoded(tokenizer(asks), {"messages": CHAT}, scored="all")[1].endswith("night.</s>")


def test_templates_with_a_clock():
    dated = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    assert encoded(tokenizer(dated), {"messages": CHAT[1:3]})[0].startswith("26 Jul 2024<user>")
    (caution,) = template_warnings(tokenizer(dated), append_end_of_text=False)
    assert "every row has 26 Jul 2024" in caution
    hour = "{% set form = '%H' %}{{ strftime_now(form) }}" + TEMPLATE
    with pytest.raises(InputError, match="reads the clock"):
        encoded(tokenizer(hour), {"messages": CHAT[1:3]})


def test_a_template_that_ends_no_turn(tmp_path):
    endless = TEMPLATE.replace("</s>", "\n")
    (caution,) = template_warnings(tokenizer(endless), append_end_of_text=False)
    assert "the chat template of the tokenizer ends an answer without" in caution
    assert "data.append_end_of_text" in caution
    assert not template_warnings(tokenizer(), append_end_of_text=False)
    assert not template_warnings(tokenizer(endless), append_end_of_text=True)
    row = {"messages": CHAT}
    text, scored = encoded(tokenizer(endless), row, append_end_of_text=True)
    assert text.endswith("night.\n</s>") and scored.endswith("night.\n</s>")
    assert encoded(tokenizer(), row, append_end_of_text=True) == encoded(tokenizer(), row)
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    section = {"source": "jsonl", "paths": (str(tmp_path / "a.jsonl"),), "format": "chat"}
    assert not prepared(tmp_path, **section).warnings


def test_templates_that_cannot_be_used():
    with pytest.raises(InputError, match="has no chat template; set data.tokenizer"):
        encoder(tokenizer(None), "chat", scored="answers")
    text = row_text({"messages": CHAT}, "chat", where="row")
    with pytest.raises(InputError, match=r"refuses a conversation \(alternate!\)"):
        encoder(tokenizer("{{ raise_exception('alternate!') }}"), "chat", scored="answers")(text)
    last = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(InputError, match="writes earlier messages differently"):
        encoder(tokenizer(last), "chat", scored="answers")(text)
    assert all(encoder(tokenizer(last), "chat", scored="all")(text)[1])


def prepared(folder, **section):
    tokenizer().save_pretrained(folder / "tokenizer")
    section |= {"validation_fraction": 0, "sequence_length": 128}
    data = DataSection(tokenizer=str(folder / "tokenizer"), **section)
    return prepare(data, cache=folder / "cache", model_tokenizer=None, report=lambda _: None)


@pytest.mark.parametrize("packing", [None, "documents"])
def test_jsonl_and_data_sets_give_the_same(tmp_path, packing):
    rows = [{"messages": CHAT[: 3 + 2 * (number % 2)], "id": number} for number in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    settings = {"format": "chat", "packing": packing, "ignored_columns": ("id",)}
    found, other = (
        prepared(tmp_path, source=source, paths=(str(tmp_path / name),), **settings)
        for source, name in (("jsonl", "a.jsonl"), ("datasets", "set"))
    )
    everything = list(range(len(found.train)))
    ours, theirs = found.train.take(everything), other.train.take(everything)
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert ("position_ids" in ours) == (packing == "documents")
    scored = ours["labels"][ours["labels"] != IGNORED].tolist()
    text = found.tokenizer.decode(scored)
    assert text.count("Yes.</s>") == 6 and text.count("No, it is night.</s>") == 3
    assert len(text) == 6 * 8 + 3 * 20
    assert found.identity["data.format"].startswith("chat, scored: answers")
    assert found.identity["data.packing"] == (packing or "left out")


def test_each_choice_of_scored_tokens_has_a_cache(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "2 + 2 = ", "completion": "4"}) + "\n")
    section = {"source": "jsonl", "paths": (str(tmp_path / "a.jsonl"),), "format": "instruct"}
    answers, everything = (
        int((prepared(tmp_path, **section, scored=what).train.take([0])["labels"] != IGNORED).sum())
        for what in ("answers", "all")
    )
    assert answers < everything


def test_sections_that_contradict_themselves():
    for section, words in (
        ({"source": "files", "format": "chat"}, 'set `source` to "jsonl" or "datasets"'),
        ({"source": "jsonl", "format": "chat", "field": "talk"}, "columns have fixed names"),
        ({"source": "jsonl", "format": "preference"}, "use TRL's DPOTrainer, wrapped by plait.hf"),
    ):
        with pytest.raises(ValueError, match=words):
            DataSection(paths=["x"], **section)


def test_a_model_from_scratch_needs_a_tokenizer(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y"}) + "\n")
    section = DataSection(source="jsonl", paths=(str(tmp_path / "a.jsonl"),), format="instruct")
    with pytest.raises(InputError, match=r"has no chat template; set data\.tokenizer"):
        prepare(section, cache=tmp_path / "cache", model_tokenizer=None, report=lambda _: None)


def test_half_of_a_character_is_refused():
    chat = {"messages": [{"role": "user", "content": "a\udfff"}]}
    words = r"rows.jsonl, line 3: holds '\\udfff', half of a character"
    for form, row in (("chat", chat), ("instruct", {"prompt": "a", "completion": "\udfff"})):
        with pytest.raises(InputError, match=words):
            row_text(row, form, where="rows.jsonl, line 3")
