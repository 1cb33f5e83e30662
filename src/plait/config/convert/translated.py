"""What a file or a command line of another program becomes: a tree of the schema's keys, with a row
for each key of theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.config.dialects.deepspeed import Key
from plait.config.dialects.table_values import as_flag, asks_for_nothing, type_problem
from plait.config.reading.source import Document
from plait.config.schema.provenance import Row, Status
from plait.errors import ConfigError, Problem

Said = dict[str, tuple[str, Any]]
"""Path in the tree -> (the key or flag that says so, value)."""

_WORDS = {
    "yes": True,
    "y": True,
    "t": True,
    "on": True,
    "no": False,
    "n": False,
    "f": False,
    "off": False,
}
"""Truth values of Accelerate and the Trainer, besides those of DeepSpeed."""


@dataclass(frozen=True)
class Translated(Document):
    """Keys of another program, as the tree that they set."""

    program: str = ""
    """For a person: "Accelerate"."""
    noun: str = "file"
    """What its keys stand in: "file", or "flag" for a command line."""
    rows: tuple[Row, ...] = ()
    problems: tuple[Problem, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    """Path in the tree -> the key."""
    defaults: frozenset[str] = frozenset()
    """Paths that no key set: the program's own defaults, where Plait's are others."""


@dataclass(frozen=True)
class ForeignKey(Key):
    """One key of another program; `why` is its note."""

    sets: Callable[[Any], Mapping[str, Any]] | None = None
    """Value -> what it sets, by path. Raises ValueError with `rule; remedy`."""


@dataclass
class Reading:
    """The keys that were read so far."""

    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    said: Said = field(default_factory=dict)

    def translated(
        self,
        name: str,
        program: str,
        defaults: Mapping[str, Any],
        base: Mapping[str, Any] | None = None,
    ) -> Translated:
        """What was read from the file `name`.

        defaults: by path, for what no key says. base: the tree of another file, which is part of
        it.
        """
        tree = copy.deepcopy(dict(base or {}))
        for path, (shown, value) in self.said.items():
            problem = put(tree, path, value)
            if problem is not None:
                self.problems.append(Problem(shown, value, problem, "keep one of them"))
        left = [
            path
            for path in defaults
            if path not in self.said and put(tree, path, defaults[path]) is None
        ]
        written = {path: shown for path, (shown, _) in self.said.items()}
        return Translated(
            name,
            tree,
            program,
            "file",
            tuple(self.rows),
            tuple(self.problems),
            written,
            frozenset(left),
        )

    def ignore(self, shown: str, value: Any, why: str) -> None:
        """A key that sets nothing."""
        self.rows.append(Row(shown, value, Status.IGNORED, why))

    def refuse(self, shown: str, value: Any, rule: str, remedy: str) -> None:
        """A key that cannot be taken over."""
        self.rows.append(Row(shown, value, Status.REFUSED, rule))
        self.problems.append(Problem(shown, value, rule, remedy))

    def say(self, path: str, shown: str, value: Any) -> None:
        """`shown` sets `path`. Two keys that disagree are a problem."""
        before = self.said.setdefault(path, (shown, value))
        if before[1] != value:
            rule = f"{before[0]} says {before[1]!r}; both set {path} and disagree"
            self.problems.append(Problem(shown, value, rule, "keep one of them"))

    def take(self, shown: str, key: ForeignKey, value: Any) -> Any:
        """Look at one key. Returns its value, a text that stands for a truth value as one; None
        where it is null or of the wrong type.
        """
        if value is None:
            self.rows.append(Row(shown, value, Status.COMMENT, "null: not given"))
            return None
        value = truth(value) if key.kind == "flag" else value
        wrong = type_problem(key, value)
        if wrong is not None:
            self.refuse(shown, value, *wrong)
            return None
        if key.status is Status.REFUSED and not asks_for_nothing(key, value):
            self.refuse(shown, value, key.why, key.remedy)
        elif key.sets is None:
            asked = (
                "this value asks for nothing; another would be refused: "
                if key.status is Status.REFUSED
                else ""
            )
            self.rows.append(Row(shown, value, Status.IGNORED, asked + key.why))
        else:
            self._set(shown, key, value)
        return value

    def _set(self, shown: str, key: ForeignKey, value: Any) -> None:
        assert key.sets is not None
        try:
            found = key.sets(value)
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            self.refuse(shown, value, rule, remedy)
            return
        for path, setting in found.items():
            self.say(path, shown, setting)
        note = f" ({key.why})" if key.why else ""
        if found:
            self.rows.append(
                Row(shown, value, Status.RENAMED, " and ".join(found) + note, next(iter(found)))
            )
        else:
            self.rows.append(Row(shown, value, Status.IGNORED, f"this value sets nothing{note}"))


def inside(shown: str, error: ConfigError) -> list[Problem]:
    """The problems of a file that the key `shown` names."""
    return [
        Problem(f"{shown}: {problem.field}", problem.value, problem.rule, problem.remedy)
        for problem in error.problems
    ]


def truth(value: Any) -> Any:
    """The truth value that a text stands for, else the value."""
    if isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    return value if as_flag(value) is None else as_flag(value)


def put(tree: dict[str, Any], path: str, value: Any) -> str | None:
    """Set a dotted path in `tree`, unless something else stands there: then the rule that this
    breaks.
    """
    *parents, last = path.split(".")
    here: Any = tree
    for name in parents:
        here = here.setdefault(name, {})
        if not isinstance(here, dict):
            return f"sets {path}, and the file that is named beside it has {name} = {here!r}"
    before = here.setdefault(last, value)
    return (
        None
        if before == value
        else f"sets {path}, and the file that is named beside it says {before!r}"
    )
