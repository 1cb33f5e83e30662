"""Tokens of one request as text, at once and as they come."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character yet."""
_MAY_LOSE_SPACES = re.compile(r"(?: +(?:n *'?|'[vr]?)?|'+)$")
"""The end of a text in which Transformers' clean_up_tokenization takes spaces away, or no longer
the one before "'", once more follows: "do n '" becomes "don't" with the next token.
"""
_WAIT = 8
"""Tokens for which it is hoped that a text that no longer begins with what was given does so again.
"""
_LOOK_BACK = 256
"""Characters."""


def text_of(tokenizer: Any, token_ids: Sequence[int], **options: Any) -> str:
    """What `tokenizer.decode` makes of tokens. Numbers that the vocabulary leaves out have no text:
    fast tokenizers pass over them, others fail at them.
    """
    try:
        return str(tokenizer.decode(token_ids, **options))
    except (KeyError, IndexError, TypeError):
        known = set(tokenizer.get_vocab().values())
        if known.issuperset(token_ids):
            raise
        return str(tokenizer.decode([token for token in token_ids if token in known], **options))


_TAIL = 8
"""Last tokens of a prompt that are decoded with the new ones, enough for a character of 4 bytes."""


def text_after(
    tokenizer: Any, prompt: Sequence[int], token_ids: Sequence[int], **options: Any
) -> str:
    """Return the text that new tokens add to the text of a prompt.

    Tokenizers that mark spaces (Llama, Mistral, Phi 3) drop the space before the first token that
    they decode. Some tokens of the prompt are therefore decoded too, and their text is removed.
    """
    tail = list(prompt[-_TAIL:])
    if not tail:
        return text_of(tokenizer, token_ids, **options)
    # the new tokens may end the prompt's last character
    before = text_of(tokenizer, tail, **options).rstrip(_UNKNOWN)
    text = text_of(tokenizer, [*tail, *token_ids], **options)
    return text[len(before) if text.startswith(before) else _most_like(before, text) :]


class TextStream:
    """Gives the text of a token when no later token changes it: all bytes of its characters are
    there, and spaces that a clean-up may still remove are not at its end. Pieces add up to
    `text()`.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """Start after the tokens of `prompt`."""
        self._tokenizer, self._prompt = tokenizer, tuple(prompt[-_TAIL:])
        self._tokens: list[int] = []
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._given = ""
        self._waited = 0

    def add(self, token: int) -> str:
        """The new text, "" while a later token may change it."""
        self._tokens.append(token)
        text = self.text()
        if text.endswith(_UNKNOWN):
            return ""
        if self._cleans:
            text = _MAY_LOSE_SPACES.sub("", text)
        if self._given.startswith(text):
            return ""
        if not text.startswith(self._given):
            self._waited += 1
            if self._waited < _WAIT:
                return ""
        return self._new(text)

    def rest(self) -> str:
        """What is left at the end."""
        return self._new(self.text())

    def text(self) -> str:
        """Of all tokens."""
        return text_after(self._tokenizer, self._prompt, self._tokens, skip_special_tokens=True)

    def _new(self, text: str) -> str:
        given = self._given
        self._given = text
        self._waited = 0
        return text[len(given) if text.startswith(given) else _most_like(given, text) :]


def _most_like(given: str, text: str) -> int:
    """How many characters of `text` are as `given` with the fewest edits, so that the others after
    `given` leave the fewest wrong ones.
    """
    same = next(
        (at for at, (one, other) in enumerate(zip(given, text, strict=False)) if one != other),
        min(len(given), len(text)),
    )
    given = given[same:]
    rest = text[same:]
    if max(len(given), len(rest)) > _LOOK_BACK:
        return min(same + len(given), len(text))
    edits = list(range(len(rest) + 1))
    for char in given:
        before = edits
        edits = [edits[0] + 1]
        for at, other in enumerate(rest):
            edits.append(min(before[at] + (char != other), before[at + 1] + 1, edits[at] + 1))
    return same + edits.index(min(edits))
