"""Answers in OpenAI's form: text up to a stop string, in one object or in a stream of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.inference.serving.bodies import Endpoint
from plait.inference.serving.job import Told
from plait.inference.text_stream import TextStream


class StoppedText:
    """The text of one request as tokens come, without the stop string that ends it: what may be the beginning of one is kept until more is
    known."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = tuple(stops)
        self._kept = ""
        self._ended = False

    def add(self, told: Told) -> str:
        """The text that a token makes known."""
        if told.token is None or self._ended:
            return ""
        self._kept += self._stream.add(told.token)
        if told.finish_reason:
            self._kept += self._stream.rest()
        if (text := self._cut(self._kept)) != self._kept:
            self._ended, self._kept = True, ""
            return text
        keep = 0 if told.finish_reason else self._may_begin()
        text, self._kept = self._kept[: len(self._kept) - keep], self._kept[len(self._kept) - keep :]
        return text

    def full(self) -> str:
        """The text of all tokens so far, as the tokenizer decodes them together."""
        return self._cut(self._stream.text())

    def _cut(self, text: str) -> str:
        """What is before the first stop string."""
        return text[: min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))]

    def _may_begin(self) -> int:
        """Characters at the end that a stop string may begin with."""
        most = max((len(stop) for stop in self._stops), default=0) - 1
        for count in range(min(most, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-count:]) for stop in self._stops):
                return count
        return 0


@dataclass
class Choice:
    """Of one prompt."""

    index: int
    text: StoppedText
    prompt_tokens: int
    tokens: int = 0
    finish_reason: str = ""

    def add(self, told: Told) -> str:
        """The new text."""
        new = self.text.add(told)
        self.tokens += told.token is not None
        self.finish_reason = told.finish_reason
        return new


class Answer:
    """Of one body."""

    def __init__(self, endpoint: Endpoint, model: str, choices: list[Choice]) -> None:
        self.choices, self._chat = choices, endpoint == "chat"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def full(self) -> dict[str, Any]:
        """When all choices have ended."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = []
        for one in self.choices:
            text = one.text.full()
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": one.index, **said, "logprobs": None, "finish_reason": one.finish_reason})
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    def begins(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream of a chat begins with."""
        return self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, None) if self._chat else None

    def part(self, choice: Choice, text: str) -> dict[str, Any] | None:
        """New text in a stream; None where there is none, and the choice goes on."""
        end = choice.finish_reason or None
        if not text and end is None:
            return None
        return self._chunk(choice, {"delta": {"content": text} if text else {}} if self._chat else {"text": text}, end)

    def last(self) -> dict[str, Any]:
        """With the counts, where they were asked for."""
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens."""
        prompt, new = sum(one.prompt_tokens for one in self.choices), sum(one.tokens for one in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, choice: Choice, said: dict[str, Any], end: str | None) -> dict[str, Any]:
        one = {"index": choice.index, **said, "logprobs": None, "finish_reason": end}
        return {**self._head, "object": self._chunk_kind, "choices": [one]}
