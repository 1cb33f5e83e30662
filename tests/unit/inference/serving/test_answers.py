"""Text up to a stop string, and OpenAI's objects."""

from __future__ import annotations

import pytest

from plait.inference.serving.answers import Answer, Choice, StoppedText
from plait.inference.serving.job import Told
from tests.unit.inference.words import Words


def told(text: str, end: str) -> list[Told]:
    ids = Words()(text)["input_ids"]
    return [Told(token, end if index == len(ids) - 1 else "") for index, token in enumerate(ids)]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcdef", (), ["a", "b", "c", "d", "e", "f"]),
        ("abXYcd", ("XYZ",), ["a", "b", "", "", "XYc", "d"]),  # it might have been the beginning of one
        ("abXYZ", ("XYZ",), ["a", "b", "", "", ""]),
        ("abXX", ("XYZ", "bX"), ["a", "", "", ""]),
        ("aab", ("ab", "q"), ["", "a", ""]),
        ("abX", ("XYZ",), ["a", "b", "X"]),  # the end has come, and it was none
    ],
)
def test_a_stop_string_is_not_told(text: str, stops: tuple[str, ...], expected: list[str]) -> None:
    stopped = StoppedText(Words(), stops)
    assert [stopped.add(one) for one in told(text, "length")] == expected


def test_objects() -> None:
    choice = Choice(0, StoppedText(Words(), ()), prompt_tokens=3)
    answer = Answer("chat", "tiny", [choice])
    assert answer.begins(choice)["choices"][0]["delta"] == {"role": "assistant", "content": ""}  # type: ignore[index]
    parts = [answer.part(choice, choice.add(one)) for one in told("hi", "stop")]
    assert [part["choices"][0]["delta"] for part in parts] == [{"content": "h"}, {"content": "i"}]  # type: ignore[index]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, "stop"]  # type: ignore[index]
    full = answer.full()
    assert full["object"] == "chat.completion" and full["id"].startswith("chatcmpl-")
    assert full["choices"] == [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "logprobs": None, "finish_reason": "stop"}]
    assert full["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5} == answer.last()["usage"]
    plain = Choice(0, StoppedText(Words(), ("i",)), prompt_tokens=1)
    other = Answer("completion", "tiny", [plain])
    assert other.begins(plain) is None and other.part(plain, "") is None
    for one in told("hi", "stop"):
        plain.add(one)
    assert other.full()["choices"][0]["text"] == "h" and other.full()["object"] == "text_completion"
    assert other.part(plain, "")["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
