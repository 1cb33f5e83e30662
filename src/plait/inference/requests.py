"""Prompts as a caller gives them, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait.errors import InputError, first_line, half_of_a_character
from plait.inference.settings import Settings
from plait.inference.vocabulary import tokens_of_model
from plait.model.chat_template import ChatTemplate


@dataclass(frozen=True)
class Request:
    """One prompt."""

    token_ids: tuple[int, ...]
    new_tokens: int
    """At most."""
    seed: int | None
    """Of its draws; None without sampling."""

    @property
    def most_seen(self) -> int:
        """Tokens of it that a model is given at most: the last new one is not."""
        return len(self.token_ids) + max(self.new_tokens - 1, 0)


@dataclass(frozen=True)
class Conversation:
    """A conversation with what its chat template is given besides the messages."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    """JSON schemas of functions; empty for none."""
    settings: dict[str, Any]
    """Further arguments of the template."""


@dataclass
class Answer:
    """What has been added to one prompt so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    """See `Generation`; "" while the request goes on."""


@dataclass(frozen=True)
class Generation:
    """What the model adds to one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    """New tokens, with the one that ended the request."""
    logprobs: list[float]
    """Of every new token, the logarithm of its probability in the model's own distribution: before
    temperature, penalties and limits.
    """
    finish_reason: str
    """`stop`: an end-of-text token or a stop string; `length`: as many tokens as were asked for."""
    text: str | None
    """What the new tokens add to the prompt's text, without special tokens; None without a
    tokenizer.
    """


def token_ids(prompts: Any, tokenizer: Any) -> list[tuple[int, ...]]:
    """Of a text, a conversation, or token ids, or of several of them. Raises InputError for
    anything else, and for an empty prompt.
    """
    if isinstance(prompts, str | Conversation) or _is_conversation(prompts):
        prompts = [prompts]
    elif isinstance(prompts, torch.Tensor):
        prompts = (
            prompts.tolist()
            if prompts.ndim == 2
            else [prompts.tolist()]
            if prompts.ndim == 1
            else prompts
        )
    elif isinstance(prompts, Sequence) and prompts and all(map(_is_id, prompts)):
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, dict | torch.Tensor):
        raise InputError(
            "generate takes texts, conversations or token ids, one or a list, not"
            f" {type(prompts).__name__}; pass a tokenizer's `input_ids` as lists without padding"
        )
    return [ids_of(prompt, f"prompt {index}", tokenizer) for index, prompt in enumerate(prompts)]


def checked_ids(model: nn.Module, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same, for a model that has all of these tokens. Raises InputError: ranks that split the
    vocabulary would take a token that none of them has for zeros.
    """
    size = tokens_of_model(model)
    for index, prompt in enumerate(prompts):
        check_ids(prompt, f"prompt {index}", size)
    return prompts


def check_ids(prompt: tuple[int, ...], name: str, size: int | None, *, of: str = "model") -> None:
    """Raise InputError for a token that a model, or another one of `size` tokens (`of`), lacks.
    `name`: of the prompt.
    """
    for token in (min(prompt), max(prompt)):
        if token < 0 or (size is not None and token >= size):
            last = "" if size is None else f" to {size - 1}"
            raise InputError(
                f"{name} has token {token}, and the {of}'s tokens are 0{last}; is it another"
                " model's tokenizer?"
            )


def check_room(tokens: int, name: str, settings: Settings) -> int:
    """How many tokens may be added to a prompt of so many. Raises InputError for none."""
    new = settings.new_tokens(tokens)
    if new < 1:
        raise InputError(
            f"{name} has {tokens} tokens, and max_length = {settings.max_length} leaves none to"
            " add; raise it, or shorten it"
        )
    return new


def ids_of(prompt: Any, name: str, tokenizer: Any) -> tuple[int, ...]:
    """Of one prompt, of this name in messages."""
    if isinstance(prompt, str | Conversation) or _is_conversation(prompt):
        if tokenizer is None:
            raise InputError(
                f"{name} is a text, and generate was given no tokenizer; pass tokenizer=, or"
                " token ids"
            )
        messages = prompt.messages if isinstance(prompt, Conversation) else prompt
        written = (
            prompt
            if isinstance(prompt, str)
            else json.dumps(messages, ensure_ascii=False, default=str)
        )
        if (half := half_of_a_character(written)) is not None:
            raise InputError(
                f"{name} holds {half}, half of a character (a lone surrogate), which no tokenizer"
                " knows; correct it"
            )
        if isinstance(prompt, str):
            found = tokenizer(prompt)["input_ids"]
        elif getattr(tokenizer, "chat_template", None) is None:
            raise InputError(
                f"{name} is a conversation, and the tokenizer has no chat template; pass a text, or"
                " token ids"
            )
        else:
            found = _of_conversation(prompt, name, tokenizer)
    elif (
        isinstance(prompt, torch.Tensor) and prompt.ndim == 1 and all(map(_is_id, prompt.tolist()))
    ):
        found = prompt.tolist()
    elif isinstance(prompt, Sequence) and all(map(_is_id, prompt)):
        found = prompt
    else:
        raise InputError(
            f"{name} is a {type(prompt).__name__}, and not a text, a conversation (role and"
            " content) or token ids"
        )
    if not found:
        raise InputError(
            f"{name} has no token; a model needs one to go on from (its beginning-of-text token)"
        )
    return tuple(int(token) for token in found)


def _is_id(token: Any) -> bool:
    """A mask of True and False is a list of whole numbers for Python."""
    return isinstance(token, int) and not isinstance(token, bool)


def check_count(name: str, value: Any) -> None:
    """Raise InputError for an argument that is neither None nor at least 1."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InputError(f"{name} = {value!r} must be at least 1, a whole number")


def _of_conversation(prompt: Any, name: str, tokenizer: Any) -> Any:
    arguments: dict[str, Any] = {}
    messages = prompt
    if isinstance(prompt, Conversation):
        messages = prompt.messages
        try:
            ChatTemplate(tokenizer, tools=prompt.tools, settings=prompt.settings)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        arguments = {**prompt.settings, "tools": prompt.tools or None}
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **arguments
        )
    except (
        Exception
    ) as error:  # a chat template raises what it likes for turns that it does not take
        raise InputError(
            f"{name}: the model's chat template does not take this conversation"
            f" ({first_line(error)}); correct it"
        ) from error


def _is_conversation(prompt: Any) -> bool:
    """[{"role": ..., "content": ...}, ...]."""
    return isinstance(prompt, list) and bool(prompt) and all(map(is_turn, prompt))


def is_turn(turn: Any) -> bool:
    """Whether it is a turn of a conversation: somebody's text, or calls of tools."""
    return isinstance(turn, dict) and "role" in turn and ("content" in turn or "tool_calls" in turn)
