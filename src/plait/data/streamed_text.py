"""Text that is read during training: a streaming data set of the `datasets` library.

Its length is unknown and nothing is cached. The library returns the position of a reader as a
state, and can continue from it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from plait.config.schema.sections import DataSection
from plait.data.cache import digest
from plait.data.text import document_of_row, load_dataset
from plait.errors import InputError, first_line

_FINGERPRINT_DOCUMENTS = 16
"""Number of documents at the beginning of the text that its fingerprint depends on."""


@dataclass(frozen=True)
class StreamedText:
    """Documents of a run, in the order in which the library reads them."""

    section: DataSection

    @property
    def description(self) -> str:
        """Short description of the text for the user."""
        return (
            f"the data set {Path(self.section.paths[0]).name}, split {self.section.split}, as it is"
            " read"
        )

    @property
    def place(self) -> str:
        """Setting that names the text, with its value, for messages."""
        return f"data.paths = {json.dumps(self.section.paths)}"

    def read(self, state: Mapping[str, Any] | None = None) -> StreamReader:
        """Return a reader that starts at the beginning, or at a state of `StreamReader.state`."""
        return StreamReader(load_dataset(self.section, streaming=True), self.section, state)

    def fingerprint(self) -> str:
        """Return a digest of the first documents and of the settings that select them.

        Raises:
            InputError: The text is empty or cannot be read.
        """
        documents = list(islice(self.read(), _FINGERPRINT_DOCUMENTS))
        if not documents:
            raise InputError(f"{self.place}: holds no rows; add more text")
        return digest([self.section.format, self.section.field, self.section.split, *documents])


class StreamReader:
    """Iterator over the documents of one pass over a data set.

    Raises:
        InputError: A row cannot be read. The message names the row.
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
        except Exception as error:
            # The library and the network raise errors of many classes.
            raise InputError(
                f"{where}: cannot be read ({type(error).__name__}: {first_line(error)}); run the"
                " command again"
            ) from error
        self._row += 1
        return document_of_row(row, self._section, where)

    def state(self) -> dict[str, Any]:
        """Return the position of the next document as plain data."""
        return {"rows": copy.deepcopy(self._data.state_dict()), "row": self._row}
