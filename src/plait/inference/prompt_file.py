"""Prompts in a JSONL file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import InputError, first_lone_surrogate
from plait.inference.requests import Conversation, is_turn

KEYS = ("prompt", "token_ids", "messages")
"""Fields of a line, of which it has exactly one: a text, a list of token ids, or a conversation.

A conversation may also have `tools` and `chat_template_kwargs`.
"""
ADDED = ("text", "finish_reason")
"""Fields that a line of the answers has in addition, besides `token_ids`."""
_KINDS = {
    "prompt": "a text",
    "token_ids": "a list of token ids",
    "messages": "a list of objects with role and content",
}


@dataclass(frozen=True)
class PromptLine:
    """Line of the file."""

    prompt: Any
    fields: dict[str, Any]
    """All fields. The answer repeats those that are not the prompt."""
    name: str
    """File and number of the line, for messages."""


def read_prompts(path: Path) -> list[PromptLine]:
    """Read a file of prompts. Empty lines are skipped.

    Raises:
        InputError: The file cannot be read, or a line is not a prompt.
    """
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
            f"{where} is {byte:#04x}, which is not UTF-8; save the file as UTF-8"
        ) from None

    # Only real ends of lines: `splitlines` would also split at separators inside of texts.
    lines = []
    for number, row in enumerate(text.split("\n"), 1):
        if row.strip():
            lines.append(_parse_line(row, f"--prompts {path}, line {number}"))
    if not lines:
        raise InputError(
            f'--prompts {path}: has no lines; write one JSON object per line, such as {{"prompt":'
            ' "Once"}'
        )
    return lines


def _parse_line(row: str, where: str) -> PromptLine:
    fields = _parse_object(row, where)
    keys = [key for key in KEYS if key in fields]
    if len(keys) != 1:
        raise InputError(f"{where}: needs exactly one of {', '.join(KEYS)}")
    reserved = [key for key in ADDED if key in fields]
    if reserved:
        raise InputError(
            f"{where}: has {reserved[0]}, which the answer's would replace in --out; give it"
            " another name"
        )
    key = keys[0]
    prompt = fields[key]
    if not _is_prompt(key, prompt):
        raise InputError(f"{where}: {key} must be {_KINDS[key]}, not {json.dumps(prompt)[:60]}")
    if (half := first_lone_surrogate(json.dumps(fields, ensure_ascii=False))) is not None:
        raise InputError(
            f"{where}: holds {half}, half of a character (a lone surrogate); correct the line"
        )
    if key == "messages":
        prompt = _with_template_arguments(prompt, fields, where)
    return PromptLine(prompt, fields, where)


def _parse_object(row: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(row, object_pairs_hook=_unique_fields)
    except _DuplicateField as name:
        raise InputError(f"{where}: has {name} twice; leave one of them out") from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply; a line is one JSON object") from None
    except ValueError as error:
        raise InputError(f"{where}: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: needs exactly one of {', '.join(KEYS)}")
    return fields


def _is_prompt(key: str, prompt: Any) -> bool:
    if key == "prompt":
        return isinstance(prompt, str)
    if not isinstance(prompt, list) or not prompt:
        return False
    if key == "token_ids":
        return all(type(token) is int and token >= 0 for token in prompt)
    return all(map(is_turn, prompt))


def _with_template_arguments(messages: Any, fields: dict[str, Any], where: str) -> Any:
    """Return a conversation with its tools and the settings of its chat template."""
    tools = fields.get("tools") or []
    settings = fields.get("chat_template_kwargs") or {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: tools must be a list of objects (JSON schemas of functions)")
    if not isinstance(settings, dict):
        raise InputError(
            f"{where}: chat_template_kwargs must be an object with settings of the template"
        )
    if not tools and not settings:
        return messages
    return Conversation(messages, tools, settings)


class _DuplicateField(Exception):
    """Name that a JSON object has twice."""


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateField(next(name for name in names if names.count(name) > 1))
    return fields
