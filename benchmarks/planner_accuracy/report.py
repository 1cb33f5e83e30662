"""The sections of docs/explanation/planner_accuracy.md."""

import math
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from benchmarks.common.report import ROOT, with_sections
from benchmarks.common.report import markdown as markdown_table
from benchmarks.planner_accuracy.frameworks import datasheet_priors, fitted_priors, open_kernels
from benchmarks.planner_accuracy.predict import LIKELY

PAGE = ROOT / "docs/explanation/planner_accuracy.md"
_SHARES = ("median", "mean", "p90", "bias", "coverage")
_SHARE_TITLES = ("rows", "median", "mean", "P90", "bias", "in the 90 % interval")
_TITLES = {"time": "step time", "time_experts": "step time with experts", "memory": "peak memory"}
_SCORED = (
    *(("time", "tier A"), ("time", "tier B"), ("time", "tier A, framework not named")),
    *(("time_experts", "tier A"), ("memory", "tier A")),
)
_counts_of_fit = itemgetter("out_of_memory", "called_fits", "ran", "called_out_of_memory")


def markdown(result: dict[str, Any]) -> str:
    unnamed = result["not named"]["time"]
    experts = result["experts"]
    reasons = {**result["left out"]["runs"]["not_priced"], **experts["not_priced"]}
    title = "Step time, runs of models with experts, sources left out"
    sections = {
        "left out": _errors(result["left out"]),
        "not named": _table(
            {"all": unnamed["all"], "source": unnamed["source"]},
            "Step time, runs of tier A, the framework not named",
        ),
        "12 rows": _errors(result["12 rows"]),
        "experts": _table(experts["time_experts"], title),
        "unseen": _unseen(result["unseen"], result["again"]),
        "published": _published(result["published"]),
        "constants": _constants(),
        "not priced": "".join(f"- {count}: {reason}\n" for reason, count in reasons.items()),
    }
    return with_sections(PAGE, sections)


def _errors(part: dict[str, Any]) -> str:
    runs = part["runs"]
    sweep = part["sweep"]
    fit = part["fit"]
    failed, called, ran, alarms = _counts_of_fit(fit)
    fit_text = (
        f"### Fit and no fit\n\nOf {failed} rows that ran out of memory {called} were predicted to "
        f"fit ({fit['false_fits']:.1%});\nof {ran} rows that ran {alarms} were predicted not to "
        f"fit ({fit['false_alarms']:.1%}). A row counts as predicted to\nfit if that is at least "
        f"{LIKELY:.0%} likely.\n"
    )
    sections = [
        _table(runs["time"], "Step time, runs of tier A, models without experts"),
        _table(sweep["time"], "Step time, the nanotron sweep"),
        _table(runs["memory"], "Peak memory, runs of tier A"),
        _table(sweep["memory"], "Peak memory, the nanotron sweep"),
        _ranking(part),
        fit_text,
    ]
    return "\n".join(sections)


def _table(tables: dict[str, Any], title: str) -> str:
    rows = []
    for group, entries in tables.items():
        for name, row in entries.items():
            rows.append((group, name, *_shares(row), f"{row['interval_score']:.2f}"))
    table = markdown_table(("", "", *_SHARE_TITLES, "interval score"), rows, right=())
    return f"### {title}\n\n{table}"


def _shares(row: dict[str, Any]) -> list[str]:
    return [str(row["rows"]), *_percentages(row, _SHARES)]


def _percentages(row: dict[str, Any], keys: Sequence[str]) -> list[str]:
    return [f"{row[key]:.1%}" for key in keys]


def _ranking(part: dict[str, Any]) -> str:
    top = "best of the predicted top 3 within 5 % of the best"
    header = ("", "groups", top, "mean regret, first", "first three", "rank correlation")
    rows = []
    for table in ("runs", "sweep"):
        row = part[table]["ranking"]
        if row:
            shares = _percentages(row, ("top3_within_5_percent", "mean_regret_1", "mean_regret_3"))
            rows.append((table, str(row["groups"]), *shares, f"{row['spearman']:.2f}"))
    title = "### Ranking of layouts that differ in nothing else"
    return f"{title}\n\n{markdown_table(header, rows, right=())}"


def _published(rows: list[dict[str, Any]]) -> str:
    """Return the layouts that experts trained with, compared with the plan."""
    inside = Counter(map(itemgetter("inside"), rows))
    timed = inside[True] + inside[False]
    text = f"{inside[True]} of {timed} published times lie in the interval.\n\n"
    header = "model|GPUs|tokens|published layout|measured|predicted (90 %)|inside|plan|plan's"
    header += "|theirs in Plait|reasons|source"
    cells = []
    for row in rows:
        needs = ""
        if row["theirs_fits"] < 0.5:
            needs = f", needs {row['theirs_gib']:.0f} GiB"
        measured = row["measured_seconds"]
        reasons = (f"{name} ({seconds:+.3g} s)" for name, seconds in row["reasons"].items())
        interval = f"({row['low_90']:.3g} to {row['high_90']:.3g})"
        cells.append([
            row["model"],
            f"{row['gpus']:,} x {row['gpu']}",
            f"{row['sequence']:,}",
            row["published"],
            "" if measured is None else f"{measured:.3g} s",
            f"{row['predicted_seconds']:.3g} s {interval}",
            {True: "yes", False: "**no**", None: ""}[row["inside"]],
            row["plan"],
            f"{row['plan_seconds']:.3g} s",
            f"{row['theirs_seconds']:.3g} s{needs}",
            ", ".join(reasons),
            row["source"],
        ])  # fmt: skip
    return text + markdown_table(header.split("|"), cells, right=())


def _unseen(scores: list[dict[str, Any]], again: dict[str, Any]) -> str:
    """Return the score of each set of unseen rows, and that of later sets `again` today."""
    rows = []

    def add(label: str, key: str, tier: str, tables: dict[str, Any]) -> None:
        errors = tables["all"].get("all")
        if errors:
            rows.append((label, f"{_TITLES[key]}, {tier}", *_shares(errors)))

    for number, score in enumerate(scores, 1):
        for key, tier in _SCORED:
            add(f"{number}, {score['commit']}", key, tier, score[tier][key])
        for key, tables in again.get(str(number), {}).items():
            add(f"{number}, today", key, "tier A", tables)
    table = markdown_table(("set, commit", "rows of", *_SHARE_TITLES), rows, right=())
    sources: dict[str, Any] = {}
    fits = []
    for score in scores[-4:]:
        sources |= score["tier A"]["time"]["source"]
        fits.append(_counts_of_fit(score["tier A"]["fit"]))
    by_source = _table({"source": sources}, "Step time by source, tier A of the last four sets")
    failed, called, ran, alarms = map(sum, zip(*fits, strict=True))
    return (
        f"{table}\n{by_source}\nOf {failed} rows of tier A of these sets that ran out of memory "
        f"{called} were predicted to fit, and of {ran} that ran {alarms} were predicted not to "
        "fit.\n"
    )


def _constants() -> str:
    """Return the constants with their priors, and what the published runs changed."""
    priors = datasheet_priors().constants
    learned = fitted_priors().constants
    rows = []
    for name, prior in priors.items():
        if name.startswith("stack.") and name != "stack.plait":
            continue
        bounds = f"{prior.least:g} to {prior.most:g}" if math.isfinite(prior.most) else "above 0"
        row = [name, prior.meaning, bounds]
        for constant in (prior, learned[name]):
            row += [f"{constant.median:.3g}", f"{constant.width:.2f}"]
        rows.append(row)
    header = ("constant", "meaning", "range", "prior", "width", "learned", "width")
    return (
        f"{len(rows)} constants ship, and {len(learned) - len(rows)} speeds of other "
        f"frameworks' kernels are kept with these tables, of which {len(open_kernels())} are not "
        "learned.\n\n"
        f"{markdown_table(header, rows, right=())}"
    )
