"""Write the table of docs/trainer.md that says what becomes of every field of `TrainingArguments`.

Run: PYTHONPATH=src:. python tools/trainer_fields.py [--write]; tests/unit/hf/test_fields.py holds the document to it.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from transformers import Seq2SeqTrainingArguments

from benchmarks.common.table import markdown
from plait.hf.fields import FIELDS, SEQ2SEQ

DOCUMENT = Path(__file__).parents[1] / "docs" / "trainer.md"
BEGIN, END = "<!-- tools/trainer_fields.py -->\n", "<!-- end -->\n"


def table() -> str:
    """The table, as markdown, in the order of Transformers."""
    known = FIELDS | SEQ2SEQ
    rows = []
    for field in fields(Seq2SeqTrainingArguments):
        entry = known.get(field.name)
        if entry is not None:
            what = "" if entry.what == "as in Transformers" else entry.what
            rows.append((f"`{field.name}`", entry.effect, f"{what}; {entry.remedy}" if entry.remedy else what))
    return markdown(("field", "effect", "what it does, or why not and what to do instead"), rows)


def written(text: str) -> str:
    """The document with the table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{table()}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
