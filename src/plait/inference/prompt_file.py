"""Prompts from a JSONL file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import InputError, half_of_a_character
from plait.inference.requests import Conversation, is_turn

KEYS = ("prompt", "token_ids", "messages")
"""Fields of a line, of which it has exactly one: a text, a list of token ids, or a conversation. A
conversation may have `tools` and `chat_template_kwargs` beside it."""
ADDED = ("text", "finish_reason")
"""What a line of the answers has besides, and `token_ids`."""


@dataclass(frozen=True)
class Line:
    """A line of the file."""

    prompt: Any
    fields: dict[str, Any]
    """All of it; what is not a prompt is passed on."""
    name: str
    """For messages: the file and the number of the line."""


def read_prompts(path: Path) -> list[Line]:
    """Raises InputError, naming the line, for what is no prompt."""
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise InputError(
            f"--prompts {path}: {error.strerror}; name a readable JSONL file"
        ) from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start].split(b"\n")
        byte = error.object[error.start]
        where = f"--prompts {path}, line {len(before)}: byte {len(before[-1]) + 1}"
        raise InputError(
            f"{where} is {byte:#04x}, which is no UTF-8; save the file as UTF-8"
        ) from None
    found = [
        _line(row, f"--prompts {path}, line {number}")
        for number, row in enumerate(text.split("\n"), 1)
        if row.strip()
    ]
    if not found:
        raise InputError(
            f'--prompts {path}: has no line; write one JSON object a line, such as {{"prompt":'
            ' "Once"}'
        )
    return found


def _line(row: str, where: str) -> Line:
    try:
        fields = json.loads(row, object_pairs_hook=_without_doubles)
    except _Double as double:
        raise InputError(f"{where}: has {double} twice; leave one of them out") from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply; a line is one JSON object") from None
    except ValueError as error:
        raise InputError(f"{where}: is not JSON: {error}") from None
    if not isinstance(fields, dict) or len(given := [key for key in KEYS if key in fields]) != 1:
        raise InputError(f"{where}: needs exactly one of {', '.join(KEYS)}")
    if taken := [key for key in ADDED if key in fields]:
        raise InputError(
            f"{where}: has {taken[0]}, which the answer's would replace in --out; give it another"
            " name"
        )
    prompt = fields[given[0]]
    key = given[0]
    right = {
        "prompt": isinstance(prompt, str),
        "token_ids": (
            isinstance(prompt, list)
            and bool(prompt)
            and all(type(token) is int and token >= 0 for token in prompt)
        ),
        "messages": isinstance(prompt, list) and bool(prompt) and all(map(is_turn, prompt)),
    }[key]
    if not right:
        kind = {
            "prompt": "a text",
            "token_ids": "a list of token ids",
            "messages": "a list of objects with role and content",
        }[key]
        raise InputError(f"{where}: {key} must be {kind}, not {json.dumps(prompt)[:60]}")
    if (half := half_of_a_character(json.dumps(fields, ensure_ascii=False))) is not None:
        raise InputError(
            f"{where}: holds {half}, half of a character (a lone surrogate); correct the line"
        )
    if key == "messages":
        prompt = _with_template(prompt, fields, where)
    return Line(prompt, fields, where)


def _with_template(messages: Any, fields: dict[str, Any], where: str) -> Any:
    """Return a conversation with the tools and the settings that its line gives to the chat
    template.
    """
    tools = fields.get("tools") or []
    settings = fields.get("chat_template_kwargs") or {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: tools must be a list of objects (JSON schemas of functions)")
    if not isinstance(settings, dict):
        raise InputError(
            f"{where}: chat_template_kwargs must be an object with settings of the template"
        )
    return Conversation(messages, tools, settings) if tools or settings else messages


class _Double(Exception):
    """A name that an object of JSON has twice."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Double(next(name for name in names if names.count(name) > 1))
    return found
