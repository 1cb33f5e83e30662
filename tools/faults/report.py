"""Results of the last runs in benchmarks/results/faults.json, and docs/development/faults.md."""

from collections import defaultdict
from typing import Any

from benchmarks.common.report import RESULTS as FOLDER
from benchmarks.common.report import markdown, with_sections
from tools.mutants.project import ROOT

RESULTS = FOLDER / "faults.json"
PAGE = ROOT / "docs/development/faults.md"
Part = dict[str, Any]


def page(parts: dict[str, Part]) -> str:
    sections = {}
    for name, part in parts.items():
        run = f"{part['size']}, {part['at'][:10]}, torch {part['torch']}, {part['seconds']} s"
        sections[name] = f"Run: {run}.\n\n{SECTIONS[name](part['rows'])}"
    return with_sections(PAGE, sections)


def _table(header: str, rows: list[list[Any]]) -> str:
    return markdown(header.split("; "), [[*map(str, row)] for row in rows], right=())


def _ranks(rows: list[Part]) -> str:
    runs_of: dict[str, list[Part]] = defaultdict(list)
    for row in rows:
        runs_of[row["kind"]].append(row)
    cells = []
    for kind, runs in runs_of.items():
        codes = ", ".join(sorted({str(run["exit_code"]) for run in runs}))
        times = (_longest(runs, "told_seconds"), _longest(runs, "ended_seconds"))
        cells.append([kind, len(runs), passed(runs), *times, codes])
    return _table("fault; runs; passed; reported within; all ended within; exit code", cells)


def _slow(rows: list[Part]) -> str:
    return f"{len(rows)} runs, {len(rows) - passed(rows)} stopped.\n"


def _restarts(rows: list[Part]) -> str:
    header = "what happened; exit code; SIGKILL to the next finished step; signal to the end; "
    cells = []
    for row in rows:
        seconds = row["next_step_seconds"]
        restarted = f"{min(seconds):.1f} to {max(seconds):.1f} s" if seconds else ""
        ended = _longest([row], "ended_seconds")
        same = ("differ", "equal")[row["same_losses"] and row["same_state"]]
        cells.append([row["what"], row["exit_code"], restarted, ended, same, _word(row)])
    return _table(f"{header}losses and last state, bitwise; passed", cells)


def _saves(rows: list[Part]) -> str:
    header = "kills; at a call of the save; different calls; rank 0, rank 1; lost; mixed; "
    cells = []
    for row in rows:
        by_rank = ", ".join(str(row["by_rank"][rank]) for rank in sorted(row["by_rank"]))
        counts = [row["kills"], row["at_calls"], len(row["names"]), by_rank, row["lost"]]
        cells.append([*counts, row["mixed"], row["runs"], row["other_ends"], _word(row)])
    return _table(f"{header}runs to their end; with other losses or state; passed", cells)


def _damage(rows: list[Part]) -> str:
    cells = []
    for row in rows:
        counts = (row["count"], row["noticed"], row["named"])
        cells.append([row["kind"], *map("{:,}".format, counts)])
    return _table("what; times; noticed, and the previous one loaded; file and tensor named", cells)


def _overhead(rows: list[Part]) -> str:
    (row,) = rows
    return (
        f"A step of {row['step_milliseconds']:.0f} ms with both takes {row['wall']:.3f} times as "
        f"long as without (median of {row['rounds']} rounds in turn), and {row['cpu']:.3f} times "
        "the processor time.\n"
    )


def passed(rows: list[Part]) -> int:
    return sum(not row["wrong"] for row in rows)


def _word(row: Part) -> str:
    return ("yes", "no")[bool(row["wrong"])]


def _longest(rows: list[Part], name: str) -> str:
    seconds = [row[name] for row in rows if row[name] is not None]
    return f"{max(seconds):.1f} s" if seconds else ""


SECTIONS = {
    "ranks": _ranks,
    "slow": _slow,
    "restarts": _restarts,
    "saves": _saves,
    "damage": _damage,
    "overhead": _overhead,
}
"""Text of each part."""
