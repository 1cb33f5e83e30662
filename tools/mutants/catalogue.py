"""The list of planted defects, `defects/*.yaml`: each replaces a piece of one source file that occurs there exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "defects"


@dataclass(frozen=True)
class Mutant:
    """One planted defect."""

    id: str
    what: str
    """What goes wrong for a user, in one line."""
    file: str
    """Relative to the root of the project."""
    old: str
    new: str
    author: str
    """The list that it comes from: `known` holds defects that Plait once had, `fresh` was written without knowing the tests."""

    def applied(self, text: str) -> str:
        """`text` of the file with the defect in it. Raises ValueError where `old` does not occur exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"mutant {self.id}: the old text occurs {found} times in {self.file}, not once"
            )
        return text.replace(self.old, self.new)

    def line(self, text: str) -> int:
        """The first line, from 1, that the defect changes."""
        before = text.index(self.old)
        shared = next(
            (i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b),
            min(len(self.old), len(self.new)),
        )
        return text.count("\n", 0, before + shared) + 1


def load(folder: Path = LISTS) -> list[Mutant]:
    """All mutants, ordered by list and place. Raises ValueError for one that is not well-formed or two of one id."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            if set(entry) != {"id", "what", "file", "old", "new"}:
                raise ValueError(
                    f"{path}: {entry.get('id')}: id, what, file, old and new are needed, and nothing else"
                )
            values = {
                key: str(value).strip("\n") if key in ("old", "new") else str(value)
                for key, value in entry.items()
            }
            mutants.append(Mutant(**values, author=path.stem))
    ids = [mutant.id for mutant in mutants]
    twice = sorted({id for id in ids if ids.count(id) > 1})
    if twice:
        raise ValueError(f"ids used twice: {', '.join(twice)}")
    return mutants
