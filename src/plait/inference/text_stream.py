"""Tokens of one request as text, at once and as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character yet."""


def text_of(tokenizer: Any, token_ids: Sequence[int], **options: Any) -> str:
    """What `tokenizer.decode` makes of tokens. Numbers that the vocabulary leaves out have no text: fast tokenizers pass over them, others
    fail at them."""
    try:
        return str(tokenizer.decode(token_ids, **options))
    except (KeyError, IndexError, TypeError):
        known = set(tokenizer.get_vocab().values())
        if known.issuperset(token_ids):
            raise
        return str(tokenizer.decode([token for token in token_ids if token in known], **options))


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
        return text_of(self._tokenizer, self._tokens, skip_special_tokens=True)

    def _new(self, text: str) -> str:
        found, self._told = text[self._told :], len(text)
        return found
