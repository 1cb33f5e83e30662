"""The table of docs/development/pains.md, from benchmarks/results/pains.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.table import markdown
from tools.pains.scenarios import LIBRARIES, PAINS

ROOT = Path(__file__).parents[2]
DOCUMENT, RESULT = (
    ROOT / "docs" / "development" / "pains.md",
    ROOT / "benchmarks" / "results" / "pains.json",
)
BEGIN, END = "<!-- python -m tools.pains -->\n", "<!-- end -->\n"
NAMES = {
    "plait": "Plait",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "trainer": "Trainer",
}


def table(known: dict[str, Any]) -> str:
    """As markdown: a row for each scenario, and below it what libraries said that are not right."""
    rows, notes = [], []
    for number, pain in PAINS.items():
        cells = known["cells"].get(str(number), {})
        shown = []
        for library in LIBRARIES:
            one = cells.get(library)
            shown.append(
                ""
                if one is None
                else f"{one['outcome']}: {one['said']}"
                if one["outcome"] in ("right", "wrong")
                else one["outcome"]
            )
            if one is not None and one["outcome"] not in ("right", "wrong"):
                notes.append(
                    f"- {number}, {NAMES[library]}: {one['said'].replace('<', '(').replace('>', ')')}"
                )
        rows.append((f"{number} {pain.title} ({pain.threads})", pain.right, *shown))
    versions = ", ".join(f"{name} {number}" for name, number in known.get("versions", {}).items())
    header = ("what goes wrong", "right is", *NAMES.values())
    run = f"Run on {known['date']} with {versions}. Messages of cells without numbers:"
    return "\n".join((markdown(header, rows), run, "", *notes)) + "\n"


def written(text: str) -> str:
    """The document with the table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{table(json.loads(RESULT.read_text()))}{END}{rest.split(END, 1)[1]}"
