"""Compare the planner's memory with dry runs, and write docs/explanation/planner_memory.md.

    python -m benchmarks.planner_memory [--quick]    minutes to tens of minutes

All tensors are fake. Bytes are the same on every machine without a GPU.
"""

from typing import Any

from benchmarks.common.command import command
from benchmarks.common.report import RESULTS, ROOT, markdown, with_sections, write
from benchmarks.planner_memory.clusters import tried
from benchmarks.planner_memory.layouts import CASES, compare, describe
from plait.sizes import GIB, MIB

PAGE = ROOT / "docs/explanation/planner_memory.md"


def main() -> None:
    quick = command("planner_memory", __doc__).parse_args().quick
    small = []
    for case in CASES[:2] if quick else CASES:
        for compared in compare(case):
            run = compared.run
            row = {"layout": describe(case), "stage": run.stage}
            small.append(row | {"predicted": run.predicted["peak"], "dry_run": run.measured.peak})
    if quick:
        print(small_section(small))
        return
    result = {"small": small, "tried": tried()}
    write(RESULTS / "planner_memory.json", result, digits=12)
    PAGE.write_text(page(result), encoding="utf-8")


def page(result: dict[str, Any]) -> str:
    small = small_section(result["small"])
    return with_sections(PAGE, {"small": small, "tried": tried_section(result["tried"])})


def small_section(rows: list[dict[str, Any]]) -> str:
    cells = []
    errors = []
    for row in rows:
        error = row["predicted"] / row["dry_run"] - 1
        errors.append(abs(error))
        sizes = [f"{row[name] / MIB:.2f}" for name in ("predicted", "dry_run")]
        cells.append([row["layout"], str(row["stage"]), *sizes, f"{error:+.2%}"])
    count = f"{len({row['layout'] for row in rows})} layouts, {len(errors)} ranks"
    header = ("layout", "rank", "predicted MiB", "dry run MiB", "error")
    table = markdown(header, cells, right=())
    return f"{count}; the largest error is {max(errors):.2%}.\n\n{table}"


def tried_section(rows: list[dict[str, Any]]) -> str:
    header = ("model", "cluster", "layout", "rank", "micro-batches run", "predicted GiB")
    cells = []
    for row in rows:
        cells.append([
            row["model"],
            f"{row['gpus']:,} {row['gpu']}",
            row["layout"],
            f"{row['rank']:,} ({row['stage']})",
            f"{row['run']} of {row['accumulation']}",
            f"{row['predicted'] / GIB:.2f}",
            f"{row['dry_run'] / GIB:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['seconds']:.0f}",
        ])  # fmt: skip
    return markdown((*header, "dry run GiB", "ratio", "seconds"), cells, right=())


if __name__ == "__main__":
    main()
