"""The page that is written from the counts."""

from collections.abc import Mapping
from typing import Any

from benchmarks.common.report import markdown

COUNTS = ("kernels", "copies", "collectives", "waits")
SIDES = ("plait", "torch")
AIM = 1.03
"""Most kernels of Plait, as a multiple of those of plain torch."""


def section(record: Mapping[str, Any]) -> str:
    layouts = record["layouts"]
    others = [title for name in COUNTS[1:] for title in (name, "torch's")]
    rows = []
    for row in layouts.values():
        kernels = (str(row[side]["kernels"]) for side in SIDES)
        cells = (str(row[side][name]) for name in COUNTS[1:] for side in SIDES)
        rows.append((row["title"], *kernels, f"{ratio(row):.3f}", *cells))
    table = markdown(("layout", "kernels", "torch's", "ratio", *others), rows)
    within = sum(ratio(row) <= AIM for row in layouts.values())
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{table}\n"
        f"{within} of {len(rows)} layouts launch at most {AIM} times the kernels of plain torch, "
        f"which is the aim. {_notes(layouts)}Counted on {machine['date'][:10]} with {versions}.\n"
    )


def ratio(row: Mapping[str, Any]) -> float:
    return float(row["plait"]["kernels"] / row["torch"]["kernels"])


def _notes(layouts: Mapping[str, Any]) -> str:
    notes = ""
    if any(row["torch"]["waits"] for row in layouts.values()):
        notes += "The waits of plain torch are Transformers' search for packed sequences in every "
        notes += "forward, which Plait leaves out where a model counts positions itself. "
    if layouts["zero-3-bf16"]["plait"]["waits"]:
        notes += "Plait's wait in bf16 is `bf16.check_grad_overflow`, DeepSpeed's default; `false` "
        notes += "removes it. "
    return notes
