"""The answers to a file of prompts: finished ones are kept where a command ends early, and the same
command goes on after them.

answers.jsonl                    has its name when all are in it, and on the disk
answers.jsonl.partial            those that are finished, one a line
answers.jsonl.partial.json       of which command they are
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from plait.errors import InputError
from plait.files import is_at, is_only_writer, write_whole
from plait.inference.prompt_file import ADDED, Line
from plait.inference.requests import Generation


class AnswerFile:
    """Of one command. `answer_file` makes it."""

    def __init__(self, path: Path, lines: Sequence[Line], command: Mapping[str, Any]) -> None:
        """`command`: what tokens follow from besides the prompts, by the names that its user
        knows.
        """
        self.path, self.partial, self._lines = path, path.with_name(f"{path.name}.partial"), lines
        self._command = {**json.loads(json.dumps(command)), "--prompts": _hash_of(lines)}
        self._described = path.with_name(f"{path.name}.partial.json")
        self._file = self._opened()
        self._end = 0
        self.done = 0
        """Lines that are finished."""
        try:
            self._go_on()
        except BaseException:
            self._file.close()
            raise

    def add(self, made: Sequence[Generation]) -> None:
        """The answers to the next lines. Raises InputError where they cannot be written."""
        some = self._lines[self.done : self.done + len(made)]
        rows = [
            json.dumps(_row(line, one), ensure_ascii=False) + "\n"
            for line, one in zip(some, made, strict=True)
        ]
        with self._told():
            left = memoryview("".join(rows).encode())
            size = len(left)
            while left:
                left = left[self._file.write(left) :]
        self._end += size
        self.done += len(made)

    def finish(self) -> None:
        """Give the file its name. Raises InputError where it cannot get it, and where another
        program has made a file of that name meanwhile: that is left as it is.
        """
        with self._told():
            os.fsync(self._file.fileno())  # some disks are full only here
        if self.path.exists():
            raise InputError(
                f"--out {self.path}: another program has made it meanwhile; the answers are in"
                f" {self.partial}: rename that file"
            )
        with self._told():
            self.partial.rename(self.path)
        self._remove(self._described)

    def leave(self) -> None:
        """Keep what is finished, and nothing else."""
        with suppress(OSError):
            self._file.truncate(self._end)
        if not self.done:
            self._remove(self.partial, self._described)

    def close(self) -> None:
        """Another command may write it from now on."""
        self._file.close()

    def _opened(self) -> BinaryIO:
        """Without a buffer: of an error or a signal, nothing is written later."""
        try:
            file = os.fdopen(
                os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666),
                "r+b",
                buffering=0,
            )
        except OSError as error:
            raise InputError(
                f"--out {self.path}: {error.strerror}; give a file in a folder that can be"
                " written to"
            ) from None
        if not is_only_writer(file) or not is_at(self.partial, file):
            file.close()
            raise InputError(
                f"--out {self.path}: another command writes it now; wait for its end, or give"
                " another name"
            )
        if self.path.exists():
            with suppress(OSError):
                if not os.fstat(file.fileno()).st_size:
                    self.partial.unlink()
            file.close()
            raise InputError(f"--out {self.path}: exists; give another name, or remove it first")
        return file

    def _go_on(self) -> None:
        """Find what a command before has finished. Raises InputError for what another one has."""
        with self._told():
            kept = self._file.readall()  # type: ignore[attr-defined]
            # what is behind the last end of a line was not written to its end
            rows = kept.split(b"\n")[:-1]
            if rows:
                self._refuse_others()
            else:
                write_whole(
                    self._described, json.dumps(self._command, indent=1, ensure_ascii=False) + "\n"
                )
        for number, (row, line) in enumerate(zip(rows, self._lines, strict=False), 1):
            if not _is_answer(row, line):
                raise InputError(
                    f"{self.partial}, line {number}: is no answer to {line.name}; remove the file,"
                    " or give another --out"
                )
        self.done, self._end = len(rows), sum(len(row) + 1 for row in rows)
        with self._told():
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def _refuse_others(self) -> None:
        remedy = f"give another --out, or remove {self.partial}"
        try:
            was = json.loads(self._described.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            was = None
        if not isinstance(was, dict):
            raise InputError(
                f"--out {self.path}: {self.partial} has answers, and {self._described.name} does"
                f" not say of what; {remedy}"
            )
        for name in sorted(was.keys() | self._command.keys()):
            before = was.get(name)
            now = self._command.get(name)
            if before != now:
                said = (
                    f"{name} was {_shown(before)} and is {_shown(now)}"
                    if name != "--prompts"
                    else "its --prompts are others"
                )
                raise InputError(
                    f"--out {self.path}: {self.partial} has finished answers of another command"
                    f" ({said}); {remedy}"
                )

    def _remove(self, *paths: Path) -> None:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"--out {self.path}: {error.strerror}") from None


@contextmanager
def answer_file(
    path: Path, lines: Sequence[Line], command: Mapping[str, Any]
) -> Iterator[AnswerFile]:
    """The file that the answers to `lines` go to; it has its name at the end. Raises InputError
    where it cannot be, where another command writes it, and where there are answers of another one.
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


def _row(line: Line, one: Generation) -> dict[str, Any]:
    text = {} if one.text is None else {"text": one.text}
    return {
        **_passed_on(line),
        **text,
        "token_ids": one.token_ids,
        "finish_reason": one.finish_reason,
    }


def _passed_on(line: Line) -> dict[str, Any]:
    return {key: value for key, value in line.fields.items() if key != "token_ids"}


def _is_answer(row: bytes, line: Line) -> bool:
    try:
        found = json.loads(row)
    except ValueError:
        return False
    if not isinstance(found, dict) or not {"token_ids", "finish_reason"} <= found.keys():
        return False
    rest = {key: value for key, value in found.items() if key not in ("token_ids", *ADDED)}
    return json.dumps(rest) == json.dumps(_passed_on(line))  # as text: NaN is not equal to itself


def _hash_of(lines: Sequence[Line]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(json.dumps(line.fields).encode() + b"\n")
    return digest.hexdigest()


def _shown(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
