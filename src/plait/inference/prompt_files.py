"""JSONL files of prompts and answers. An interrupted command can continue its answers.

Note [Files of answers]
    answers.jsonl               Exists when all answers have been written to disk.
    answers.jsonl.partial       Finished answers, one per line. Locked by the writing command.
    answers.jsonl.partial.json  Options of this command and a hash of its prompts.

    A command that ends early keeps the partial files. The same command, with the same prompts and
    options, continues after the finished answers. Any other command is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from plait.errors import InputError, first_lone_surrogate, shorten
from plait.files import names_open_file, try_lock, write_atomically
from plait.inference.requests import Conversation, Generation, is_turn

KEYS = ("prompt", "token_ids", "messages")
"""Fields of which a line has exactly one: a text, a list of token ids, or a conversation.

A conversation may also have `tools` and `chat_template_kwargs`.
"""
ADDED = ("text", "finish_reason")
"""Fields of an answer, in addition to `token_ids`."""
_KINDS = {
    "prompt": "a string",
    "token_ids": "a list of token ids",
    "messages": "a list of objects with role and content",
}


@dataclass(frozen=True)
class PromptLine:
    """Prompt in one line of a JSONL file, with the other fields of the line."""

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

    # Only real ends of lines: `splitlines` would also split at separators inside texts.
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
            f"{where}: has the key {reserved[0]}, which --out uses for the answer; give it another"
            " name"
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
        fields = json.loads(row, object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)
    except _DuplicateField as name:
        raise InputError(f"{where}: has {name} twice; leave one of them out") from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply; a line is one JSON object") from None
    except ValueError as error:
        raise InputError(f"{where}: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: needs exactly one of {', '.join(KEYS)}")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinity, which Python's `json` reads and would copy to the answers."""
    raise ValueError(f"{name} is not a JSON number; write null")


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
    """Raised if a JSON object has two fields of the same name. The argument is the name."""


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateField(next(name for name in names if names.count(name) > 1))
    return fields


class AnswerFile:
    """Answers of one command. See Note [Files of answers].

    `answer_file` creates it.

    Args:
        path: Path of the complete file.
        lines: Lines of the prompts.
        command: Values of all options of the command that affect the answers, by option name. The
            prompts are added as a hash.

    Raises:
        InputError: The file cannot be written, or belongs to another command.
    """

    def __init__(self, path: Path, lines: Sequence[PromptLine], command: Mapping[str, Any]) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self._command_file = path.with_name(f"{path.name}.partial.json")
        self._lines = lines
        # In the form that it has after it was written and read again.
        self._command = {**json.loads(json.dumps(command)), "--prompts": _hash(lines)}
        self._file = self._open()
        self._end = 0
        self.done = 0
        """Number of finished lines."""
        try:
            self._continue()
        except BaseException:
            self._file.close()
            raise

    def add(self, generations: Sequence[Generation]) -> None:
        """Write the answers to the next prompts.

        Raises:
            InputError: The answers cannot be written.
        """
        lines = self._lines[self.done : self.done + len(generations)]
        rows = []
        for line, generation in zip(lines, generations, strict=True):
            rows.append(json.dumps(_row(line, generation), ensure_ascii=False) + "\n")

        with self._input_errors():
            remaining = memoryview("".join(rows).encode())
            size = len(remaining)
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        self._end += size
        self.done += len(generations)

    def finish(self) -> None:
        """Rename the file of finished answers to its final name.

        Raises:
            InputError: The file cannot be renamed, or another program has created a file of that
                name, which is not replaced.
        """
        with self._input_errors():
            # Some file systems report a full disk only here.
            os.fsync(self._file.fileno())
        if self.path.exists():
            raise InputError(
                f"--out {self.path}: another program has created it; the answers are in"
                f" {self.partial}, so rename that file"
            )
        with self._input_errors():
            self.partial.rename(self.path)
        self._remove(self._command_file)

    def leave(self) -> None:
        """Close the files, and remove them if they are empty. Finished answers are kept."""
        with suppress(OSError):
            self._file.truncate(self._end)
        if not self.done:
            self._remove(self.partial, self._command_file)

    def close(self) -> None:
        """Close the file, so that another command may write to it."""
        self._file.close()

    def _open(self) -> BinaryIO:
        try:
            # Without a buffer, nothing is written after an error or a signal.
            file = os.fdopen(
                os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666),
                "r+b",
                buffering=0,
            )
        except OSError as error:
            raise InputError(
                f"--out {self.path}: {error.strerror}; pass a file in a folder that can be"
                " written to"
            ) from None
        # The file may have been renamed between open and lock, so it is compared with its path.
        if not try_lock(file) or not names_open_file(self.partial, file):
            file.close()
            raise InputError(
                f"--out {self.path}: another command is writing it; wait until it ends, or pass"
                " another name"
            )
        if self.path.exists():
            with suppress(OSError):
                # Created just now, not by an earlier command.
                if not os.fstat(file.fileno()).st_size:
                    self.partial.unlink()
            file.close()
            raise InputError(f"--out {self.path}: exists; pass another name, or remove it first")
        return file

    def _continue(self) -> None:
        """Count the answers that an earlier run of the same command has finished.

        Raises:
            InputError: The answers belong to another command.
        """
        with self._input_errors():
            content = self._file.readall()  # type: ignore[attr-defined]
            # An incomplete last line is dropped.
            rows = content.split(b"\n")[:-1]
            if rows:
                self._check_command()
            else:
                text = json.dumps(self._command, indent=1, ensure_ascii=False) + "\n"
                write_atomically(self._command_file, text)

        for number, (row, line) in enumerate(zip(rows, self._lines, strict=False), 1):
            if not _is_answer(row, line):
                raise InputError(
                    f"{self.partial}, line {number}: is not an answer to {line.name}; remove the"
                    " file, or pass another --out"
                )
        self.done = len(rows)
        self._end = sum(len(row) + 1 for row in rows)
        with self._input_errors():
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def _check_command(self) -> None:
        """Raise InputError if the finished answers belong to another command."""
        remedy = f"pass another --out, or remove {self.partial}"
        try:
            earlier = json.loads(self._command_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            earlier = None
        if not isinstance(earlier, dict):
            raise InputError(
                f"--out {self.path}: {self.partial} has answers, but {self._command_file.name} does"
                f" not record the options of the command that wrote them; {remedy}"
            )
        for name in sorted(earlier.keys() | self._command.keys()):
            before = earlier.get(name)
            now = self._command.get(name)
            if before == now:
                continue
            difference = f"{name} was {_shortened(before)} and is {_shortened(now)}"
            if name == "--prompts":
                difference = "its --prompts differ"
            raise InputError(
                f"--out {self.path}: {self.partial} has finished answers of another command"
                f" ({difference}); {remedy}"
            )

    def _remove(self, *paths: Path) -> None:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    @contextmanager
    def _input_errors(self) -> Iterator[None]:
        """Raise errors of the file system as InputError."""
        try:
            yield
        except OSError as error:
            raise InputError(f"--out {self.path}: {error.strerror}") from None


@contextmanager
def answer_file(
    path: Path, lines: Sequence[PromptLine], command: Mapping[str, Any]
) -> Iterator[AnswerFile]:
    """Write the answers to `lines` inside the context. See Note [Files of answers].

    At the end of the context the file gets its final name. After an exception, the finished
    answers stay in the partial file.

    Args:
        path: Path of the complete file.
        lines: Lines of the prompts.
        command: See `AnswerFile`.

    Raises:
        InputError: The file exists or cannot be written, another command is writing it, or it has
            answers of another command.
    """
    answers = AnswerFile(path, lines, command)
    try:
        yield answers
        answers.finish()
    except BaseException:
        answers.leave()
        raise
    finally:
        answers.close()


def _row(line: PromptLine, generation: Generation) -> dict[str, Any]:
    row = _copied_fields(line)
    if generation.text is not None:
        row["text"] = generation.text
    row["token_ids"] = generation.token_ids
    row["finish_reason"] = generation.finish_reason
    return row


def _copied_fields(line: PromptLine) -> dict[str, Any]:
    """Return the fields of a prompt's line that are copied to the line of its answer."""
    return {key: value for key, value in line.fields.items() if key != "token_ids"}


def _is_answer(row: bytes, line: PromptLine) -> bool:
    try:
        answer = json.loads(row)
    except ValueError:
        return False
    if not isinstance(answer, dict) or not {"token_ids", "finish_reason"} <= answer.keys():
        return False
    fields = {key: value for key, value in answer.items() if key not in ("token_ids", *ADDED)}
    # Compared as text, because NaN is not equal to itself.
    return json.dumps(fields) == json.dumps(_copied_fields(line))


def _hash(lines: Sequence[PromptLine]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(json.dumps(line.fields).encode() + b"\n")
    return digest.hexdigest()


def _shortened(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value, ensure_ascii=False)
    return shorten(text, 100)
