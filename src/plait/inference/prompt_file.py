"""Prompts from a JSONL file, and what the model adds to them in another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from plait.errors import InputError, half_of_a_character
from plait.files import is_at, is_only_writer
from plait.inference.requests import Generation, is_turn

KEYS = ("prompt", "token_ids", "messages")
"""One of them is in every line: a text, a list of token ids, or a conversation."""
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
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}; name a readable JSONL file") from None
    found = [_line(row, f"--prompts {path}, line {number}") for number, row in enumerate(text.split("\n"), 1) if row.strip()]
    if not found:
        raise InputError(f'--prompts {path}: has no line; write one JSON object a line, such as {{"prompt": "Once"}}')
    return found


def _line(row: str, where: str) -> Line:
    try:
        fields = json.loads(row)
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply; a line is one JSON object") from None
    except ValueError as error:
        raise InputError(f"{where}: is not JSON: {error}") from None
    if not isinstance(fields, dict) or len(given := [key for key in KEYS if key in fields]) != 1:
        raise InputError(f"{where}: needs exactly one of {', '.join(KEYS)}")
    if taken := [key for key in ADDED if key in fields]:
        raise InputError(f"{where}: has {taken[0]}, which the answer's would replace in --out; give it another name")
    prompt, key = fields[given[0]], given[0]
    right = {
        "prompt": isinstance(prompt, str),
        "token_ids": isinstance(prompt, list) and bool(prompt) and all(type(token) is int and token >= 0 for token in prompt),
        "messages": isinstance(prompt, list) and bool(prompt) and all(map(is_turn, prompt)),
    }[key]
    if not right:
        kind = {"prompt": "a text", "token_ids": "a list of token ids", "messages": "a list of objects with role and content"}[key]
        raise InputError(f"{where}: {key} must be {kind}, not {json.dumps(prompt)[:60]}")
    if (half := half_of_a_character(json.dumps(fields, ensure_ascii=False))) is not None:
        raise InputError(f"{where}: holds {half}, half of a character (a lone surrogate); correct the line")
    return Line(prompt, fields, where)


Write = Callable[[Sequence[Line], Sequence[Generation]], None]


@contextmanager
def results_file(path: Path) -> Iterator[Write]:
    """A function that adds lines; the file has its name when all are written, and on the disk. Raises InputError where it cannot be, where
    another command writes it, and where another program has made a file of that name meanwhile: that is left as it is."""
    temporary = path.with_name(f".{path.name}.tmp")
    file, is_done = _opened(temporary, path), False

    def add(lines: Sequence[Line], made: Sequence[Generation]) -> None:
        with _told_of(path):
            for line, one in zip(lines, made, strict=True):
                text = {} if one.text is None else {"text": one.text}
                row = {key: value for key, value in line.fields.items() if key != "token_ids"}
                row |= {**text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

    try:
        yield add
        with _told_of(path):
            os.fsync(file.fileno())  # some disks are full only here
        is_done = True
        if path.exists():
            raise InputError(f"--out {path}: another program has made it meanwhile; the answers are in {temporary}: rename that file")
        with _told_of(path):
            temporary.rename(path)
    except BaseException:
        if not is_done:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise
    finally:
        with suppress(OSError):  # of what could not be written before
            file.close()


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None


def _opened(temporary: Path, path: Path) -> TextIO:
    """The file under its first name, empty. What a command that was killed left there is overwritten."""
    try:
        file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}; give a file in a folder that can be written to") from None
    if not is_only_writer(file) or not is_at(temporary, file):
        file.close()
        raise InputError(f"--out {path}: another command writes it now; wait for its end, or give another name")
    if path.exists():
        temporary.unlink()
        file.close()
        raise InputError(f"--out {path}: exists; give another name, or remove it first")
    file.truncate(0)
    return file
