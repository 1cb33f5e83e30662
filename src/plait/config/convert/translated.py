"""Translation of another program's keys to a tree of settings, with a row per key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.config.dialects.deepspeed import Key, as_flag, requests_nothing, type_problem
from plait.config.schema.config import KeyReport, Status
from plait.config.source import Document
from plait.errors import ConfigError, Problem

Settings = dict[str, tuple[str, Any]]
"""Settings by path: the key or flag that sets it, and the value."""

_FLAG_TEXTS = {
    "yes": True,
    "y": True,
    "t": True,
    "on": True,
    "no": False,
    "n": False,
    "f": False,
    "off": False,
}
"""Texts that Accelerate and the Trainer read as booleans, in addition to those of DeepSpeed."""


@dataclass(frozen=True)
class TranslatedDocument(Document):
    """Configuration of another program, translated to a tree of Plait's settings."""

    program: str = ""
    """Name of the program for messages, such as "Accelerate"."""
    noun: str = "file"
    """Container of the keys: "file", or "flag" for a command line."""
    rows: tuple[KeyReport, ...] = ()
    problems: tuple[Problem, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    """Key that sets each path of the tree."""
    defaults: tuple[str, ...] = ()
    """Paths that no key sets. They have the program's default, which differs from Plait's."""


@dataclass(frozen=True)
class ForeignKey(Key):
    """Key of another program. `why` is a note on its translation."""

    sets: Callable[[Any], Mapping[str, Any]] | None = None
    """Function from the key's value to settings by path. Raises ValueError with `rule; remedy`."""


@dataclass
class Translation:
    """Settings, report rows and problems of the keys that have been translated so far."""

    rows: list[KeyReport] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)

    def finish(
        self,
        name: str,
        program: str,
        defaults: Mapping[str, Any],
        *,
        base: Mapping[str, Any] | None = None,
        noun: str = "file",
    ) -> TranslatedDocument:
        """Return the translated document.

        Args:
            name: Name of the document for messages.
            program: Name of the other program.
            defaults: Values by path, for settings that no key sets.
            base: Settings of a file that the document includes.
            noun: Container of the keys, see `TranslatedDocument`.
        """
        tree = copy.deepcopy(dict(base or {}))
        # A key that contradicts the included file is a problem; neither of them wins.
        for path, (key, value) in self.settings.items():
            rule = set_path(tree, path, value)
            if rule is not None:
                self.problems.append(Problem(key, value, rule, "keep one of them"))

        used_defaults = []
        for path, value in defaults.items():
            # The included file takes precedence over a default.
            if path not in self.settings and set_path(tree, path, value) is None:
                used_defaults.append(path)
        return TranslatedDocument(
            name,
            tree,
            program,
            noun,
            tuple(self.rows),
            tuple(self.problems),
            {path: key for path, (key, _) in self.settings.items()},
            tuple(used_defaults),
        )

    def ignore(self, key: str, value: Any, why: str) -> None:
        """Add a row for a key that has no effect."""
        self.rows.append(KeyReport(key, value, Status.IGNORED, why))

    def refuse(self, key: str, value: Any, rule: str, remedy: str) -> None:
        """Add a row and a problem for a key that cannot be translated."""
        self.rows.append(KeyReport(key, value, Status.REFUSED, rule))
        self.problems.append(Problem(key, value, rule, remedy))

    def set(self, path: str, key: str, value: Any) -> None:
        """Set a path to a value. Add a problem if another key has set a different value."""
        other_key, other_value = self.settings.setdefault(path, (key, value))
        if other_value != value:
            self.problems.append(
                Problem(
                    key,
                    value,
                    f"{other_key} says {other_value!r}; both set {path} and disagree",
                    "keep one of them",
                )
            )

    def translate_key(self, shown: str, key: ForeignKey, value: Any) -> None:
        """Translate a key.

        Args:
            shown: Path of the key in the document.
            key: Table entry of the key.
            value: Value of the key. If the key is a flag, strings such as "true" are parsed.
        """
        if value is None:
            self.rows.append(KeyReport(shown, value, Status.COMMENT, "null: not given"))
            return
        if key.kind == "flag":
            value = parse_flag(value)
        problem = type_problem(key, value)
        if problem is not None:
            self.refuse(shown, value, *problem)
            return

        if key.status is Status.REFUSED and not requests_nothing(key, value):
            self.refuse(shown, value, key.why, key.remedy)
        elif key.status is Status.REFUSED and key.sets is None:
            self.rows.append(
                KeyReport(
                    shown,
                    value,
                    Status.IGNORED,
                    f"this value requests nothing; other values are refused: {key.why}",
                )
            )
        elif key.sets is None:
            self.rows.append(KeyReport(shown, value, Status.IGNORED, key.why))
        else:
            self._apply(shown, key.sets, value, key.why)

    def _apply(
        self, shown: str, sets: Callable[[Any], Mapping[str, Any]], value: Any, why: str
    ) -> None:
        """Set the settings that are equivalent to a key, or refuse the key's value."""
        try:
            settings = sets(value)
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            self.refuse(shown, value, rule, remedy)
            return

        for path, setting in settings.items():
            self.set(path, shown, setting)
        note = f" ({why})" if why else ""
        if not settings:
            self.rows.append(
                KeyReport(shown, value, Status.IGNORED, f"this value sets nothing{note}")
            )
            return
        meaning = " and ".join(settings) + note
        self.rows.append(KeyReport(shown, value, Status.RENAMED, meaning, next(iter(settings))))


def problems_in(key: str, error: ConfigError) -> list[Problem]:
    """Return the problems of an included file, under the key that names the file."""
    return [
        Problem(f"{key}: {problem.field}", problem.value, problem.rule, problem.remedy)
        for problem in error.problems
    ]


def parse_flag(value: Any) -> Any:
    """Return a string such as "true" as a boolean. Other values are returned unchanged."""
    if isinstance(value, str):
        value = _FLAG_TEXTS.get(value.lower(), value)
    flag = as_flag(value)
    return value if flag is None else flag


def set_path(tree: dict[str, Any], path: str, value: Any) -> str | None:
    """Set a dotted path in a tree, unless the path has a different value already.

    Returns:
        The rule that `value` violates, or None if the path was set.
    """
    *parents, last = path.split(".")
    section: Any = tree
    for name in parents:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            return f"sets {path}, and the file that this one names has {name} = {section!r}"
    present = section.setdefault(last, value)
    if present == value:
        return None
    return f"sets {path}, and the file that this one names has {present!r}"
