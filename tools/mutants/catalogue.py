"""The planted defects, `defects/*.yaml`. Each replaces text that occurs once in a source file."""

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.mutants.project import ROOT

LISTS = Path(__file__).parent / "defects"


@dataclass(frozen=True)
class Mutant:
    """A planted defect."""

    id: str
    what: str
    """Effect on a user, in one line."""
    file: str
    """Relative to the root of the project."""
    old: str
    new: str
    author: str
    """Name of the list, without its suffix. `known` has defects that Plait once had. `fresh` was
    written without knowledge of the tests."""

    def applied(self) -> str:
        """Return the text of the file with the defect.

        Raises:
            ValueError: The old text does not occur exactly once.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"mutant {self.id}: the old text occurs {count} times in {self.file}, not once"
            )
        return text.replace(self.old, self.new)

    def line(self, text: str) -> int:
        """Return the number of the first line of `text` that the defect changes."""
        line = text.count("\n", 0, text.index(self.old)) + 1
        for old, new in zip(self.old, self.new, strict=False):
            if old != new:
                break
            line += old == "\n"
        return line


def load(folder: Path = LISTS) -> list[Mutant]:
    """Return all mutants, ordered by list and place.

    Raises:
        ValueError: An entry is not well-formed, or two have the same id.
    """
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            if set(entry) != {"id", "what", "file", "old", "new"}:
                raise ValueError(
                    f"{path}: {entry.get('id')}: the keys must be id, what, file, old and new"
                )
            # A block of YAML ends in a newline.
            values = {key: str(value).strip("\n") for key, value in entry.items()}
            mutants.append(Mutant(**values, author=path.stem))
    counts = Counter(mutant.id for mutant in mutants)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"ids used twice: {', '.join(repeated)}")
    return mutants


def check(mutants: list[Mutant]) -> None:
    """Check that every mutant applies to the sources and changes them.

    Raises:
        ValueError: A mutant does not apply, or changes nothing.
    """
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        if ast.dump(ast.parse(mutant.applied())) == ast.dump(ast.parse(text)):
            raise ValueError(f"mutant {mutant.id} changes nothing")
