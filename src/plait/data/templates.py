"""Conversations and instructions as tokens, by the tokenizer's chat template, and which of them the
loss is of.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from plait.errors import InputError
from plait.model.chat_template import DATE, ChatTemplate, Message, Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
"""Tokens, and for each whether the loss is of it."""

_ALL = 'use data.scored = "all", or a template with {% generation %}'


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
            f'data.format = "chat": {name} has no chat template; set data.tokenizer to one that'
            ' has, or use "instruct"'
        )
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f'data.format = "{form}": {type(tokenizer).__name__} does not say where its tokens'
            " stand; use a fast tokenizer"
        )

    def encode(text: str) -> Encoded:
        row = json.loads(text)
        answers = scored == "answers"
        try:
            if not has_template:
                return _plain(tokenizer, row, answers=answers)
            ids, counted = _templated(tokenizer, row, answers=answers)
        except InputError as error:
            raise InputError(f"data.format: {error} (the row begins with {_shown(row)})") from error
        if append_end_of_text and ids[-1:] != [tokenizer.eos_token_id]:
            return [*ids, int(tokenizer.eos_token_id)], [*counted, True]
        return ids, counted

    return encode


def cautions_of(tokenizer: PreTrainedTokenizerBase, *, append_end_of_text: bool) -> list[str]:
    """Return warnings about a chat template before a model is trained with it, one line each."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    found = []
    template = ChatTemplate(tokenizer)
    source = str(tokenizer.get_chat_template())
    if template.text != source:
        found.append(
            f"the chat template of {template.name} writes today's date: every row has"
            f" {DATE:%d %b %Y}, so that its tokens do not depend on the day"
        )
    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    try:
        text = template.render(turn)
        _, spans = _spans(template, [*turn, *turn], [1, 3])
    except InputError:  # it wants other roles, or cannot be trained on: the rows will say so
        return found
    if spans[0] is None:
        found.append(
            f"the chat template of {template.name} writes an answer otherwise once another turn"
            " follows: of such a conversation only the last answer is scored"
        )
    tail = text[text.rfind("2") + 1 :]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
    marks = {
        tokenizer.eos_token_id,
        *tokenizer.all_special_ids,
        *getattr(tokenizer, "added_tokens_decoder", {}),
    }
    if not append_end_of_text and not marks & set(ids):
        found.append(
            f"the chat template of {template.name} ends an answer without a token that ends a turn,"
            " so a model would not learn to stop; set data.append_end_of_text to true, or use"
            " another template"
        )
    return found


def _shown(row: dict[str, Any]) -> str:
    texts = (
        [row["prompt"]]
        if "prompt" in row
        else [one["content"] for one in row["messages"] if one["content"]]
    )
    return repr(texts[0][:60] if texts else "")


def _as_messages(row: dict[str, Any]) -> list[Message]:
    """Return the conversation of an instruction, after its system prompt and the turns before
    it.
    """
    found = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for prompt, answer in [*row.get("history", ()), (row["prompt"], row["completion"])]:
        found += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return found


def _plain(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], *, answers: bool) -> Encoded:
    """Return the two texts one after the other, and an end-of-text token, which is scored: the
    answer ends there.
    """
    unread = [name for name in ("system", "history") if name in row]
    if unread:
        raise InputError(
            f"a tokenizer without a chat template has no place for {unread[0]!r}; set"
            " data.tokenizer to one with a template"
        )
    prompt = row["prompt"]
    completion = row["completion"]
    ids, scored = _marked(
        tokenizer, prompt + completion, [(len(prompt) if answers else 0, len(prompt + completion))]
    )
    assert isinstance(tokenizer.eos_token_id, int)
    return [*ids, tokenizer.eos_token_id], [*scored, True]


def _templated(
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
            "the chat template reads the clock, so a row would be other text each time; use one"
            " with a fixed date"
        )
    messages = [
        {name: value for name, value in one.items() if name != "weight"}
        for one in row.get("messages") or _as_messages(row)
    ]
    if not answers:
        text = template.render(messages)
        return _marked(tokenizer, text, [(0, len(text))])
    numbers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    weights = (
        [one.get("weight", 1) for one in row["messages"]]
        if "messages" in row
        else [1] * len(messages)
    )
    text, spans = _spans(template, messages, numbers)
    kept = [
        span
        for number, span in zip(numbers, spans, strict=True)
        if span is not None and weights[number]
    ]
    return _marked(tokenizer, text, kept)


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
            shared = sum(
                1
                for _ in takewhile(
                    lambda pair: pair[0] == pair[1], zip(before, after, strict=False)
                )
            )
            asked = before[shared:]
            raise InputError(
                f"the chat template asks for an answer with {asked[:40]!r}, and does not write that"
                " before the answer that it is given, so a model would be trained on other text"
                f" than it is asked for; {_ALL}"
            )
        raise InputError(
            "the chat template writes earlier messages otherwise once later ones follow, so the"
            f" tokens of an answer cannot be told; {_ALL}"
        )
    return text, spans


def _marked(tokenizer: PreTrainedTokenizerBase, text: str, spans: Spans) -> Encoded:
    """Return the tokens of `text`, and which of them begin in one of the spans.

    In generation, the prompt and the answer are tokenized separately. The text is therefore cut at
    the edges of spans, so that no token covers the end of a prompt and the beginning of an answer.
    """
    ids, offsets = _tokens(tokenizer, text)
    edges = {edge for span in spans for edge in span}
    cuts = sorted(edge for edge in edges if any(begin < edge < end for begin, end in offsets))
    if cuts:
        whole = ids
        ids = []
        offsets = []
        for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
            part, places = _tokens(tokenizer, text[first:last])
            ids += part
            offsets += [(first + begin, first + end) for begin, end in places]
        if tokenizer.decode(ids) != tokenizer.decode(whole):
            seam = text[max(cuts[0] - 8, 0) : cuts[0] + 8]
            raise InputError(
                "the tokenizer makes one token of the end of a prompt and the beginning of its"
                f" answer, {seam!r}, and other text of the two apart; end the prompt with a line"
                " break or a space"
            )
    return ids, [any(first <= begin < last for first, last in spans) for begin, _ in offsets]


def _tokens(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    found = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return list(found["input_ids"]), list(found["offset_mapping"])
