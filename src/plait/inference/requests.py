"""Requests, their prompts as token ids, and their results as complete or streamed text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from plait.errors import InputError, first_line, first_lone_surrogate
from plait.inference.generation_settings import GenerationSettings, check_ids, tokens_of_model
from plait.model.chat_template import ChatTemplate
from plait.sizes import is_count, is_integer


@dataclass(frozen=True)
class GenerationRequest:
    """Prompt of one request, its largest number of new tokens, and its seed."""

    token_ids: tuple[int, ...]
    new_tokens: int
    """Largest number of new tokens."""
    seed: int | None
    """Seed of its draws; None without sampling."""

    @property
    def max_tokens_read(self) -> int:
        """Largest number of tokens that the model reads. It never reads the last new token."""
        return len(self.token_ids) + max(self.new_tokens - 1, 0)


@dataclass(frozen=True)
class Conversation:
    """Conversation with additional arguments for its chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    """JSON schemas of functions; empty for none."""
    settings: dict[str, Any]
    """Further arguments of the template."""


@dataclass
class Answer:
    """New tokens of one request so far, while it is decoded."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    """See `Generation`. It is empty while the request is unfinished."""


@dataclass(frozen=True)
class Generation:
    """Result of one request: the continuation of its prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    """New tokens, with the one that ended the request."""
    logprobs: list[float]
    """Log probability of every new token in the model's own distribution.

    Temperature, penalties and limits do not change it.
    """
    finish_reason: str
    """`stop` after an end-of-text token or a stop string; `length` at the limit of new tokens."""
    text: str | None
    """Text that the new tokens add to the prompt's text, without special tokens.

    It is None without a tokenizer.
    """


def append_answers(
    prompts: torch.Tensor, generations: Sequence[Generation], padding: int
) -> torch.Tensor:
    """Return the rows of prompts with the generated tokens, as Transformers' `generate` does.

    Args:
        prompts: Token ids, [batch, length].
        generations: One result per row.
        padding: Token that follows shorter answers.

    Returns:
        Token ids, [batch, length + length of the longest answer].
    """
    if not generations:
        return prompts  # `pad_sequence` refuses an empty list.

    answers = [prompts.new_tensor(generation.token_ids) for generation in generations]
    return torch.cat([prompts, pad_sequence(answers, batch_first=True, padding_value=padding)], 1)


def token_ids(prompts: Any, tokenizer: Any) -> list[tuple[int, ...]]:
    """Return the token ids of prompts.

    Args:
        prompts: One prompt or several: texts, conversations, or token ids.
        tokenizer: A tokenizer, which texts and conversations require, or None.

    Raises:
        InputError: A prompt is none of these, or has no tokens.
    """
    if isinstance(prompts, str | Conversation) or _is_conversation(prompts):
        prompts = [prompts]
    elif isinstance(prompts, torch.Tensor):
        # [prompts, tokens] or [tokens]
        if prompts.ndim == 2:
            prompts = prompts.tolist()
        elif prompts.ndim == 1:
            prompts = [prompts.tolist()]
    elif isinstance(prompts, Sequence) and prompts and all(map(is_integer, prompts)):
        prompts = [prompts]
    # A tokenizer's result is a mapping, and not a dictionary.
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | torch.Tensor):
        raise InputError(
            "generate takes strings, conversations or token ids, one or a list, not"
            f" {type(prompts).__name__}; pass a tokenizer's `input_ids` as lists without padding"
        )
    return [
        prompt_token_ids(prompt, f"prompt {index}", tokenizer)
        for index, prompt in enumerate(prompts)
    ]


def checked_ids(model: nn.Module, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return prompts after checking that all tokens are in the model's vocabulary.

    Without this check, a split embedding would return zeros for a token that no rank has.

    Raises:
        InputError: The model does not have a token.
    """
    size = tokens_of_model(model)
    for index, prompt in enumerate(prompts):
        check_ids(prompt, f"prompt {index}", size)
    return prompts


def check_room(tokens: int, name: str, settings: GenerationSettings) -> int:
    """Return how many tokens may be added to a prompt.

    Args:
        tokens: Number of tokens of the prompt.
        name: Name of the prompt, for the message.
        settings: Settings of the call.

    Raises:
        InputError: No token may be added.
    """
    new_tokens = settings.new_tokens(tokens)
    if new_tokens < 1:
        raise InputError(
            f"{name} has {tokens} tokens, and max_length = {settings.max_length} leaves none to"
            " generate; pass max_new_tokens, raise max_length, or shorten the prompt"
        )
    return new_tokens


def prompt_token_ids(prompt: Any, name: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of one prompt.

    Args:
        prompt: A text, a conversation, or token ids.
        name: Name of the prompt, for messages.
        tokenizer: A tokenizer, or None.

    Raises:
        InputError: The prompt is none of these, or has no tokens.
    """
    if isinstance(prompt, str | Conversation) or _is_conversation(prompt):
        ids = _tokenize(prompt, name, tokenizer)
    elif (
        isinstance(prompt, torch.Tensor)
        and prompt.ndim == 1
        and all(map(is_integer, prompt.tolist()))
    ):
        ids = prompt.tolist()
    elif isinstance(prompt, Sequence) and all(map(is_integer, prompt)):
        ids = prompt
    else:
        raise InputError(
            f"{name} is a {type(prompt).__name__}; pass a string, a conversation (role and"
            " content) or token ids"
        )
    if not ids:
        raise InputError(
            f"{name} has no tokens, but a model needs at least one; pass for example its"
            " beginning-of-text token"
        )
    return tuple(int(token) for token in ids)


def _tokenize(prompt: Any, name: str, tokenizer: Any) -> Any:
    """Return the token ids of a string or a conversation."""
    if tokenizer is None:
        raise InputError(
            f"{name} is text, which requires a tokenizer; pass tokenizer=, or token ids"
        )
    messages = prompt.messages if isinstance(prompt, Conversation) else prompt
    text = prompt
    if not isinstance(prompt, str):
        text = json.dumps(messages, ensure_ascii=False, default=str)
    if (half := first_lone_surrogate(text)) is not None:
        raise InputError(
            f"{name} holds {half}, half of a character (a lone surrogate), which cannot"
            " be tokenized; correct it"
        )
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            f"{name} is a conversation, but the tokenizer has no chat template; pass a string, or"
            " token ids"
        )
    return _apply_chat_template(prompt, name, tokenizer)


def _apply_chat_template(prompt: Any, name: str, tokenizer: Any) -> Any:
    arguments: dict[str, Any] = {}
    messages = prompt
    if isinstance(prompt, Conversation):
        messages = prompt.messages
        try:
            # Only for its checks: Transformers ignores arguments that a template does not read.
            ChatTemplate(tokenizer, tools=prompt.tools, settings=prompt.settings)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        arguments = {**prompt.settings, "tools": prompt.tools or None}
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **arguments
        )
    except Exception as error:  # a template is a program, and may raise any error
        raise InputError(
            f"{name}: the model's chat template does not take this conversation"
            f" ({first_line(error)}); correct it"
        ) from error


def check_count(name: str, value: Any) -> None:
    """Raise InputError for an argument that is neither None nor an integer of at least 1."""
    if value is not None and not is_count(value):
        raise InputError(f"{name} = {value!r} must be a whole number of at least 1")


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(map(is_turn, prompt))


def is_turn(turn: Any) -> bool:
    """Return True for a turn of a conversation, which has a role, and text or tool calls."""
    return isinstance(turn, dict) and "role" in turn and ("content" in turn or "tool_calls" in turn)


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
    """Return the text of tokens.

    Token ids that are not in the vocabulary are skipped.

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
    return _text_after_prefix(before, text)


class TextStream:
    """Incremental decoder that returns text as soon as no later token can change it.

    It holds back incomplete characters, and spaces at the end that the tokenizer's clean-up may
    still remove. The returned strings, joined, are equal to `text()`.

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
        """Number of tokens since the text no longer begins with `_returned`."""

    def add(self, token: int) -> str:
        """Add a token, and return the new text. Text that a later token may change is held back."""
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

    def remainder(self) -> str:
        """Return the text that is still held back after the last token."""
        return self._advance(self.text())

    def text(self) -> str:
        """Return the text of all tokens that were added."""
        return text_after(self._tokenizer, self._prompt, self._tokens, skip_special_tokens=True)

    def _advance(self, text: str) -> str:
        new = _text_after_prefix(self._returned, text)
        self._returned = text
        self._waited = 0
        return new


def _text_after_prefix(before: str, text: str) -> str:
    """Return the end of `text` that follows `before`.

    If `text` does not begin with `before`, the prefix of `text` that is most similar to `before` is
    left out.
    """
    if text.startswith(before):
        return text[len(before) :]
    return text[_closest_prefix(before, text) :]


def _closest_prefix(before: str, text: str) -> int:
    """Return the length of the prefix of `text` with the smallest edit distance to `before`.

    Appending the rest of `text` to `before` then leaves the fewest wrong characters.
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
