"""What of OpenAI's fields is taken, what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.inference.serving.bodies import COMPLETION_TOKENS, ChatBody, CompletionBody, Refused, Served, asked_of, read_body
from tests.unit.inference.models import built
from tests.unit.inference.words import Words


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("tiny", built(layers=1), Words(), 64)


def asked(served: Served, **fields: Any) -> Any:
    kind = ChatBody if "messages" in fields else CompletionBody
    return asked_of(read_body(json.dumps(fields).encode(), kind), served)


def test_defaults_and_prompts(served: Served) -> None:
    (one,) = asked(served, prompt="ab", temperature=0)
    assert one.request.token_ids == (66, 67) and one.request.new_tokens == COMPLETION_TOKENS and one.request.seed is None
    two = asked(served, prompt=["a", "bc"], seed=7, temperature=0.5, top_p=0.9, stop="x", max_tokens=3, model="tiny", user="me", n=1)
    assert [one.request.seed for one in two] == [7, 8] and two[0].settings.stop_strings == ("x",) and two[1].request.new_tokens == 3
    assert [one.request.token_ids for one in asked(served, prompt=[[5, 6], [7]])] == [(5, 6), (7,)]
    assert asked(served, prompt=[5, 6])[0].request.token_ids == (5, 6)
    (chat,) = asked(served, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], presence_penalty=0.0, logprobs=False)
    assert (
        Words().decode(list(chat.request.token_ids)).startswith("user: hi") and len(chat.request.token_ids) + chat.request.new_tokens == 64
    )
    assert asked(served, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=2)[0].request.new_tokens == 2


@pytest.mark.parametrize(
    ("fields", "words", "field"),
    [
        ({}, "prompt: Field required", "prompt"),
        ({"prompt": 5}, "prompt = 5 must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt"),
        ({"prompt": ["a", [1]]}, "must be a text, a list of texts, a list of token ids", "prompt"),
        ({"prompt": "a", "stop": ""}, 'stop = "" must be a text of one character or more, or a list of such texts', "stop"),
        ({"prompt": "a", "stop": ["b", None]}, "must be a text of one character or more", "stop"),
        (
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens = 3 and max_completion_tokens = 4 are two limits; give max_completion_tokens alone",
            "max_tokens",
        ),
        ({"prompt": []}, "prompt: there is none", "prompt"),
        ({"prompt": ""}, "prompt 0 has no token", None),
        ({"prompt": [[200]]}, "token 200, and the model's tokens are 0 to 95", None),
        ({"prompt": "a", "temperature": 3}, "temperature: Input should be less than or equal to 2", "temperature"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens: Input should be a valid integer", "max_tokens"),
        ({"prompt": "a", "max_token": 5}, "max_token: Extra inputs are not permitted", "max_token"),
        ({"prompt": "a", "n": 2}, "n = 2 is not supported by this server", "n"),
        ({"prompt": "a", "logprobs": 1}, "logprobs = 1 is not supported", "logprobs"),
        ({"prompt": "a", "tools": [{"x": 1}]}, "tools = ", "tools"),
        ({"prompt": "a", "stop": ["a"] * 17}, "17 stop strings, and 16", "stop"),
        ({"prompt": "a", "seed": 1 << 70}, "seed", "seed"),
        (
            {"prompt": "a" * 60, "max_tokens": 5},
            r"has 60 tokens and 5 may be added, 65 together; this server keeps keys and values of 64",
            None,
        ),
        ({"messages": [{"role": "user", "content": "a" * 70}]}, "this server keeps keys and values of 64 tokens", None),
        ({"messages": []}, "messages", "messages"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "template does not take this conversation .no role tool",
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes text alone, not 'image_url'", "messages"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], words: str, field: str | None, served: Served) -> None:
    with pytest.raises(Refused, match=words) as found:
        asked(served, **fields)
    assert found.value.status == 400 and found.value.field == field
    assert found.value.body["error"]["type"] == "invalid_request_error"


def test_another_model_and_what_is_no_json(served: Served) -> None:
    with pytest.raises(Refused, match="the model 'gpt-4' is not here; this server has 'tiny'") as found:
        asked(served, prompt="a", model="gpt-4")
    assert found.value.status == 404 and found.value.body["error"]["code"] == "model_not_found"
    for raw in (b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"prompt": NaN}'):
        with pytest.raises(Refused):
            read_body(raw, CompletionBody)


def test_random_bodies_are_refused_or_taken(served: Served) -> None:
    """No other error than one that the client is told."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
        max_leaves=5,
    )
    names = st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields, "n", "logit_bias", "x"])

    @settings(max_examples=40, deadline=None)
    @given(st.dictionaries(names, values, max_size=5), st.sampled_from([ChatBody, CompletionBody]))
    def check(fields: dict[str, Any], kind: Any) -> None:
        try:
            asked_of(read_body(json.dumps(fields).encode(), kind), served)
        except Refused as error:
            assert error.message and 400 <= error.status < 500

    check()
