"""Text of the new tokens of one request, at once and as a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
"""Character that a tokenizer writes for bytes that are not a complete character yet."""
_MAY_LOSE_SPACES = re.compile(r"(?: +(?:n *'?|'[vr]?)?|'+)$")
"""End of a text that Transformers' `clean_up_tokenization` may change after the next token.

It removes spaces: "do n '" becomes "don't" with the next token. It may also restore a space before
an apostrophe.
"""
_MAX_WAIT_TOKENS = 8
"""Number of tokens for which a changed text is held back, because it may change back."""
_MAX_COMPARED_CHARACTERS = 256
_PROMPT_TOKENS = 8
"""Number of the prompt's last tokens that are decoded with new ones.

They are enough for a character of 4 bytes.
"""


def text_of(tokenizer: Any, token_ids: Sequence[int], **options: Any) -> str:
    """Decode tokens.

    Numbers that the vocabulary leaves out have no text. Fast tokenizers skip them, others raise an
    error.

    Args:
        tokenizer: A tokenizer of Transformers.
        token_ids: The tokens.
        options: Options of its `decode`.
    """
    try:
        return str(tokenizer.decode(token_ids, **options))
    except (KeyError, IndexError, TypeError):
        known = set(tokenizer.get_vocab().values())
        if known.issuperset(token_ids):
            raise
        return str(tokenizer.decode([token for token in token_ids if token in known], **options))


def text_after(
    tokenizer: Any, prompt: Sequence[int], token_ids: Sequence[int], **options: Any
) -> str:
    """Return the text that new tokens add to the text of a prompt.

    Tokenizers that mark spaces (Llama, Mistral, Phi 3) drop the space before the first token that
    they decode. Some tokens of the prompt are therefore decoded too, and their text is removed.

    Args:
        tokenizer: A tokenizer of Transformers.
        prompt: Tokens of the prompt.
        token_ids: The new tokens.
        options: Options of the tokenizer's `decode`.
    """
    tail = list(prompt[-_PROMPT_TOKENS:])
    if not tail:
        return text_of(tokenizer, token_ids, **options)
    # The new tokens may complete the prompt's last character.
    before = text_of(tokenizer, tail, **options).rstrip(_REPLACEMENT)
    text = text_of(tokenizer, [*tail, *token_ids], **options)
    return _text_behind(before, text)


class TextStream:
    """Yields the text of tokens as soon as no later token changes it.

    Incomplete characters are held back, and spaces at the end that a clean-up may still remove. The
    returned texts add up to `text()`.

    Args:
        tokenizer: A tokenizer of Transformers.
        prompt: Tokens of the prompt.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._prompt = tuple(prompt[-_PROMPT_TOKENS:])
        self._tokens: list[int] = []
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._returned = ""
        """Text that has been returned so far."""
        self._waited = 0
        """Number of tokens since the text stopped to begin with `_returned`."""

    def add(self, token: int) -> str:
        """Add a token, and return the new text. It is empty while a later token may change it."""
        self._tokens.append(token)
        text = self.text()
        # The last character is not complete.
        if text.endswith(_REPLACEMENT):
            return ""
        if self._cleans:
            text = _MAY_LOSE_SPACES.sub("", text)
        if self._returned.startswith(text):
            return ""
        # A text that was returned has changed, and may change back.
        if not text.startswith(self._returned):
            self._waited += 1
            if self._waited < _MAX_WAIT_TOKENS:
                return ""
        return self._advance(text)

    def rest(self) -> str:
        """Return the text that is left at the end."""
        return self._advance(self.text())

    def text(self) -> str:
        """Return the text of all tokens."""
        return text_after(self._tokenizer, self._prompt, self._tokens, skip_special_tokens=True)

    def _advance(self, text: str) -> str:
        new = _text_behind(self._returned, text)
        self._returned = text
        self._waited = 0
        return new


def _text_behind(before: str, text: str) -> str:
    """Return the end of `text` that follows `before`.

    If `text` does not begin with `before`, the prefix of `text` that is most similar is left out.
    """
    if text.startswith(before):
        return text[len(before) :]
    return text[_closest_prefix(before, text) :]


def _closest_prefix(before: str, text: str) -> int:
    """Return the length of the prefix of `text` with the smallest edit distance to `before`.

    With the text after this prefix appended to `before`, the fewest characters are wrong.
    """
    shorter = min(len(before), len(text))
    same = next((index for index in range(shorter) if before[index] != text[index]), shorter)
    before = before[same:]
    text = text[same:]
    # The time is the product of both lengths.
    if max(len(before), len(text)) > _MAX_COMPARED_CHARACTERS:
        return same + min(len(before), len(text))

    # Row of the Levenshtein matrix: edits from the characters of `before` so far to each prefix.
    edits = list(range(len(text) + 1))
    for character in before:
        previous = edits
        edits = [previous[0] + 1]
        for index, other in enumerate(text):
            substituted = previous[index] + (character != other)
            edits.append(min(substituted, previous[index + 1] + 1, edits[index] + 1))
    return same + edits.index(min(edits))
