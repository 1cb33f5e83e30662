"""Rows of conversations and instructions: what a row must have, and the row as one text, so that it
can be named and held out as any other.

The text of a row is JSON: `{"messages": [...]}` or `{"prompt": ..., "completion": ...}`, with the
other columns that the format reads (`COLUMNS`). A column that it does not read is refused, because
it may change the meaning of the row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from plait.errors import InputError, half_of_a_character

COLUMNS = {
    "chat": ("messages", "tools", "chat_template_kwargs"),
    "instruct": ("prompt", "completion", "instruction", "input", "output", "system", "history"),
}
"""The columns that a format reads, where a row has them."""

_BEFORE_PAIR = ("system", "history")


def row_text(
    row: Mapping[str, Any], form: str, *, where: str, ignored: Collection[str] = ()
) -> str:
    """Return the row as JSON with sorted keys.

    Args: row: The row. A column that is null counts as missing: Arrow gives all rows the same
        columns. form: `chat` or `instruct`. where: The row's name in messages. ignored: Columns
        that are skipped.

    Raises: InputError: The row lacks what the format needs, or has a column that is neither read
        nor ignored.
    """
    given = {
        name: value for name, value in row.items() if value is not None and name not in ignored
    }
    found = _conversation(given, where) if form == "chat" else _pair(given, where)
    if (
        half := half_of_a_character(json.dumps(found, ensure_ascii=False, default=str))
    ) is not None:
        raise InputError(
            f"{where}: holds {half}, half of a character (a lone surrogate); correct it, or leave"
            " it out"
        )
    return json.dumps(found, sort_keys=True)


def _refuse_unread(row: Mapping[str, Any], read: Collection[str], where: str) -> None:
    unread = [name for name in row if name not in read]
    if unread:
        shown = ", ".join(map(repr, unread[:8]))
        names = json.dumps(unread[:8])
        raise InputError(
            f"{where}: nothing reads {shown}; a row has {', '.join(read)}; take the others out, or"
            f" name them in data.ignored_columns = {names}"
        )


def _conversation(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        shown = ", ".join(map(repr, row)) or "none"
        wrong = (
            "has no field 'messages'"
            if messages is None
            else "'messages' is not a list with messages"
        )
        raise InputError(
            f"{where}: {wrong}; it has {shown}; give each row a list of objects with `role` and"
            " `content`"
        )
    found: dict[str, Any] = {
        "messages": [_message(one, number, where) for number, one in enumerate(messages, start=1)]
    }
    _refuse_unread(row, COLUMNS["chat"], where)

    tools = _decoded(row.get("tools"))
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise InputError(
                f"{where}: 'tools' is not a list of objects (JSON schemas of functions); correct it"
            )
        found["tools"] = tools
    settings = _decoded(row.get("chat_template_kwargs"))
    if settings:
        if not isinstance(settings, Mapping):
            raise InputError(
                f"{where}: 'chat_template_kwargs' is not an object with settings of the template;"
                " correct it"
            )
        found["chat_template_kwargs"] = {
            name: value for name, value in settings.items() if value is not None
        }
    return found


def _message(message: Any, number: int, where: str) -> dict[str, Any]:
    fields = (
        {name: value for name, value in message.items() if value is not None}
        if isinstance(message, Mapping)
        else {}
    )
    calls = bool(fields.get("tool_calls"))
    content = fields.get("content", "" if calls else None)
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


def _decoded(value: Any) -> Any:
    """Parse a string as JSON, as which Arrow stores columns of objects of different types."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _pair(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    first, last = ("prompt", "completion") if "prompt" in row else ("instruction", "output")
    texts = [row.get(first), row.get(last)]
    if not all(isinstance(text, str) for text in texts):
        shown = ", ".join(map(repr, row)) or "none"
        raise InputError(
            f"{where}: an instruction has the texts prompt and completion, or instruction and"
            f" output, and it has {shown}"
        )
    _refuse_unread(
        row, (first, last, *(("input",) if first == "instruction" else ()), *_BEFORE_PAIR), where
    )

    more = row.get("input")
    if more is not None and not isinstance(more, str):
        raise InputError(
            f"{where}: 'input' holds a {type(more).__name__} and not a string; correct it, or leave"
            " it out"
        )
    found: dict[str, Any] = {
        "prompt": f"{texts[0]}\n\n{more}" if more else str(texts[0]),
        "completion": str(texts[1]),
    }
    system = row.get("system")
    history = row.get("history")
    if system:
        if not isinstance(system, str):
            raise InputError(
                f"{where}: 'system' holds a {type(system).__name__} and not a string; correct it,"
                " or leave it out"
            )
        found["system"] = system
    if history:
        if not isinstance(history, list) or not all(_is_turn(turn) for turn in history):
            raise InputError(
                f"{where}: 'history' is not a list of pairs of texts, a prompt and its answer;"
                " correct it, or leave it out"
            )
        found["history"] = history
    return found


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, list | tuple)
        and len(turn) == 2
        and all(isinstance(text, str) for text in turn)
    )
