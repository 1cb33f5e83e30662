"""Prompts in all forms that `generate` accepts."""

import json

import pytest
import torch

from plait.errors import InputError
from plait.inference.prompt_files import read_prompts
from plait.inference.requests import token_ids
from tests.unit.data.byte_tokenizer import TEMPLATE, tokenizer

TURNS = [{"role": "user", "content": "a"}]


class CodeTokenizer:
    """A tokenizer whose token ids are code points."""

    chat_template = "x"

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, turns, **settings):
        assert settings == {"add_generation_prompt": True, "return_dict": False}
        return [1, *(ord(turn["content"]) for turn in turns), 2]


def test_one_prompt_or_several():
    for prompts, expected in (
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([3, 4], [(3, 4)]),
        (torch.tensor([3, 4]), [(3, 4)]),
        ([torch.tensor([3, 4])], [(3, 4)]),
        (torch.tensor([[3, 4], [5, 6]]), [(3, 4), (5, 6)]),
        (([3, 4], (5, 6)), [(3, 4), (5, 6)]),
        ([], []),
        (TURNS, [(1, 97, 2)]),
        ([TURNS, [4]], [(1, 97, 2), (4,)]),
    ):
        assert token_ids(prompts, CodeTokenizer()) == expected, prompts
    assert token_ids([3, 4], None) == [(3, 4)]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 has no token"),
        ([1.5], "prompt 0 is a float"),
        ([[True, False]], "prompt 0 is a list; pass a string"),
        (torch.tensor([[True]]), "prompt 0 is a list; pass a string"),
        ([torch.tensor([1.5])], "prompt 0 is a Tensor; pass a string"),
        ([{"role": "user"}], r"is a dict; pass a string, a conversation \(role and content\)"),
        ({"input_ids": [1]}, "takes strings, conversations or token ids, .* not dict"),
        (torch.zeros(1, 1, 1), "not Tensor"),
    ],
)
def test_other_values_are_refused(prompts, message):
    with pytest.raises(InputError, match=message):
        token_ids(prompts, None)


@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "a\ud800"}]])
def test_half_of_a_character_is_refused(prompt):
    with pytest.raises(InputError, match=r"prompt 0 holds '\\ud800', half of a character"):
        token_ids(prompt, object())


def test_tools_and_settings_of_a_conversation(tmp_path):
    """`tools` and `chat_template_kwargs` of a row reach the template, which must read them."""
    tools = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}{{ '(slow)' if slowly }}"
    reads_tools = tokenizer(tools + TEMPLATE)
    row = {
        "messages": TURNS,
        "tools": [{"name": "b"}],
        "chat_template_kwargs": {"slowly": True},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (line,) = read_prompts(tmp_path / "rows.jsonl")
    (ids,) = token_ids([line.prompt], reads_tools)
    assert reads_tools.decode(ids) == "[b](slow)<user>a<assistant>" and line.fields == row
    message = "prompt 0: the chat template of the tokenizer does not read `tools`"
    with pytest.raises(InputError, match=message):
        token_ids([line.prompt], tokenizer())
