"""Write docs/development/mutants.md from the list and the last results."""

from __future__ import annotations

from typing import Any

from tools.mutants.catalogue import ROOT, Mutant

PAGE = ROOT / "docs/development/mutants.md"
LISTS = {
    "fresh": "Planted without knowledge of the tests",
    "known": "Defects that Plait once had, and similar ones",
    "stale": "Checkpoints that hold another state than that of the call",
    "compat": "Interfaces of other libraries",
    "context": "Context parallelism",
    "experts": "Experts",
    "inference": "Inference",
    "standby": "Standby processes",
    "trainer": "Trainer of Transformers",
}


def write(mutants: list[Mutant], results: dict[str, Any], date: str) -> None:
    """Write the page for results of which the newest are of `date`."""
    ran = [mutant for mutant in mutants if mutant.id in results]
    missed = [mutant for mutant in ran if not results[mutant.id]["caught_by"]]
    by_verify = [mutant.id for mutant in missed if results[mutant.id].get("verify")]
    by_nothing = [
        mutant.id
        for mutant in missed
        if not results[mutant.id].get("verify") and results[mutant.id]["ran"] == "everything"
    ]
    open_ = [mutant.id for mutant in missed if results[mutant.id]["ran"] != "everything"]
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`; do not edit. Each row is a defect that was planted alone into the sources, with the first test",
        "of `make test` that failed. For each defect the tests that reach its lines run until the first failure; if none fails, all",
        "tests run. Seconds are from the start of pytest to that failure, with two defects tested at the same time.",
        "",
        f"**{len(ran) - len(missed)} of {len(ran)} are noticed by `make test`.** "
        f"Noticed by `plait verify` only: {', '.join(by_verify) or 'none'}. Not noticed: {', '.join(by_nothing) or 'none'}. "
        f"Not noticed by the tests that reach them, and not run against all tests yet: {', '.join(open_) or 'none'}. "
        f"Not run yet: {len(mutants) - len(ran)} of {len(mutants)}. Last run: {date}.",
    ]
    for author, title in LISTS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| defect | what goes wrong | noticed by | s |",
            "|---|---|---|---:|",
        ]
        lines += [
            _row(mutant, results.get(mutant.id)) for mutant in mutants if mutant.author == author
        ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(mutant: Mutant, result: dict[str, Any] | None) -> str:
    if result is None:
        found, seconds = "not run yet", ""
    else:
        found = (
            f"`{result['caught_by']}`"
            if result["caught_by"]
            else "`plait verify` only"
            if result.get("verify")
            else "**nothing**"
            if result["ran"] == "everything"
            else "no test that reaches it; not run against everything yet"
        )
        seconds = f"{result['seconds']:.0f}"
    return (
        f"| {mutant.id} | {_plain(mutant.what)} (`{mutant.file}`) | {_plain(found)} | {seconds} |"
    )


def _plain(text: str) -> str:
    return text.replace("|", "\\|")
