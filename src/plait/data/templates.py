"""Conversations and instructions as tokens, by the tokenizer's chat template, and which of them the loss is of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.errors import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
"""Tokens, and for each whether the loss is of it."""
Message = dict[str, Any]


def encoder(tokenizer: PreTrainedTokenizerBase, form: str, *, scored: str) -> Callable[[str], Encoded]:
    """What turns the text of a row (`rows.row_text`) into tokens. Raises InputError for a tokenizer that cannot."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if form == "chat" and not has_template:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise InputError(f'data.format = "chat": {name} has no chat template; set data.tokenizer to one that has, or use "instruct"')
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f'data.format = "{form}": {type(tokenizer).__name__} does not say where its tokens stand; use a fast tokenizer')

    def encode(text: str) -> Encoded:
        row = json.loads(text)
        answers = scored == "answers"
        if "messages" not in row and not has_template:
            return _plain(tokenizer, row["prompt"], row["completion"], answers=answers)
        return _templated(tokenizer, row.get("messages") or _as_messages(row), answers=answers)

    return encode


def _as_messages(row: dict[str, str]) -> list[Message]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]


def _plain(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str, *, answers: bool) -> Encoded:
    """The two texts one after the other, and an end-of-text token, which is scored: the answer ends there."""
    ids, scored = _marked(tokenizer, prompt + completion, [(len(prompt) if answers else 0, len(prompt + completion))])
    assert isinstance(tokenizer.eos_token_id, int)
    return [*ids, tokenizer.eos_token_id], [*scored, True]


def _templated(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, answers: bool) -> Encoded:
    """The conversation in the chat template; the answers are what it adds for each message of the assistant."""
    text = _render(tokenizer, messages)
    if not answers:
        return _marked(tokenizer, text, [(0, len(text))])
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = _render(tokenizer, messages[:number], prompts=True), _render(tokenizer, messages[: number + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise InputError(
                "data.format: the chat template writes earlier messages otherwise once later ones follow, so the tokens of an answer "
                'cannot be told; use data.scored = "all", or another template'
            )
        spans.append((len(before), len(after)))
    return _marked(tokenizer, text, spans)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, prompts: bool = False) -> str:
    if not messages:
        return ""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts))
    except Exception as error:  # a template is a program, which raises what it likes for roles that it does not expect
        raise InputError(f"data.format: the chat template refuses a conversation ({first_line(error)}); correct the row") from error


def _marked(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> Encoded:
    """The tokens of `text`, and which of them begin in one of the spans (first and last character)."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    begins = [begin for begin, _ in found["offset_mapping"]]
    return list(found["input_ids"]), [any(first <= begin < last for first, last in spans) for begin in begins]
