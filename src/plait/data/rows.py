"""Rows of conversations and instructions: what a row must have, and the row as one text, so that it can be named and held out as any other.

The text of a row is the JSON of its messages, or of its two texts: `{"messages": [...]}` or `{"prompt": ..., "completion": ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plait.errors import InputError, half_of_a_character

COLUMNS = {"chat": ("messages",), "instruct": ("prompt", "completion", "instruction", "input", "output")}
"""The columns that a format reads, where a row has them."""


def row_text(row: Mapping[str, Any], form: str, *, where: str) -> str:
    """The row as JSON with sorted keys. Raises InputError, naming `where`, for one that lacks what the format needs."""
    found = _conversation(row, where) if form == "chat" else _pair(row, where)
    if (half := half_of_a_character(json.dumps(found, ensure_ascii=False, default=str))) is not None:
        raise InputError(f"{where}: holds {half}, half of a character (a lone surrogate); correct it, or leave it out")
    return json.dumps(found, sort_keys=True)


def _conversation(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        shown = ", ".join(map(repr, row)) or "none"
        found = "has no field 'messages'" if messages is None else "'messages' is not a list with messages"
        raise InputError(f"{where}: {found}; it has {shown}; give each row a list of objects with `role` and `content`")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise InputError(f"{where}: message {number} is not an object with the texts `role` and `content`; correct it")
    return {"messages": [dict(message) for message in messages]}


def _pair(row: Mapping[str, Any], where: str) -> dict[str, str]:
    first, last = ("prompt", "completion") if "prompt" in row else ("instruction", "output")
    texts = [row.get(first), row.get(last)]
    if not all(isinstance(text, str) for text in texts):
        shown = ", ".join(map(repr, row)) or "none"
        raise InputError(f"{where}: an instruction has the texts prompt and completion, or instruction and output, and it has {shown}")
    more = row.get("input") if first == "instruction" else None
    if more is not None and not isinstance(more, str):
        raise InputError(f"{where}: 'input' holds a {type(more).__name__} and not a string; correct it, or leave it out")
    return {"prompt": f"{texts[0]}\n\n{more}" if more else str(texts[0]), "completion": str(texts[1])}
