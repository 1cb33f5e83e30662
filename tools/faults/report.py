"""Results of the last runs in benchmarks/results/faults.json, and docs/development/faults.md."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.common.report import RESULTS as FOLDER
from benchmarks.common.report import markdown
from tools.mutants.project import ROOT

RESULTS = FOLDER / "faults.json"
PAGE = ROOT / "docs/development/faults.md"
FIELDS = {
    "ranks": ("kind", "told_seconds", "ended_seconds", "exit_code", "wrong"),
    "slow": ("kind", "wrong"),
}
"""Fields that are stored of parts with many similar rows. Of the other parts all are."""
Part = dict[str, Any]

ABOUT = """# Faults that were planted

Written by `make faults`; do not edit. [Faults](../how-to/faults.md) says what a user gets. `make faults`
takes some minutes, `make faults ARGS=nightly` runs the full matrix, `ARGS=release` repeats it, and
`ARGS="nightly --part saves"` runs one part. All parts use two ranks unless noted.
"""


def stored(name: str, part: Part) -> Part:
    """Return what is stored of a part."""
    fields = FIELDS.get(name)
    if fields is None:
        return part
    return {**part, "rows": [{field: row[field] for field in fields} for row in part["rows"]]}


def page(parts: dict[str, Part]) -> str:
    """Return the page. A part that has not run is left out."""
    texts = [ABOUT]
    for name, (title, about, table) in SECTIONS.items():
        if name in parts:
            part = parts[name]
            run = f"{part['size']}, {part['at'][:10]}, torch {part['torch']}, {part['seconds']} s"
            texts.append(f"## {title}\n\n{about} ({run})\n\n{table(part['rows'])}")
    return "\n".join(texts)


def _table(header: tuple[str, ...], rows: list[list[Any]]) -> str:
    return markdown(header, [[str(cell) for cell in row] for row in rows], right=())


def _ranks(rows: list[Part]) -> str:
    header = ("fault", "runs", "passed", "reported within", "all ended within", "exit code")
    by_kind: dict[str, list[Part]] = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    cells = []
    for kind, runs in by_kind.items():
        codes = ", ".join(sorted({str(run["exit_code"]) for run in runs}))
        times = [_most(runs, "told_seconds"), _most(runs, "ended_seconds")]
        cells.append([kind, len(runs), _passed(runs), *times, codes])
    return _table(header, cells)


def _slow(rows: list[Part]) -> str:
    return f"{len(rows)} runs, {len(rows) - _passed(rows)} stopped.\n"


def _restarts(rows: list[Part]) -> str:
    header = ("what happened", "exit code", "SIGKILL to the next finished step")
    header += ("signal to the end", "losses and last state, bitwise", "passed")
    cells = []
    for row in rows:
        seconds = row["next_step_seconds"]
        again = f"{min(seconds):.1f} to {max(seconds):.1f} s" if seconds else ""
        ended = "" if row["ended_seconds"] is None else f"{row['ended_seconds']:.1f} s"
        same = "equal" if row["same_losses"] and row["same_state"] else "differ"
        cells.append([row["what"], row["exit_code"], again, ended, same, _word(row)])
    return _table(header, cells)


def _saves(rows: list[Part]) -> str:
    header = ("kills", "at a call of the save", "different calls", "rank 0, rank 1", "lost")
    header += ("mixed", "runs to their end", "with other losses or state", "passed")
    cells = []
    for row in rows:
        by_rank = ", ".join(str(count) for _, count in sorted(row["by_rank"].items()))
        counts = [row["kills"], row["at_calls"], len(row["names"]), by_rank, row["lost"]]
        cells.append([*counts, row["mixed"], row["runs"], row["other_ends"], _word(row)])
    return _table(header, cells)


def _damage(rows: list[Part]) -> str:
    header = ("what", "times", "noticed, and the previous one loaded", "file and tensor named")
    numbers = [[f"{row[key]:,}" for key in ("count", "noticed", "named")] for row in rows]
    return _table(header, [[row["kind"], *own] for row, own in zip(rows, numbers, strict=True)])


def _overhead(rows: list[Part]) -> str:
    (row,) = rows
    return (
        f"A step of {row['step_milliseconds']:.0f} ms with both takes {row['wall']:.3f} times as "
        f"long as without (median of {row['rounds']} rounds in turn), and {row['cpu']:.3f} times "
        "the processor time.\n"
    )


def _passed(rows: list[Part]) -> int:
    return sum(not row["wrong"] for row in rows)


def _word(row: Part) -> str:
    return "no" if row["wrong"] else "yes"


def _most(rows: list[Part], name: str) -> str:
    seconds = [row[name] for row in rows if row[name] is not None]
    return f"{max(seconds):.1f} s" if seconds else ""


SECTIONS = {
    "ranks": (
        "A fault of one rank",
        "A fault in the loss of one rank under `plait launch`, with a timeout of 5 s. The second "
        "time is from\nthe report to the end of the last process.",
        _ranks,
    ),
    "slow": (
        "False alarms",
        "Four healthy ranks on two cores, with stalls of 4 s and a timeout of 5 s.",
        _slow,
    ),
    "restarts": (
        "Restarts",
        "`plait train` compared with the same run without disturbance: ranks killed at random "
        "times, signals to\nthe launcher and to one rank, and a loss that is not finite (compared "
        "with a run without that batch).",
        _restarts,
    ),
    "saves": (
        "SIGKILL in saves",
        "At every call of a save to the file system, half-done writes included, and at random "
        "times, with one\ntag, two in turn, and a new one per step. Every byte and the state are "
        "compared with those of an\nundisturbed run.",
        _saves,
    ),
    "damage": (
        "Damaged checkpoints",
        "Damaged files, and saves in which any call to the file system fails, once or from then "
        "on\n(`tests/faulty_files.py`).",
        _damage,
    ),
    "overhead": ("Overhead", "The watchdog and the checks of every step.", _overhead),
}
