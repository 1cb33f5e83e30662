"""Sources of text: documents in a fixed order, and a fingerprint of their content.

The order depends only on the names of files, never on the order of the file system. A document that
cannot be read raises an error that names the document. None is skipped silently.
"""

from __future__ import annotations

import glob
import json
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.schema.sections import DataSection
from plait.data.cache import build_once, digest
from plait.data.conversations import COLUMNS, row_text
from plait.errors import InputError, first_lone_surrogate
from plait.files import user_path

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Text of a run: its documents, their fingerprint, and its name in messages."""

    description: str
    """Short description for the user: `the Python 3.11.7 standard library, 674 files`."""
    fingerprint: str
    """Digest that is equal if and only if the documents and their order are equal."""
    place: str
    """Setting that names the text, with its value, for messages."""
    documents: Callable[[], Iterator[str]]
    """Function that returns an iterator over all documents. Every call starts at the first one."""


def open_corpus(section: DataSection, *, cache: Path) -> Corpus:
    """Return the corpus that the `data` section names.

    Args:
        section: The `data` section of the configuration.
        cache: Folder for the fingerprints of files.

    Raises:
        InputError: The text is missing or empty.
    """
    if section.source == "python-stdlib":
        return _open_standard_library()
    if section.source == "datasets":
        return _open_dataset(section, cache)

    suffixes = (".jsonl",) if section.source == "jsonl" else (".txt", ".md")
    files = find_files(section.paths, suffixes=suffixes)
    number_of_files = "1 file" if len(files) == 1 else f"{len(files):,} files"
    place = f"data.paths = {json.dumps(section.paths)}"
    fingerprint = _cached_fingerprint(
        cache, [(str(file), file) for file in files], lambda: digest(_read_blocks(files))
    )
    if section.source == "files":
        return Corpus(
            description=f"{number_of_files} of text",
            fingerprint=fingerprint,
            place=place,
            documents=lambda: map(_read_text, files),
        )
    return Corpus(
        description=f"{number_of_files} of JSON lines",
        fingerprint=digest([fingerprint, section.field, section.format, *section.ignored_columns]),
        place=place,
        documents=lambda: _read_json_lines(files, section),
    )


def find_files(paths: tuple[str, ...], *, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that `paths` name, sorted and without duplicates.

    Args:
        paths: Files, globs and folders. A folder stands for all files below it with one of
            `suffixes`.
        suffixes: Endings of file names, with their dot.

    Raises:
        InputError: A path or glob matches no file.
    """
    files: set[Path] = set()
    for text in paths:
        path = user_path(text, "data.paths")
        if path.is_dir():
            candidates = [file for suffix in suffixes for file in path.rglob(f"*{suffix}")]
            rule = (
                f"has no file that ends in {' or '.join(suffixes)}; name the files with a glob such"
                f" as {path / '**' / '*.*'}"
            )
        else:
            candidates = [Path(name) for name in glob.glob(str(path), recursive=True)]
            rule = f"names no file (looked in {Path.cwd()}); correct data.paths"
        # Two paths or globs may name the same file.
        matches = [file.resolve() for file in candidates if file.is_file()]
        if not matches:
            raise InputError(f"data.paths: {text!r} {rule}")
        files.update(matches)
    return sorted(files)


def _read_blocks(files: list[Path]) -> Iterator[bytes | str]:
    for file in files:
        yield str(file.stat().st_size)
        with open(file, "rb") as stream:
            while block := stream.read(_READ_BYTES):
                yield block


def _cached_fingerprint(
    cache: Path, files: list[tuple[str, Path]], compute: Callable[[], str]
) -> str:
    """Return the fingerprint of files, cached by their names, sizes and modification times.

    Large corpora are therefore not reread at every start.
    """
    keys = []
    for name, file in files:
        stat = file.stat()
        keys.append(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}")

    def build(folder: Path) -> None:
        (folder / "name").write_text(compute())

    folder = build_once(cache, "fingerprints", digest(keys), build)
    return (folder / "name").read_text()


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}: the byte at offset {error.start} is not UTF-8; convert the file or leave it"
            " out of data.paths"
        ) from error
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read ({error.strerror}); correct data.paths"
        ) from error


def _read_json_lines(files: list[Path], section: DataSection) -> Iterator[str]:
    for file in files:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    where = f"{file}, line {number}"
                    yield document_of_row(_parse_row(line, where, section), section, where)


def _parse_row(line: bytes, where: str, section: DataSection) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except RecursionError:
        raise InputError(
            f"{where}: is nested too deeply; each line of a JSONL file is one JSON object"
        ) from None
    except ValueError as error:
        raise InputError(
            f"{where}: not valid JSON ({error}); each line of a JSONL file is one JSON object"
        ) from error
    if not isinstance(row, dict):
        content = f"the text in {section.field!r}"
        if section.format != "text":
            content = " or ".join(COLUMNS[section.format])
        raise InputError(
            f"{where}: is not a JSON object; each line of a JSONL file is an object with {content}"
        )
    return row


def document_of_row(row: Mapping[str, Any], section: DataSection, where: str) -> str:
    """Return the document of a row: its text, or the row in the form of `conversations.row_text`.

    Args:
        row: Row of a JSONL file or of a streaming data set.
        section: The `data` section of the configuration.
        where: Name of the row in messages.

    Raises:
        InputError: The row lacks a column that the format needs.
    """
    if section.format != "text":
        return row_text(row, section.format, where=where, ignored=section.ignored_columns)
    field = section.field
    if field not in row:
        raise InputError(
            f"{where}: has no field {field!r}; it has {', '.join(map(repr, row)) or 'none'}; set"
            " data.field"
        )
    if not isinstance(row[field], str):
        raise InputError(
            f"{where}: {field!r} holds a {type(row[field]).__name__} and not a string; set"
            " data.field to the field with the text"
        )
    surrogate = first_lone_surrogate(row[field])
    if surrogate is not None:
        raise InputError(
            f"{where}: {field!r} holds {surrogate}, half of a character (a lone surrogate); correct"
            " the line, or leave it out"
        )
    return row[field]


def _open_standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    # Some systems ship these folders in separate packages. Without them the text depends on the
    # version of Python only.
    excluded = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
    names = sorted(
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if not excluded & set(file.relative_to(root).parts)
    )
    if not names:
        raise InputError(
            f'data.source = "python-stdlib": {root} holds no sources; use "files" with data.paths'
        )
    # The encoding of a source file is declared in its first lines, which tokenize.open reads.
    texts = []
    for name in names:
        with tokenize.open(root / name) as stream:
            texts.append(stream.read())
    return Corpus(
        description=(
            f"the standard library of Python {platform.python_version()}, {len(names):,} files"
        ),
        fingerprint=digest(texts),
        place='data.source = "python-stdlib"',
        documents=lambda: iter(texts),
    )


def _open_dataset(section: DataSection, cache: Path) -> Corpus:
    name = section.paths[0]
    data = load_dataset(section)
    is_text = section.format == "text"
    if is_text and section.field not in data.column_names:
        raise InputError(
            f"data.field = {section.field!r}: {name!r} has the columns"
            f" {', '.join(data.column_names)}; set data.field"
        )
    columns = [section.field]
    if not is_text:
        columns = [name for name in data.column_names if name not in section.ignored_columns]
    selected = data.select_columns(columns) if columns else data

    def documents() -> Iterator[str]:
        for number, row in enumerate(selected):
            yield document_of_row(row, section, f"{name}, row {number}")

    files = []
    for entry in data.cache_files:
        filename = entry["filename"]
        key = f"{filename}\0{section.field}\0{section.format}\0{section.split}"
        files.append((key, Path(filename)))
    if files:
        fingerprint = _cached_fingerprint(cache, files, lambda: digest(documents()))
    else:
        # A data set in memory has no files whose times could be compared.
        fingerprint = digest(documents())
    return Corpus(
        description=f"the data set {Path(name).name}, split {section.split}, {len(data):,} rows",
        fingerprint=fingerprint,
        place=f"data.paths = {json.dumps(section.paths)}",
        documents=documents,
    )


def load_dataset(section: DataSection, *, streaming: bool = False) -> Any:
    """Load the split of the `data` section with the library `datasets`.

    Args:
        section: The `data` section of the configuration.
        streaming: Whether rows are read when they are needed.

    Returns:
        A `datasets.Dataset`, or an `IterableDataset` with `streaming`.

    Raises:
        InputError: The library is not installed, or the data set or the split does not exist.
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            'data.source = "datasets": the package datasets is not installed; run `pip install'
            " datasets`"
        ) from error
    name = section.paths[0]
    folder = user_path(section.paths[0], "data.paths")
    # save_to_disk writes one of these files.
    markers = (folder / "state.json", folder / "dataset_dict.json")
    try:
        if not any(marker.is_file() for marker in markers):
            return datasets.load_dataset(
                name, section.subset, split=section.split, streaming=streaming
            )
        data = datasets.load_from_disk(str(folder))
    except Exception as error:
        # The library, the network and the hub raise errors of many classes.
        raise InputError(
            f"data.paths: the data set {name!r} cannot be opened ({str(error).strip()}); name a"
            " folder written by save_to_disk, or a data set on the hub"
        ) from error
    # A folder has one data set, or a dictionary of splits.
    splits = data if isinstance(data, dict) else {str(data.split or "train"): data}
    if section.split not in splits:
        raise InputError(
            f"data.split = {section.split!r}: the data set {name!r} has no such"
            f" split; set data.split to one of {', '.join(map(repr, splits))}"
        )
    if streaming:
        return splits[section.split].to_iterable_dataset()
    return splits[section.split]
