"""Prompts in the forms that people have."""

import json

import pytest
import torch

from plait.errors import InputError
from plait.inference.prompt_files import read_prompts
from plait.inference.requests import token_ids
from tests.unit.data.byte_tokenizer import TEMPLATE, tokenizer


class Tokenizer:
    chat_template: str | None = "x"

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, turns, **settings):
        assert settings == {"add_generation_prompt": True, "return_dict": False}
        return [1, *(ord(turn["content"]) for turn in turns), 2]


def test_one_or_several():
    tokenizer = Tokenizer()
    assert token_ids("ab", tokenizer) == [(97, 98)] and token_ids(["a", "b"], tokenizer) == [
        (97,),
        (98,),
    ]
    assert (
        token_ids([3, 4], None)
        == [(3, 4)]
        == token_ids(torch.tensor([3, 4]), None)
        == token_ids([torch.tensor([3, 4])], None)
    )
    assert (
        token_ids(torch.tensor([[3, 4], [5, 6]]), None)
        == [(3, 4), (5, 6)]
        == token_ids(([3, 4], (5, 6)), None)
    )
    assert token_ids([], None) == []
    turns = [{"role": "user", "content": "a"}]
    assert token_ids(turns, tokenizer) == [(1, 97, 2)] and token_ids([turns, [4]], tokenizer) == [
        (1, 97, 2),
        (4,),
    ]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("a", "prompt 0 is text, which requires a tokenizer"),
        ([[1], []], "prompt 1 has no token"),
        ([1.5], "prompt 0 is a float"),
        ([[True, False]], "prompt 0 is a list; pass a string"),
        (torch.tensor([[True]]), "prompt 0 is a list; pass a string"),
        ([torch.tensor([1.5])], "prompt 0 is a Tensor; pass a string"),
        ([{"role": "user"}], r"prompt 0 is a dict; pass a string, a conversation \(role and content\)"),
        ({"input_ids": [1]}, "takes strings, conversations or token ids, one or a list, not dict"),
        (torch.zeros(1, 1, 1), "not Tensor"),
    ],
)  # fmt: skip
def test_anything_else(prompts, words):
    with pytest.raises(InputError, match=words):
        token_ids(prompts, None)


def test_a_conversation_needs_a_template():
    tokenizer = Tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="has no chat template"):
        token_ids([{"role": "user", "content": "a"}], tokenizer)


@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "a\ud800"}]])
def test_half_of_a_character_is_refused(prompt):
    with pytest.raises(InputError, match=r"prompt 0 holds '\\ud800', half of a character"):
        token_ids(prompt, object())


def test_tools_and_settings_of_a_conversation(tmp_path):
    """A line's `tools` and `chat_template_kwargs` reach the template; what it does not read is refused."""
    made = tokenizer(
        "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}{{ '(slow)' if slowly }}"
        + TEMPLATE
    )
    row = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"name": "b"}],
        "chat_template_kwargs": {"slowly": True},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (line,) = read_prompts(tmp_path / "rows.jsonl")
    (ids,) = token_ids([line.prompt], made)
    assert made.decode(ids) == "[b](slow)<user>a<assistant>" and line.fields == row
    words = "prompt 0: the chat template of the tokenizer does not read `tools`"
    with pytest.raises(InputError, match=words):
        token_ids([line.prompt], tokenizer())
