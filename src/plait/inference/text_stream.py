"""Tokens of one request as text, as they come."""

from __future__ import annotations

from typing import Any

_UNKNOWN = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character yet."""


class TextStream:
    """Gives the text of a token when all bytes of its characters are there."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = 0

    def add(self, token: int) -> str:
        """The new text, "" while a character is incomplete."""
        self._tokens.append(token)
        text = self._text()
        return "" if text.endswith(_UNKNOWN) else self._new(text)

    def rest(self) -> str:
        """What is left at the end."""
        return self._new(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _new(self, text: str) -> str:
        found, self._told = text[self._told :], len(text)
        return found
