"""Rows of conversations and instructions, and their tokens under the tokenizer's chat template.

A row is hashed like any other document, and its hash decides whether it belongs to the validation
split. Its text is JSON: `{"messages": [...]}` or `{"prompt": ..., "completion": ...}`, with the
other columns that the format reads (`COLUMNS`). A row with an unknown column is refused, because
the column may change the meaning of the row.

Tokenisation (`encoder`) also determines which tokens are targets of the loss: those of the answers,
or all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from plait.errors import InputError, first_lone_surrogate
from plait.model.chat_template import DATE, ChatTemplate, Message, Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = {
    "chat": ("messages", "tools", "chat_template_kwargs"),
    "instruct": ("prompt", "completion", "instruction", "input", "output", "system", "history"),
}
"""Columns that each format reads if a row has them."""

_OPTIONAL_OF_PAIR = ("system", "history")
Encoded = tuple[list[int], list[bool]]
"""Tokens, and for each token whether the loss counts it."""
_ALL_REMEDY = 'use data.scored = "all", or a template with {% generation %}'


def row_text(
    row: Mapping[str, Any], form: str, *, where: str, ignored: Collection[str] = ()
) -> str:
    """Return the row as JSON with sorted keys.

    Args:
        row: The row. A column that is null counts as missing, because Arrow gives all rows the same
            columns.
        form: `chat` or `instruct`.
        where: Name of the row in messages.
        ignored: Columns that are skipped.

    Raises:
        InputError: The row lacks a column that the format needs, or has a column that is neither
            read nor ignored.
    """
    columns = {
        name: value for name, value in row.items() if value is not None and name not in ignored
    }
    if form == "chat":
        parsed = _parse_conversation(columns, where)
    else:
        parsed = _parse_pair(columns, where)

    surrogate = first_lone_surrogate(json.dumps(parsed, ensure_ascii=False, default=str))
    if surrogate is not None:
        raise InputError(
            f"{where}: holds {surrogate}, half of a character (a lone surrogate); correct it, or"
            " leave it out"
        )
    # Rows are hashed as texts, so equal rows must have equal texts.
    return json.dumps(parsed, sort_keys=True)


def _refuse_unread(row: Mapping[str, Any], read: Collection[str], where: str) -> None:
    unread = [name for name in row if name not in read]
    if unread:
        shown = ", ".join(map(repr, unread[:8]))
        names = json.dumps(unread[:8])
        raise InputError(
            f"{where}: has unknown columns, {shown}, besides the known ones ({', '.join(read)});"
            f" remove them, or name them in data.ignored_columns = {names}"
        )


def _parse_conversation(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        rule = "'messages' is not a list with messages"
        if messages is None:
            rule = "has no field 'messages'"
        shown = ", ".join(map(repr, row)) or "none"
        raise InputError(
            f"{where}: {rule}; it has {shown}; give each row a list of objects with `role` and"
            " `content`"
        )
    parsed: dict[str, Any] = {
        "messages": [
            _parse_message(message, number, where)
            for number, message in enumerate(messages, start=1)
        ]
    }
    _refuse_unread(row, COLUMNS["chat"], where)

    tools = _decode_json(row.get("tools"))
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise InputError(
                f"{where}: 'tools' is not a list of objects (JSON schemas of functions); correct it"
            )
        parsed["tools"] = tools

    settings = _decode_json(row.get("chat_template_kwargs"))
    if settings:
        if not isinstance(settings, Mapping):
            raise InputError(
                f"{where}: 'chat_template_kwargs' is not an object with settings of the template;"
                " correct it"
            )
        parsed["chat_template_kwargs"] = {
            name: value for name, value in settings.items() if value is not None
        }
    return parsed


def _parse_message(message: Any, number: int, where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if isinstance(message, Mapping):
        fields = {name: value for name, value in message.items() if value is not None}
    content = fields.get("content")
    if content is None and fields.get("tool_calls"):
        # A message that only calls tools has no text.
        content = ""
    if not isinstance(fields.get("role"), str) or not isinstance(content, str):
        raise InputError(
            f"{where}: message {number} is not an object with the strings `role` and `content`;"
            " correct it"
        )
    if fields.get("weight", 1) not in (0, 1):
        raise InputError(
            f"{where}: message {number} has the weight {fields['weight']!r}; write 0 for an answer"
            " that is not trained on, and 1 or no weight for the others"
        )
    return {**fields, "content": content}


def _decode_json(value: Any) -> Any:
    """Parse a string as JSON, the form in which Arrow stores columns of mixed objects."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _parse_pair(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = ("instruction", "output")
    read: tuple[str, ...] = (*names, "input", *_OPTIONAL_OF_PAIR)
    if "prompt" in row:
        names = ("prompt", "completion")
        read = (*names, *_OPTIONAL_OF_PAIR)
    texts = [row.get(name) for name in names]
    if not all(isinstance(text, str) for text in texts):
        shown = ", ".join(map(repr, row)) or "none"
        raise InputError(
            f"{where}: an instruction has the strings prompt and completion, or instruction and"
            f" output, but this row has {shown}; rename the fields of the row"
        )
    _refuse_unread(row, read, where)

    prompt = str(texts[0])
    for name in ("input", "system"):
        if name in row and not isinstance(row[name], str):
            raise InputError(
                f"{where}: {name!r} holds a {type(row[name]).__name__} and not a string; correct"
                " it, or leave it out"
            )
    if row.get("input"):
        prompt = f"{prompt}\n\n{row['input']}"
    parsed: dict[str, Any] = {"prompt": prompt, "completion": str(texts[1])}
    if row.get("system"):
        parsed["system"] = row["system"]

    history = row.get("history")
    if history:
        if not isinstance(history, list) or not all(_is_turn(turn) for turn in history):
            raise InputError(
                f"{where}: 'history' is not a list of pairs of strings, a prompt and its answer;"
                " correct it, or leave it out"
            )
        parsed["history"] = history
    return parsed


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, list | tuple)
        and len(turn) == 2
        and all(isinstance(text, str) for text in turn)
    )


def encoder(
    tokenizer: PreTrainedTokenizerBase, form: str, *, scored: str, append_end_of_text: bool = False
) -> Callable[[str], Encoded]:
    """Return a function that turns the text of a row (`row_text`) into tokens.

    Args:
        tokenizer: A fast tokenizer, which returns the offsets of its tokens.
        form: `chat` or `instruct`.
        scored: Tokens that are targets of the loss: `answers` or `all`.
        append_end_of_text: Whether the end-of-text token is appended to rows that end without it.

    Raises:
        InputError: The tokenizer lacks what the format needs.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if form == "chat" and not has_template:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise InputError(
            f'data.format = "chat": {name} has no chat template; set data.tokenizer to a tokenizer'
            ' with a chat template, or set data.format to "instruct" and give each row a prompt and'
            " its completion"
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
        # Some templates write the end-of-text token themselves.
        if append_end_of_text and ids[-1:] != [tokenizer.eos_token_id]:
            return [*ids, int(tokenizer.eos_token_id)], [*scored_tokens, True]
        return ids, scored_tokens

    return encode


def template_warnings(tokenizer: PreTrainedTokenizerBase, *, append_end_of_text: bool) -> list[str]:
    """Return warnings about training with a chat template, one line each."""
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
            " follows: only the last answer of such a conversation is trained on"
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
    """Return an instruction as a conversation with its system prompt and earlier turns."""
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
    """Return the tokens of a prompt and its completion, followed by an end-of-text token.

    The end-of-text token is a target of the loss, so that the model learns where an answer ends.
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
    scored_spans = []
    for number, span in zip(numbers, spans, strict=True):
        if span is not None and weights[number]:
            scored_spans.append(span)
    return _tokenize_with_scores(tokenizer, text, scored_spans)


def _spans(
    template: ChatTemplate, messages: list[Message], numbers: list[int]
) -> tuple[str, list[tuple[int, int] | None]]:
    """Return (text of a conversation, spans of its answers).

    The answers are the messages with the indices `numbers`.

    The span is None for an answer that the template writes differently when later turns follow, for
    example because it removes earlier thinking. A model never generates such an answer.
    """
    if template.marks_answers:
        text, marked = template.render_marked(messages)
        if len(marked) != len(numbers):
            raise InputError(
                f"the chat template has {len(marked)} parts in {{% generation %}} for"
                f" {len(numbers)} answers; put each answer of the template into one"
                " {% generation %} block"
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
    """Return the tokens of `text`, and whether each of them begins in one of the spans.

    In generation, the prompt and the answer are tokenized separately. The text is therefore split
    at the edges of spans, so that no token covers the end of a prompt and the beginning of an
    answer.
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
                "the tokenizer merges the end of a prompt and the beginning of its answer into"
                f" one token, {seam!r}, so the two cannot be tokenised separately; end the"
                " prompt with a line break"
            )
    return ids, [any(first <= begin < last for first, last in spans) for begin, _ in offsets]


def _is_inside_token(edge: int, offsets: list[tuple[int, int]]) -> bool:
    return any(begin < edge < end for begin, end in offsets)


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return (tokens of a text, the characters of each token as (start, end))."""
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])
