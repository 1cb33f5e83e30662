"""The sections of docs/explanation/planner_accuracy.md."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.common.report import ROOT, with_sections
from benchmarks.common.report import markdown as markdown_table
from benchmarks.planner_accuracy.frameworks import datasheet_priors, fitted_priors, open_kernels
from benchmarks.planner_accuracy.predict import LIKELY

PAGE = ROOT / "docs/explanation/planner_accuracy.md"
_SHARES = ("median", "mean", "p90", "bias", "coverage")
_PARTS = {"time": "step time", "time_experts": "step time with experts", "memory": "peak memory"}
_INSIDE = {True: "yes", False: "**no**", None: ""}


def markdown(result: dict[str, Any]) -> str:
    """Return the page with the sections of a result."""
    unnamed = result["not named"]["time"]
    reasons = {**result["left out"]["runs"]["not_priced"], **result["experts"]["not_priced"]}
    sections = {
        "left out": _errors(result["left out"]),
        "not named": _table(
            {key: unnamed[key] for key in ("all", "source")},
            "step time, runs of tier A, the framework not named",
        ),
        "12 rows": _errors(result["12 rows"]),
        "experts": _table(
            result["experts"]["time_experts"],
            "step time, runs of models with experts, sources left out",
        ),
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
    return "\n".join(
        [
            _table(runs["time"], "step time, runs of tier A, models without experts"),
            _table(sweep["time"], "step time, the nanotron sweep"),
            _table(runs["memory"], "peak memory, runs of tier A"),
            _table(sweep["memory"], "peak memory, the nanotron sweep"),
            _ranking(part),
            f"""### Fit and no fit

Of {fit["out_of_memory"]} rows that ran out of memory {fit["called_fits"]} were predicted to fit ({fit["false_fits"]:.1%});
of {fit["ran"]} rows that ran {fit["called_out_of_memory"]} were predicted not to fit ({fit["false_alarms"]:.1%}). A row counts as predicted to
fit if that is at least {LIKELY:.0%} likely.
""",
        ]
    )


def _table(tables: dict[str, Any], title: str) -> str:
    header = ("", "", "rows", "median", "mean", "P90", "bias", "in the 90 % interval")
    rows = [
        (group, name, str(row["rows"]), *_shares(row), f"{row['interval_score']:.2f}")
        for group, entries in tables.items()
        for name, row in entries.items()
    ]
    table = markdown_table((*header, "interval score"), rows, right=())
    return f"### {title[0].upper()}{title[1:]}\n\n{table}"


def _shares(row: dict[str, Any]) -> list[str]:
    return [f"{row[key]:.1%}" for key in _SHARES]


def _ranking(part: dict[str, Any]) -> str:
    header = (
        "",
        "groups",
        "best of the predicted top 3 within 5 % of the best",
        "mean regret, first",
        "first three",
        "rank correlation",
    )
    rows = []
    for table in ("runs", "sweep"):
        row = part[table]["ranking"]
        if row:
            keys = ("top3_within_5_percent", "mean_regret_1", "mean_regret_3")
            shares = (f"{row[key]:.1%}" for key in keys)
            rows.append((table, str(row["groups"]), *shares, f"{row['spearman']:.2f}"))
    title = "### Ranking of layouts that differ in nothing else"
    return f"{title}\n\n{markdown_table(header, rows, right=())}"


def _published(rows: list[dict[str, Any]]) -> str:
    """Return the layouts that experts trained with, compared with the plan."""
    timed = [r for r in rows if r["inside"] is not None]
    inside = sum(row["inside"] for row in timed)
    text = f"{inside} of {len(timed)} published times lie in the interval.\n\n"
    header = "model|GPUs|tokens|published layout|measured|predicted (90 %)|inside|plan|plan's"
    header += "|theirs in Plait|reasons|source"
    cells = []
    for r in rows:
        fits = "" if r["theirs_fits"] >= 0.5 else f", needs {r['theirs_gib']:.0f} GiB"
        measured = "" if r["measured_seconds"] is None else f"{r['measured_seconds']:.3g} s"
        reasons = ", ".join(f"{name} ({seconds:+.3g} s)" for name, seconds in r["reasons"].items())
        interval = f"({r['low_90']:.3g} to {r['high_90']:.3g})"
        predicted = f"{r['predicted_seconds']:.3g} s {interval}"
        cells.append(
            (
                r["model"],
                f"{r['gpus']:,} x {r['gpu']}",
                f"{r['sequence']:,}",
                r["published"],
                measured,
                predicted,
                _INSIDE[r["inside"]],
                r["plan"],
                f"{r['plan_seconds']:.3g} s",
                f"{r['theirs_seconds']:.3g} s{fits}",
                reasons,
                r["source"],
            )
        )
    return text + markdown_table(header.split("|"), cells, right=())


def _unseen(scores: list[dict[str, Any]], again: dict[str, Any]) -> str:
    """Return the score of each set of unseen rows, and that of later sets `again` today."""
    header = ("set, commit", "rows of", "rows", "median", "mean", "P90", "bias")
    rows = []
    parts = (
        ("tier A", "time"),
        ("tier B", "time"),
        ("tier A, framework not named", "time"),
        ("tier A", "time_experts"),
        ("tier A", "memory"),
    )
    for number, found in enumerate(scores, 1):
        for tier, key in parts:
            row = found[tier][key]["all"].get("all")
            if row:
                title = f"{_PARTS[key]}, {tier}"
                rows.append(
                    (f"{number}, {found['commit']}", title, str(row["rows"]), *_shares(row))
                )
        for key in ("time", "memory") if str(number) in again else ():
            row = again[str(number)][key]["all"]["all"]
            title = f"{_PARTS[key]}, tier A"
            rows.append((f"{number}, today", title, str(row["rows"]), *_shares(row)))
    table = markdown_table((*header, "in the 90 % interval"), rows, right=())
    last = {
        name: entry
        for found in scores[-4:]
        for name, entry in found["tier A"]["time"]["source"].items()
    }
    fits = [found["tier A"]["fit"] for found in scores[-4:]]
    out, called, ran, alarms = (
        sum(fit[key] for fit in fits)
        for key in ("out_of_memory", "called_fits", "ran", "called_out_of_memory")
    )
    by_source = _table({"source": last}, "step time by source, tier A of the last four sets")
    return (
        f"{table}\n{by_source}\nOf {out} rows of tier A of these sets that ran out of memory "
        f"{called} were predicted to fit, and of {ran} that ran {alarms} were predicted not to fit.\n"
    )


def _constants() -> str:
    """Return the constants with their priors, and what the published runs changed."""
    believed, found = datasheet_priors().constants, fitted_priors().constants
    shipped = [name for name in believed if not name.startswith("stack.") or name == "stack.plait"]
    text = (
        f"{len(shipped)} constants ship, and {len(found) - len(shipped)} speeds of other frameworks' "
        f"kernels are kept with these tables, of which {len(open_kernels())} are not learned.\n\n"
    )
    header = ("constant", "meaning", "range", "prior", "width", "learned", "width")
    rows = []
    for name in shipped:
        a, b = believed[name], found[name]
        most = "" if math.isinf(a.most) else f"{a.most:g}"
        bounds = f"{a.least:g} to {most}" if most else "above 0"
        values = (a.median, a.width, b.median, b.width)
        formats = (".3g", ".2f", ".3g", ".2f")
        cells = (format(value, form) for value, form in zip(values, formats, strict=True))
        rows.append((name, a.meaning, bounds, *cells))
    return text + markdown_table(header, rows, right=())
