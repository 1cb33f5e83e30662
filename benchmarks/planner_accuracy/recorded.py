"""The result files of the planner's errors, with what the page and the tests read.

In benchmarks/results, planner_accuracy.json has the errors, planner_calibrated.json those after
calibration on 12 rows, planner_published.json the layouts that experts trained with, and
planner_unseen_N.json the scores of unseen rows, which `unseen.py` writes once each. The errors of
one group of rows are a list in the order of `ERRORS`.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.common.report import RESULTS, read, rounded, write
from benchmarks.planner_accuracy.metrics import Errors

DIGITS = 7
"""Stored digits. The page rounds to three, and rounding twice must not change them."""
ERRORS = tuple(field.name for field in fields(Errors))


def _path(name: str) -> Path:
    return RESULTS / f"planner_{name}.json"


def load() -> dict[str, Any]:
    """Return the recorded result, as `report.markdown` takes it."""
    return {
        **_expanded(read(_path("accuracy"))),
        "12 rows": _expanded(read(_path("calibrated"))),
        "published": read(_path("published")),
        "unseen": scores(),
    }


def scores() -> list[dict[str, Any]]:
    return [_expanded(read(_path(f"unseen_{number}"))) for number in range(1, 8)]


def store(result: dict[str, Any]) -> None:
    """Write a result. The scores of unseen rows have files of their own, which stay."""
    stored: dict[str, Any] = {}
    for name in ("left out", "12 rows"):
        part = result[name]
        stored[name] = {
            "runs": _select(part["runs"], "time", "memory", "ranking", "not_priced"),
            "sweep": _select(part["sweep"], "time", "memory", "ranking"),
            "fit": part["fit"],
        }
    stored["experts"] = _select(result["experts"], "time_experts", "not_priced")
    stored["not named"] = {"time": _select(result["not named"]["time"], "all", "source")}
    stored["again"] = {}
    for number, tables in result["again"].items():
        time = _select(tables["time"], "all")
        stored["again"][number] = {"time": time, "memory": _select(tables["memory"], "all")}
    write(_path("calibrated"), _packed(stored.pop("12 rows")), DIGITS)
    write(_path("accuracy"), _packed(stored), DIGITS)
    write(_path("published"), result["published"], DIGITS)


def packed_score(score: dict[str, Any]) -> dict[str, Any]:
    """Return what the page reads of a score of unseen rows, in the form of the files."""
    packed = dict(score)
    for tier, entry in score.items():
        if not isinstance(entry, dict):
            continue
        packed[tier] = dict(entry)
        for key in entry.keys() - {"fit"}:
            packed[tier][key] = _select(entry[key], "all")
        if tier == "tier A":
            packed[tier]["time"] = _select(entry["time"], "all", "source")
    return rounded(_packed(packed), DIGITS)


def _select(entries: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: entries[name] for name in names}


def _packed(value: Any) -> Any:
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
