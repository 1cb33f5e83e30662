"""Count a training step of ten layouts, of Plait and of plain torch, on a simulated CUDA device.

    python -m benchmarks.step_counts                   about four minutes on two cores; needs g++
    python -m benchmarks.step_counts --layouts tp pp   operator by operator; writes nothing

It writes `benchmarks/results/step_counts.json` and `docs/development/step_counts.md`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from benchmarks.common.command import command
from benchmarks.common.report import RESULTS, ROOT, aligned, markdown, read, store, with_sections
from benchmarks.step_counts.counting import StepCounts, peer_step, plait_step
from benchmarks.step_counts.layouts import LAYOUTS, Layout
from tests.simulated_device.pool import SimulatedPool

PAGE = ROOT / "docs/development/step_counts.md"
COUNTS = ("kernels", "copies", "collectives", "waits")

AIM = 1.03
"""Most kernels of Plait, as a multiple of those of plain torch."""


def main() -> None:
    parser = command("step_counts", __doc__)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, help="only these, with the differences"
    )
    options = parser.parse_args()
    names = ["zero-0"] if options.quick else options.layouts or list(LAYOUTS)
    # Workers of one number of ranks at a time.
    names.sort(key=lambda name: LAYOUTS[name].ranks)
    pool = SimulatedPool()
    rows = {}
    try:
        for name in names:
            rows[name] = counted(pool, LAYOUTS[name], shows=bool(options.layouts))
    finally:
        pool.close()
    if not options.quick and not options.layouts:
        layouts = {name: rows[name] for name in LAYOUTS}
        store("step_counts", {"layouts": layouts}, "torch", "transformers")
        counts = section(read(RESULTS / "step_counts.json"))
        PAGE.write_text(with_sections(PAGE, {"counts": counts}), encoding="utf-8")


def counted(pool: SimulatedPool, layout: Layout, *, shows: bool) -> dict[str, Any]:
    """Count one layout, print it, and return its row of the result."""
    ours = pool.run(layout.ranks, plait_step, layout)
    plait, shardings = zip(*ours, strict=True)
    torch = pool.run(layout.ranks, peer_step, layout, shardings[0])
    counts = {"plait": totals(plait), "torch": totals(torch)}
    cells = [(side, *map(str, row.values())) for side, row in counts.items()]
    print(aligned((layout.title, *COUNTS), cells))
    if shows:
        for name, count in difference(plait, torch).most_common():
            if count:
                print(f"  {count:+5d} {name}")
    return {"title": layout.title, **counts}


def totals(ranks: Sequence[StepCounts]) -> dict[str, int]:
    return {name: sum(map(attrgetter(name), ranks)) for name in COUNTS}


def difference(plait: Sequence[StepCounts], torch: Sequence[StepCounts]) -> Counter[str]:
    """Return how many more kernels of each operator Plait launches on all ranks together."""
    more: Counter[str] = Counter()
    for ours, theirs in zip(plait, torch, strict=True):
        more.update(ours.operators)
        more.subtract(theirs.operators)
    return more


def section(record: Mapping[str, Any]) -> str:
    layouts = record["layouts"]
    header = ["layout"]
    for name in COUNTS:
        header += [name, "torch's"]
    header.insert(3, "ratio")
    rows = []
    within = 0
    for row in layouts.values():
        cells = [row["title"]]
        for name in COUNTS:
            cells += [str(row["plait"][name]), str(row["torch"][name])]
        cells.insert(3, f"{ratio(row):.3f}")
        rows.append(cells)
        within += ratio(row) <= AIM
    table = markdown(header, rows)
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


if __name__ == "__main__":
    main()
