"""Write the tables of docs/how-to/trainer.md with the effect of every field of
`TrainingArguments`, `SFTConfig` and `DPOConfig`.

    python -m tools.trainer_fields [--write]

tests/unit/hf/test_fields.py compares the document with it.
"""

import sys

from benchmarks.common.report import ROOT, markdown, with_section
from plait.hf.fields import FIELDS, SEQ2SEQ, TRL

DOCUMENT = ROOT / "docs" / "how-to" / "trainer.md"
MARKS = {"tools/trainer_fields.py": FIELDS | SEQ2SEQ, "tools/trainer_fields.py: TRL": TRL}


def written(text: str) -> str:
    for mark, fields in MARKS.items():
        rows = []
        for name, field in fields.items():
            what = "" if field.what in ("as in Transformers", "as in TRL") else field.what
            meaning = f"{what}; {field.remedy}" if field.remedy else what
            rows.append((f"`{name}`", field.effect, meaning))
        header = ("field", "effect", "what it does, or why not and what to do instead")
        text = with_section(text, mark, f"{markdown(header, rows)}\n")
    return text


if __name__ == "__main__":
    document = written(DOCUMENT.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        DOCUMENT.write_text(document, encoding="utf-8")
    else:
        print(document)
