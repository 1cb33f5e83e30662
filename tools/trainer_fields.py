"""Write the tables of docs/how-to/trainer.md with the effect of every field of
`TrainingArguments`, `SFTConfig` and `DPOConfig`.

    python -m tools.trainer_fields [--write]

tests/unit/hf/test_fields.py compares the document with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.common.report import markdown, with_section
from plait.hf.fields import FIELDS, SEQ2SEQ, TRL, ArgumentField

DOCUMENT = Path(__file__).parents[1] / "docs" / "how-to" / "trainer.md"


def tables() -> dict[str, str]:
    """Return the tables as Markdown, keyed by their marks in the document."""
    return {
        "tools/trainer_fields.py": _table(FIELDS | SEQ2SEQ),
        "tools/trainer_fields.py: TRL": _table(TRL),
    }


def _table(known: dict[str, ArgumentField]) -> str:
    rows = []
    for name, entry in known.items():
        what = "" if entry.what in ("as in Transformers", "as in TRL") else entry.what
        rows.append(
            (f"`{name}`", entry.effect, f"{what}; {entry.remedy}" if entry.remedy else what)
        )
    return markdown(("field", "effect", "what it does, or why not and what to do instead"), rows)


def written(text: str) -> str:
    """Return the text of the document with the current tables."""
    for mark, table in tables().items():
        text = with_section(text, mark, f"{table}\n")
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(*tables().values(), sep="\n\n")
