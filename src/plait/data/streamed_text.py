"""Text that is read as it is needed: a streaming data set of the `datasets` library. Nothing of it
is kept, and its length is not known.

The library says where a reader stands, and goes on from there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.schema.sections import DataSection
from plait.data.cache import digest
from plait.data.text import load_dataset, text_of
from plait.errors import InputError, first_line

_NAMED = 16
"""Documents at the beginning that name the text."""


@dataclass(frozen=True)
class StreamedText:
    """The documents of a run, in the order in which the library reads them."""

    section: DataSection

    @property
    def description(self) -> str:
        """For a person."""
        return (
            f"the data set {Path(self.section.paths[0]).name}, split {self.section.split}, as it is"
            " read"
        )

    @property
    def place(self) -> str:
        """For messages: the setting that names the text, and its value."""
        return f"data.paths = {json.dumps(self.section.paths)}"

    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        """From the beginning, or from where `Reader.state` was."""
        return Reader(load_dataset(self.section, streaming=True), self.section, state)

    def fingerprint(self) -> str:
        """A digest of the first documents, and of what of each row is read."""
        reader = self.read()
        first = [text for text, _ in zip(reader, range(_NAMED), strict=False)]
        if not first:
            raise InputError(f"{self.place}: holds no rows; name more text")
        return digest([self.section.format, self.section.field, self.section.split, *first])


class Reader:
    """Documents of one pass over a data set. Iterating raises InputError, naming the row, for one
    that cannot be read.
    """

    def __init__(self, data: Any, section: DataSection, state: Mapping[str, Any] | None) -> None:
        self._data = data
        self._section = section
        self._row = 0
        if state is not None:
            data.load_state_dict(copy.deepcopy(state["rows"]))
            self._row = state["row"]
        self._rows: Iterator[Mapping[str, Any]] = iter(data)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        where = f"{self._section.paths[0]}, row {self._row}"
        try:
            row = next(self._rows)
        except StopIteration:
            raise
        except Exception as error:  # whatever the library's readers and the network raise
            raise InputError(
                f"{where}: cannot be read ({type(error).__name__}: {first_line(error)}); run the"
                " command again"
            ) from error
        self._row += 1
        return text_of(row, self._section, where)

    def state(self) -> dict[str, Any]:
        """Where the next document is: plain data."""
        return {"rows": copy.deepcopy(self._data.state_dict()), "row": self._row}
