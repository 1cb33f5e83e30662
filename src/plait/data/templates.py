"""Tokenisation of conversations and instructions with the chat template of the tokenizer.

The result also says which tokens the loss counts: the answers, or all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.errors import InputError
from plait.model.chat_template import DATE, ChatTemplate, Message, Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
"""Tokens, and for each token whether the loss counts it."""

_ALL_REMEDY = 'use data.scored = "all", or a template with {% generation %}'


def encoder(
    tokenizer: PreTrainedTokenizerBase, form: str, *, scored: str, append_end_of_text: bool = False
) -> Callable[[str], Encoded]:
    """Return a function that turns the text of a row (`rows.row_text`) into tokens.

    Args:
        tokenizer: A fast tokenizer, which returns the offsets of its tokens.
        form: `chat` or `instruct`.
        scored: `answers` or `all`.
        append_end_of_text: Whether the end-of-text token is appended to rows that end without it.

    Raises:
        InputError: The tokenizer lacks what the format needs.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if form == "chat" and not has_template:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise InputError(
            f'data.format = "chat": {name} has no chat template; set data.tokenizer to a tokenizer'
            ' with a chat template, or use "instruct"'
        )
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f'data.format = "{form}": {type(tokenizer).__name__} does not return the offsets of its'
            " tokens; use a fast tokenizer"
        )

    def encode(text: str) -> Encoded:
        row = json.loads(text)
        answers = scored == "answers"
        try:
            if not has_template:
                return _encode_pair(tokenizer, row, answers=answers)
            ids, scored_tokens = _encode_with_template(tokenizer, row, answers=answers)
        except InputError as error:
            excerpt = _beginning(row)
            raise InputError(f"data.format: {error} (the row begins with {excerpt})") from error
        if append_end_of_text and ids[-1:] != [tokenizer.eos_token_id]:
            return [*ids, int(tokenizer.eos_token_id)], [*scored_tokens, True]
        return ids, scored_tokens

    return encode


def template_warnings(tokenizer: PreTrainedTokenizerBase, *, append_end_of_text: bool) -> list[str]:
    """Return warnings about a chat template before a model is trained with it, one line each."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    warnings = []
    template = ChatTemplate(tokenizer)
    source = str(tokenizer.get_chat_template())
    if template.text != source:
        warnings.append(
            f"the chat template of {template.name} writes today's date: every row has"
            f" {DATE:%d %b %Y}, so that its tokens do not depend on the day"
        )
    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    try:
        text = template.render(turn)
        _, spans = _spans(template, [*turn, *turn], [1, 3])
    except InputError:
        # The template requires other roles, or cannot be trained on. The rows will fail with a
        # better message.
        return warnings
    if spans[0] is None:
        warnings.append(
            f"the chat template of {template.name} writes an answer differently once another turn"
            " follows: of such a conversation only the last answer is scored"
        )
    tail = text[text.rfind("2") + 1 :]
    tail_ids = []
    if tail:
        tail_ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    end_tokens = {
        tokenizer.eos_token_id,
        *tokenizer.all_special_ids,
        *getattr(tokenizer, "added_tokens_decoder", {}),
    }
    if not append_end_of_text and not end_tokens & set(tail_ids):
        warnings.append(
            f"the chat template of {template.name} ends an answer without a token that ends a turn,"
            " so a model would not learn to stop; set data.append_end_of_text to true, or use"
            " another template"
        )
    return warnings


def _beginning(row: dict[str, Any]) -> str:
    """Return the quoted beginning of the first text of a row, for messages."""
    if "prompt" in row:
        texts = [row["prompt"]]
    else:
        texts = [message["content"] for message in row["messages"] if message["content"]]
    return repr(texts[0][:60] if texts else "")


def _to_messages(row: dict[str, Any]) -> list[Message]:
    """Return an instruction as a conversation, with its system prompt and its earlier turns."""
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": row["system"]})
    for prompt, answer in [*row.get("history", ()), (row["prompt"], row["completion"])]:
        messages.append({"role": "user", "content": prompt})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _encode_pair(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], *, answers: bool
) -> Encoded:
    """Return the tokens of prompt, completion and an end-of-text token.

    The end-of-text token is scored, so that the model learns where an answer ends.
    """
    unread = [name for name in ("system", "history") if name in row]
    if unread:
        raise InputError(
            f"a tokenizer without a chat template has no place for {unread[0]!r}; set"
            " data.tokenizer to one with a template"
        )
    prompt = row["prompt"]
    text = prompt + row["completion"]
    scored_from = len(prompt) if answers else 0
    ids, scored = _tokenize_with_scores(tokenizer, text, [(scored_from, len(text))])
    assert isinstance(tokenizer.eos_token_id, int)
    return [*ids, tokenizer.eos_token_id], [*scored, True]


def _encode_with_template(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], *, answers: bool
) -> Encoded:
    """Return the tokens of a conversation in the chat template.

    The answers are the texts that the template adds for each message of the assistant.
    """
    template = ChatTemplate(
        tokenizer, tools=row.get("tools"), settings=row.get("chat_template_kwargs")
    )
    if template.reads_clock():
        raise InputError(
            "the chat template reads the clock, so the text of a row would depend on the time; use"
            " a template with a fixed date"
        )
    messages = []
    weights = []
    for message in row.get("messages") or _to_messages(row):
        # The weight is for the loss. Templates do not know it.
        fields = dict(message)
        weights.append(fields.pop("weight", 1))
        messages.append(fields)
    if not answers:
        text = template.render(messages)
        return _tokenize_with_scores(tokenizer, text, [(0, len(text))])

    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans = _spans(template, messages, numbers)
    scored_spans = [
        span
        for number, span in zip(numbers, spans, strict=True)
        if span is not None and weights[number]
    ]
    return _tokenize_with_scores(tokenizer, text, scored_spans)


def _spans(
    template: ChatTemplate, messages: list[Message], numbers: list[int]
) -> tuple[str, list[tuple[int, int] | None]]:
    """Return the text of a conversation, and the spans of its messages `numbers`, the answers.

    The span is None for an answer that the template writes differently once later turns follow, as
    templates do that remove earlier thinking. A model never generates such an answer.
    """
    if template.marks_answers:
        text, marked = template.render_marked(messages)
        if len(marked) != len(numbers):
            raise InputError(
                f"the chat template has {len(marked)} parts in {{% generation %}} for"
                f" {len(numbers)} answers; correct the template"
            )
        return text, list(marked)

    text = template.render(messages)
    spans: list[tuple[int, int] | None] = []
    for number in numbers:
        before = template.render(messages[:number], prompts=True)
        after = template.render(messages[: number + 1])
        if after.startswith(before) and text.startswith(after):
            spans.append((len(before), len(after)))
            continue
        if number != numbers[-1]:
            spans.append(None)
            continue
        if after.startswith(template.render(messages[:number])) and text.startswith(after):
            generation_prompt = _without_common_prefix(before, after)
            raise InputError(
                f"the chat template starts generation with {generation_prompt[:40]!r}, and does not"
                " write that before the answer in a conversation, so a model would be trained on"
                f" other text than it generates from; {_ALL_REMEDY}"
            )
        raise InputError(
            "the chat template writes earlier messages differently once later ones follow, so the"
            f" tokens of an answer cannot be located; {_ALL_REMEDY}"
        )
    return text, spans


def _without_common_prefix(text: str, other: str) -> str:
    for index, (char, other_char) in enumerate(zip(text, other, strict=False)):
        if char != other_char:
            return text[index:]
    return text[len(other) :]


def _tokenize_with_scores(tokenizer: PreTrainedTokenizerBase, text: str, spans: Spans) -> Encoded:
    """Return the tokens of `text`, and which of them begin in one of the spans.

    In generation, the prompt and the answer are tokenized separately. The text is therefore cut at
    the edges of spans, so that no token covers the end of a prompt and the beginning of an answer.
    """
    ids, offsets = _tokenize(tokenizer, text)
    edges = {edge for span in spans for edge in span}
    cuts = [edge for edge in sorted(edges) if _is_inside_token(edge, offsets)]
    if cuts:
        uncut_ids = ids
        ids = []
        offsets = []
        for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
            section_ids, section_offsets = _tokenize(tokenizer, text[first:last])
            ids += section_ids
            offsets += [(first + begin, first + end) for begin, end in section_offsets]
        if tokenizer.decode(ids) != tokenizer.decode(uncut_ids):
            seam = text[max(cuts[0] - 8, 0) : cuts[0] + 8]
            raise InputError(
                "the tokenizer makes one token of the end of a prompt and the beginning of its"
                f" answer, {seam!r}, and other text if the two are tokenised separately; end the"
                " prompt with a line break or a space"
            )
    return ids, [any(first <= begin < last for first, last in spans) for begin, _ in offsets]


def _is_inside_token(edge: int, offsets: list[tuple[int, int]]) -> bool:
    return any(begin < edge < end for begin, end in offsets)


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a text and the offsets of their characters."""
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])
