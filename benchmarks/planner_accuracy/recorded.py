"""The result files of the planner's errors, with what the page and the tests read.

In benchmarks/results, planner_accuracy.json has the errors, planner_calibrated.json those after
calibration on 12 rows, planner_published.json the layouts that experts trained with, and
planner_unseen_N.json the scores of unseen rows. The errors of one group of rows are a list in the
order of `ERRORS`.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.common.report import rounded, write
from benchmarks.planner_accuracy.metrics import Errors

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks/results/planner_accuracy.json"
CALIBRATED = ROOT / "benchmarks/results/planner_calibrated.json"
PUBLISHED = ROOT / "benchmarks/results/planner_published.json"
UNSEEN = [ROOT / f"benchmarks/results/planner_unseen_{number}.json" for number in range(1, 8)]
"""Files that `unseen.py` writes once each."""
DIGITS = 7
"""Stored digits. The page rounds to three, and rounding twice must not change them."""
ERRORS = tuple(field.name for field in fields(Errors))


def load() -> dict[str, Any]:
    """Return the recorded result, as `report.markdown` takes it."""
    result = _expanded(_read(RESULT))
    return {
        **result,
        "12 rows": _expanded(_read(CALIBRATED)),
        "published": _read(PUBLISHED),
        "unseen": scores(),
    }


def scores() -> list[dict[str, Any]]:
    """Return the scores of all sets of unseen rows."""
    return [_expanded(_read(path)) for path in UNSEEN]


def store(result: dict[str, Any]) -> None:
    """Write a result. The scores of unseen rows have files of their own, which stay."""
    kept: dict[str, Any] = {}
    for name in ("left out", "12 rows"):
        runs, sweep = result[name]["runs"], result[name]["sweep"]
        kept[name] = {
            "runs": {key: runs[key] for key in ("time", "memory", "ranking", "not_priced")},
            "sweep": {key: sweep[key] for key in ("time", "memory", "ranking")},
            "fit": result[name]["fit"],
        }
    kept["experts"] = {key: result["experts"][key] for key in ("time_experts", "not_priced")}
    kept["not named"] = {"time": _tables(result["not named"]["time"], "all", "source")}
    kept["again"] = {
        number: {key: _tables(tables[key], "all") for key in ("time", "memory")}
        for number, tables in result["again"].items()
    }
    write(CALIBRATED, _packed(kept.pop("12 rows")), DIGITS)
    write(RESULT, _packed(kept), DIGITS)
    write(PUBLISHED, result["published"], DIGITS)


def packed_score(score: dict[str, Any]) -> dict[str, Any]:
    """Return what the page reads of a score of unseen rows, in the form of the files."""
    kept: dict[str, Any] = {}
    for tier, entry in score.items():
        if not isinstance(entry, dict):
            kept[tier] = entry
            continue
        kept[tier] = {
            key: value if key == "fit" else _tables(value, "all") for key, value in entry.items()
        }
        if tier == "tier A":
            kept[tier]["time"] = _tables(entry["time"], "all", "source")
    return rounded(_packed(kept), DIGITS)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _tables(tables: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tables[name] for name in names}


def _packed(value: Any) -> Any:
    """Replace the errors of each group by a list."""
    if not isinstance(value, dict):
        return value
    if tuple(value) == ERRORS:
        return list(value.values())
    return {key: _packed(entry) for key, entry in value.items()}


def _expanded(value: Any) -> Any:
    """Undo `_packed`. No other list of that length is recorded."""
    if isinstance(value, list) and len(value) == len(ERRORS):
        return dict(zip(ERRORS, value, strict=True))
    if isinstance(value, dict):
        return {key: _expanded(entry) for key, entry in value.items()}
    return value
