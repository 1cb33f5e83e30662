"""How benchmarks and tools write results and pages.

A result is a JSON file in benchmarks/results with what pages, tests and readers use, and with the
date, the machine and the versions it is of. It has at most `MOST_BYTES`: raw measurements stay out.
A page is Markdown that is made from results alone, or a section of one between two marks.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_BYTES = 20 * 1024
"""Size of the largest result file. tests/architecture/test_result_files.py checks it."""
WIDTH = 140
END = "<!-- end -->\n"

Rows = Sequence[Sequence[str]]


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def revision() -> str:
    """Return the revision of the sources, as `git describe` names it."""
    command = ["git", "describe", "--always", "--tags", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def facts(*packages: str) -> dict[str, object]:
    """Return the time, the machine, and the versions of Python and of `packages`."""
    from plait.cluster.topology import processor_name

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
    }


def machine_line(machine: dict[str, Any]) -> str:
    versions = [f"{name} {version}" for name, version in machine["versions"].items() if version]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    parts = [machine["date"], machine["cpu"], f"{machine['cores']} cores", memory]
    return ", ".join([*parts, f"Python {machine['python']}", *versions]) + "."


def rounded(value: Any, digits: int = 5) -> Any:
    """Return the JSON value with all floats rounded to significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry, digits) for entry in value]
    return value


def dumps(value: Any, depth: int = 0) -> str:
    """Return JSON text in which a list or object is on one line if it fits there."""
    line = json.dumps(value)
    if not isinstance(value, (dict, list, tuple)) or depth + len(line) <= WIDTH:
        return line
    entries = []
    if isinstance(value, dict):
        for key, entry in value.items():
            entries.append(f"{json.dumps(str(key))}: {dumps(entry, depth + 1)}")
    else:
        for entry in value:
            entries.append(dumps(entry, depth + 1))
    indent = "\n" + " " * (depth + 1)
    lines = f",{indent}".join(entries)
    return f"{line[0]}{indent}{lines}\n{' ' * depth}{line[-1]}"


def read(path: Path, default: Any = None) -> Any:
    """Return the value of a result file, or `default` if the file does not exist."""
    if not path.exists():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, value: Any, digits: int = 5) -> None:
    """Write a result file. Floats are rounded to significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(rounded(value, digits)) + "\n", encoding="utf-8")
    say(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


def store(name: str, content: dict[str, Any], *packages: str, digits: int = 5) -> None:
    """Write benchmarks/results/NAME.json with this machine and the versions of `packages`."""
    write(RESULTS / f"{name}.json", {"machine": facts(*packages), **content}, digits)


def markdown(header: Sequence[str], rows: Rows, *, right: Collection[int] | None = None) -> str:
    """Return a Markdown table.

    Args:
        header: Titles of the columns.
        rows: Texts of the cells.
        right: Columns that are aligned to the right. Default: all but the first.
    """
    columns = range(1, len(header)) if right is None else right
    rules = ["---" + ":" * (index in columns) for index in range(len(header))]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rules)}|"]
    for row in rows:
        escaped = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def aligned(header: Sequence[str], rows: Rows) -> str:
    """Return a table for a terminal: padded columns, the first aligned left, the others right."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    lines = []
    for row in table:
        cells = list(map(str.rjust, row, widths))
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells))
    return "\n".join(lines)


def with_section(text: str, mark: str, content: str) -> str:
    """Return a page with the text between `<!-- mark -->` and `<!-- end -->` replaced."""
    begin = f"<!-- {mark} -->\n"
    before, old = text.split(begin)
    return f"{before}{begin}{content}{END}{old.split(END, 1)[1]}"


def with_sections(path: Path, sections: Mapping[str, str]) -> str:
    """Return the text of a page with the content of these sections, keyed by their marks."""
    text = path.read_text(encoding="utf-8")
    for mark, content in sections.items():
        text = with_section(text, mark, content)
    return text


def write_page(path: Path, text: str, *, check: bool = False) -> int:
    if not check:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        say(f"{path.relative_to(ROOT)} is not what its data give; write it again")
        return 1
    return 0


def say(line: str) -> None:
    """Print progress to standard error. Standard output holds the tables."""
    print(line, file=sys.stderr, flush=True)
