"""Rows of conversations and instructions: their validation and their form as one text.

As a text, a row is hashed and chosen for validation like any other document. The text is JSON:
`{"messages": [...]}` or `{"prompt": ..., "completion": ...}`, with the other columns that the
format reads (`COLUMNS`). A row with an unknown column is refused, because the column may change the
meaning of the row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from plait.errors import InputError, first_lone_surrogate

COLUMNS = {
    "chat": ("messages", "tools", "chat_template_kwargs"),
    "instruct": ("prompt", "completion", "instruction", "input", "output", "system", "history"),
}
"""Columns that each format reads if a row has them."""

_OPTIONAL_OF_PAIR = ("system", "history")


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
    return json.dumps(parsed, sort_keys=True)


def _refuse_unread(row: Mapping[str, Any], read: Collection[str], where: str) -> None:
    unread = [name for name in row if name not in read]
    if unread:
        shown = ", ".join(map(repr, unread[:8]))
        names = json.dumps(unread[:8])
        raise InputError(
            f"{where}: nothing reads {shown}; a row has {', '.join(read)}; take the others out, or"
            f" name them in data.ignored_columns = {names}"
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
            f"{where}: message {number} is not an object with the texts `role` and `content`;"
            " correct it"
        )
    if fields.get("weight", 1) not in (0, 1):
        raise InputError(
            f"{where}: message {number} has the weight {fields['weight']!r}; write 0 for an answer"
            " that is not trained on, else 1 or none"
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
            f"{where}: an instruction has the texts prompt and completion, or instruction and"
            f" output, and it has {shown}"
        )
    _refuse_unread(row, read, where)

    prompt = str(texts[0])
    extra_input = row.get("input")
    if extra_input is not None and not isinstance(extra_input, str):
        raise InputError(
            f"{where}: 'input' holds a {type(extra_input).__name__} and not a string; correct it,"
            " or leave it out"
        )
    if extra_input:
        prompt = f"{prompt}\n\n{extra_input}"
    parsed: dict[str, Any] = {"prompt": prompt, "completion": str(texts[1])}

    system = row.get("system")
    if system:
        if not isinstance(system, str):
            raise InputError(
                f"{where}: 'system' holds a {type(system).__name__} and not a string; correct it,"
                " or leave it out"
            )
        parsed["system"] = system

    history = row.get("history")
    if history:
        if not isinstance(history, list) or not all(_is_turn(turn) for turn in history):
            raise InputError(
                f"{where}: 'history' is not a list of pairs of texts, a prompt and its answer;"
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
