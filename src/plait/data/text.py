"""Where the text comes from: a list of documents in a fixed order, and a name for their content.

The order depends on the names alone and never on the file system's. A document that cannot be read
is an error that says which one it is; none is left out silently. Tokens and sequences are not known
here.
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
from plait.data.cache import built_once, digest
from plait.data.rows import COLUMNS, row_text
from plait.errors import InputError, half_of_a_character
from plait.files import user_path

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """The documents of a run. `documents()` starts from the first one each time it is called."""

    description: str
    """For a person: `the Python 3.11.7 standard library, 674 files`."""
    fingerprint: str
    """Equal exactly for equal documents in the same order."""
    place: str
    """For messages: the setting that names the text, and its value."""
    documents: Callable[[], Iterator[str]]


def open_corpus(section: DataSection, *, cache: Path) -> Corpus:
    """The corpus that `section` names. Raises InputError when it is missing or empty."""
    if section.source == "python-stdlib":
        return _standard_library()
    if section.source == "datasets":
        return _dataset(section, cache)
    files = find_files(
        section.paths, suffixes=(".jsonl",) if section.source == "jsonl" else (".txt", ".md")
    )
    place = f"data.paths = {json.dumps(section.paths)}"
    fingerprint = _remembered(
        cache, [(str(file), file) for file in files], lambda: digest(_chunks(files))
    )
    if section.source == "files":
        return Corpus(
            f"{_counted(files)} of text",
            fingerprint,
            place,
            lambda: (_read(file) for file in files),
        )
    name = digest([fingerprint, section.field, section.format, *section.ignored_columns])
    return Corpus(
        f"{_counted(files)} of JSON lines", name, place, lambda: _json_lines(files, section)
    )


def find_files(paths: tuple[str, ...], *, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that `paths` name, sorted, each once. A folder means the files below it that end in
    one of `suffixes`.

    Raises InputError for a path or glob that names nothing.
    """
    found: set[Path] = set()
    for path in paths:
        place = user_path(path, "data.paths")
        if place.is_dir():
            here = [
                file for suffix in suffixes for file in place.rglob(f"*{suffix}") if file.is_file()
            ]
            rule = (
                f"has no file that ends in {' or '.join(suffixes)}; name the files with a glob such"
                f" as {place / '**' / '*.*'}"
            )
        else:
            here = [
                file
                for name in glob.glob(str(place), recursive=True)
                if (file := Path(name)).is_file()
            ]
            rule = f"names no file (looked in {Path.cwd()}); correct data.paths"
        if not here:
            raise InputError(f"data.paths: {path!r} {rule}")
        found.update(file.resolve() for file in here)
    return sorted(found)


def _counted(files: list[Path]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"


def _chunks(files: list[Path]) -> Iterator[bytes | str]:
    for file in files:
        yield str(file.stat().st_size)
        with open(file, "rb") as stream:
            while chunk := stream.read(_READ_BYTES):
                yield chunk


def _remembered(cache: Path, files: list[tuple[str, Path]], compute: Callable[[], str]) -> str:
    """The content's name, computed once for files that have not been touched since: large corpora
    are not read again at each start.
    """
    marks = [f"{name}\0{(stat := file.stat()).st_size}\0{stat.st_mtime_ns}" for name, file in files]
    folder = built_once(
        cache, "fingerprints", digest(marks), lambda place: _write(place / "name", compute())
    )
    return (folder / "name").read_text()


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}: byte {error.start} is not UTF-8; convert the file or leave it out of"
            " data.paths"
        ) from error
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read ({error.strerror}); correct data.paths"
        ) from error


def _json_lines(files: list[Path], section: DataSection) -> Iterator[str]:
    for file in files:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield text_of(
                        _row_of(line, where := f"{file}, line {number}", section), section, where
                    )


def _row_of(line: bytes, where: str, section: DataSection) -> dict[str, Any]:
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
        needs = (
            f"with the text in {section.field!r}"
            if section.format == "text"
            else f"with {' or '.join(COLUMNS[section.format])}"
        )
        raise InputError(
            f"{where}: is a JSON {type(row).__name__} and not an object; each line is an object"
            f" {needs}"
        )
    return row


def text_of(row: Mapping[str, Any], section: DataSection, where: str) -> str:
    """The document of a row of JSON lines: its text, or the row in the form of `rows`."""
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
    if (half := half_of_a_character(row[field])) is not None:
        raise InputError(
            f"{where}: {field!r} holds {half}, half of a character (a lone surrogate); correct the"
            " line, or leave it out"
        )
    return str(row[field])


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    # Some systems ship these folders in packages of their own: without them the text is the same
    # wherever the version is the same.
    apart = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
    names = sorted(
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if not apart & set(file.relative_to(root).parts)
    )
    if not names:
        raise InputError(
            f'data.source = "python-stdlib": {root} holds no sources; use "files" with data.paths'
        )
    # Encodings are declared in the first lines of a source file, so these are opened the way Python
    # does.
    texts = [_source(root / name) for name in names]
    description = (
        f"the standard library of Python {platform.python_version()}, {len(names):,} files"
    )
    return Corpus(description, digest(texts), 'data.source = "python-stdlib"', lambda: iter(texts))


def _source(file: Path) -> str:
    with tokenize.open(file) as stream:
        return stream.read()


def _dataset(section: DataSection, cache: Path) -> Corpus:
    name = section.paths[0]
    data = load_dataset(section)
    if section.format == "text" and section.field not in data.column_names:
        raise InputError(
            f"data.field = {section.field!r}: {name!r} has the columns"
            f" {', '.join(data.column_names)}; set data.field"
        )
    ignored = section.ignored_columns
    columns = (
        [section.field]
        if section.format == "text"
        else [one for one in data.column_names if one not in ignored]
    )

    def documents() -> Iterator[str]:
        for number, row in enumerate(data.select_columns(columns) if columns else data):
            if section.format != "text":
                yield text_of(row, section, f"{name}, row {number}")
                continue
            text = row[section.field]
            if not isinstance(text, str):
                raise InputError(
                    f"{name}, row {number}: {section.field!r} holds a {type(text).__name__} and not"
                    " a string; set data.field"
                )
            yield text

    files = [
        (
            f"{file['filename']}\0{section.field}\0{section.format}\0{section.split}",
            Path(file["filename"]),
        )
        for file in data.cache_files
    ]
    fingerprint = (
        _remembered(cache, files, lambda: digest(documents())) if files else digest(documents())
    )
    return Corpus(
        f"the data set {Path(name).name}, split {section.split}, {len(data):,} rows",
        fingerprint,
        f"data.paths = {json.dumps(section.paths)}",
        documents,
    )


def load_dataset(section: DataSection, *, streaming: bool = False) -> Any:
    """The split that `section` names: a `datasets.Dataset`, or an IterableDataset. Raises
    InputError.
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
    try:
        if not any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            return datasets.load_dataset(
                name, section.subset, split=section.split, streaming=streaming
            )
        data = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever the library's readers, the network and the hub raise
        rule = f"data.paths: the data set {name!r} cannot be opened ({str(error).strip()})"
        raise InputError(
            f"{rule}; name a folder written by save_to_disk, or a data set on the hub"
        ) from error
    splits = data if isinstance(data, dict) else {str(data.split or "train"): data}
    if section.split not in splits:
        raise InputError(
            f"data.split = {section.split!r}: the data set {name!r} has"
            f" {', '.join(map(repr, splits))}; set data.split"
        )
    return splits[section.split].to_iterable_dataset() if streaming else splits[section.split]
