"""Run every model type that Transformers maps as a causal language model under four layouts, and load it; write docs/reference/model_types.md.

Run: make model-types, or PYTHONPATH=src python -m tools.model_types [--types llama,bart] [--layouts "tp 2,pp 2"] [--write]

Results are kept after every type in build/results/model_types.json, so a run that is stopped goes on where it was; --again all,
failed, refused or exact repeats such cells. --write alone only writes docs/reference/model_types.json and the page. Two processes of gloo on the
CPU stay alive from cell to cell; one that dies or hangs is replaced.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.report import markdown
from plait.verify.model_under_test import TestedModel
from tests.measured.loaded_types import FOLDER, load_cell
from tests.measured.model_types import (
    LATE,
    LAYOUTS,
    PROCESSES,
    CellFailed,
    Small,
    make_small,
    model_types,
    run_cell,
)
from tests.pool import Pool, WorkerFailed

ROOT = Path(__file__).parents[1]
STATE = ROOT / "build" / "results" / "model_types.json"
DATA, PAGE = (
    ROOT / "docs" / "reference" / "model_types.json",
    ROOT / "docs" / "reference" / "model_types.md",
)
SECONDS = 150
"""A cell that takes longer hangs; on a quiet machine one takes two."""

COLUMNS = (*LAYOUTS, FOLDER)
Entry = dict[str, Any]


def small(rank: int, world: int, name: str) -> Small:
    """Runs in a worker."""
    return make_small(name)


def last_line(failure: WorkerFailed) -> str:
    """What a worker's exception says, without its traceback."""
    lines = [line for line in str(failure).splitlines() if line.strip()]
    starts = [
        line
        for line in lines
        if line[:1].isalpha()
        and ("Error" in line or "Exception" in line or CellFailed.__name__ in line)
    ]
    text = (starts or lines)[-1]
    return text.removeprefix(f"{CellFailed.__module__}.{CellFailed.__name__}: ")[:600]


def prepare(pool: Pool, name: str, version: str) -> Entry:
    """The entry of a type, made small, without cells."""
    try:
        (made,) = pool.run(1, small, name, timeout=SECONDS)
    except WorkerFailed as failure:
        return {"transformers": version, "not_small": last_line(failure)}
    return {
        "transformers": version,
        "tested": made.tested.model_dump(),
        "parameters": next(line for line in made.lines if line.endswith(" parameters")).rpartition(
            " -> "
        )[2],
        "lines": list(made.lines),
        "split": round(made.split, 4),
        "cells": {},
    }


def cell(pool: Pool, entry: Entry, layout: str) -> Entry:
    """The outcome of one layout."""
    tested = TestedModel.model_validate(entry["tested"])
    try:
        if layout == FOLDER:
            with tempfile.TemporaryDirectory() as folder:
                return asdict(pool.run(PROCESSES, load_cell, tested, folder, timeout=SECONDS)[0])
        found = pool.run(PROCESSES, run_cell, tested, layout, timeout=SECONDS)
    except WorkerFailed as failure:
        reason = last_line(failure)
        return {
            "outcome": "refused" if reason.startswith(LATE) else "failed",
            "error": None,
            "reason": reason,
        }
    if len({one.outcome == "refused" for one in found}) > 1:
        return {"outcome": "failed", "error": None, "reason": f"refused on one rank only: {found}"}
    return asdict(found[0])


def revision() -> str:
    """Of what runs; a table may come from several."""
    found = subprocess.run(
        ["git", "describe", "--always", "--tags", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


def sweep(
    types: Sequence[str], layouts: Sequence[str], *, again: frozenset[str], jobs: int
) -> None:
    """Fill what is missing or asked for again."""
    import transformers

    state: dict[str, Entry] = json.loads(STATE.read_text()) if STATE.exists() else {}
    written = json.loads(DATA.read_text()) if DATA.exists() else {"types": {}}
    pools: queue.SimpleQueue[Pool] = queue.SimpleQueue()
    for _ in range(jobs):
        pools.put(Pool())
    lock, commit = threading.Lock(), revision()

    def one_type(name: str) -> None:
        pool = pools.get()
        try:
            make(pool, name)
            run(pool, name)
        finally:
            pools.put(pool)
        with lock:
            STATE.parent.mkdir(parents=True, exist_ok=True)
            STATE.with_suffix(".partial").write_text(json.dumps(state, indent=1))
            STATE.with_suffix(".partial").rename(STATE)

    def make(pool: Pool, name: str) -> None:
        entry = state.get(name)
        if (
            entry is None
            or entry["transformers"] != transformers.__version__
            or ("not_small" in entry and "failed" in again)
        ):
            state[name] = prepare(pool, name, transformers.__version__)
            before = written["types"].get(name, {})
            if "cells" in state[name] and written.get("transformers") == transformers.__version__:
                state[name]["cells"] = before.get(
                    "cells", {}
                )  # a fresh clone goes on where the page ends
            print(
                f"{name}: {state[name].get('not_small') or state[name]['parameters']}", flush=True
            )

    def run(pool: Pool, name: str) -> None:
        entry = state[name]
        for layout in layouts if "tested" in entry else ():
            before = entry["cells"].get(layout)
            if before is None or before["outcome"] in again:
                after = {**cell(pool, entry, layout), "commit": commit}
                entry["cells"] = {**entry["cells"], layout: after}
                change = (
                    f" (before: {before['outcome']})"
                    if before and before["outcome"] != after["outcome"]
                    else ""
                )
                error = f" {after['error']:.1e}" if after["error"] is not None else ""
                print(
                    f"{name}: {layout}: {after['outcome']}{error} {after['reason']}{change}",
                    flush=True,
                )

    try:
        with ThreadPoolExecutor(jobs) as threads:
            for done in [threads.submit(one_type, name) for name in types]:
                done.result()
    finally:
        while not pools.empty():
            pools.get().close()


HEAD = """# Model types

Every architecture that Transformers {transformers} builds with `AutoModelForCausalLM`, made small and trained for two steps in float64 on
two CPU processes. Generated by `make model-types` from torch {torch} on the CPU; the data is [model_types.json](model_types.json).

- **exact**: losses, gradient norms, every gradient and every parameter equal those of one process, within 1e-10 (1e-7 where the model
  itself rounds to float32, marked *). The number is the largest relative error. The reference shares no code with Plait
  (`verify/independent.py`); micro-batches have different lengths, rows padded on the left and on the right, and one has no target.
- **refused**: before training starts or in the first step, with a reason; the numbers refer to the list below the table.
- **failed**: a defect, listed below. Do not train with this layout.

- **from a folder**: `plait.from_pretrained` of what `save_pretrained` wrote, at ZeRO 3: *slices* where each process read the parts that it
  keeps, *in full* where Transformers loaded all of it in every process, because it converts the files of that family or its class makes
  parameters on the CPU. Parameters and buffers are those that Transformers loads, bit for bit.

`plait verify FILE --model NAME` makes the same comparison for your own model and layout.
"""


def page(data: Mapping[str, Any]) -> str:
    """The document, from docs/reference/model_types.json."""
    types: Mapping[str, Entry] = data["types"]
    built = {name: entry for name, entry in types.items() if "cells" in entry}
    reasons: dict[str, int] = {}

    def shown(name: str, entry: Entry, layout: str) -> str:
        found = entry["cells"].get(layout)
        if found is None:
            return "not run"
        if found["outcome"] in ("slices", "in full"):
            return str(found["outcome"])
        if found["outcome"] == "exact":
            split = f", {100 * entry['split']:.0f} % split" if layout == "tp 2" else ""
            return f"{found['error']:.0e}{'' if entry['exact'] else '*'}{split}"
        number = reasons.setdefault(
            found["reason"].replace(f"plan of {name} has", "plan of it has"), len(reasons) + 1
        )
        return f"{'refused' if found['outcome'] == 'refused' else '**failed**'} ({number})"

    layouts = [
        layout for layout in LAYOUTS if any(layout in entry["cells"] for entry in built.values())
    ]
    rows = [
        (
            name,
            entry["parameters"].removesuffix(" parameters"),
            *(shown(name, entry, column) for column in (*layouts, FOLDER)),
        )
        for name, entry in built.items()
    ]
    counts = {
        layout: Counter(
            entry["cells"][layout]["outcome"]
            for entry in built.values()
            if layout in entry["cells"]
        )
        for layout in layouts
    }
    summary = markdown(
        ("layout", "exact", "refused", "failed"),
        [(one, *(str(counts[one][o]) for o in ("exact", "refused", "failed"))) for one in layouts],
    )
    loaded = Counter(
        entry["cells"][FOLDER]["outcome"] for entry in built.values() if FOLDER in entry["cells"]
    )
    read = ", ".join(
        f"{loaded[outcome]} {outcome}" for outcome in ("slices", "in full", "refused", "failed")
    )
    parts = [
        HEAD.format(**data),
        f"{len(types)} types; {len(built)} build small.\n",
        summary,
        "",
        f"From a folder: {read}.",
    ]
    parts += ["", markdown(("type", "parameters", *layouts, FOLDER), rows)]
    parts += [
        "",
        "## Reasons",
        "",
        *(f"{number}. {_flat(reason)}" for reason, number in reasons.items()),
    ]
    rest = [(name, entry["not_small"]) for name, entry in types.items() if "cells" not in entry]
    if rest:
        parts += [
            "",
            "## Not compared: no small version builds and runs",
            "",
            *(f"- `{name}`: {_flat(why)}" for name, why in rest),
        ]
    if data["not_run"]:
        parts += [
            "",
            "## Not run yet",
            "",
            f"`make model-types` goes on with them: {', '.join(data['not_run'])}.",
        ]
    return "\n".join(parts).rstrip() + "\n"


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def write() -> None:
    """docs/reference/model_types.json and docs/reference/model_types.md from what was run here, and what they have of other types with this Transformers."""
    import torch
    import transformers

    state: dict[str, Entry] = json.loads(STATE.read_text())
    written = json.loads(DATA.read_text()) if DATA.exists() else {}
    types: dict[str, Entry] = (
        written["types"] if written.get("transformers") == transformers.__version__ else {}
    )
    for name in sorted(state):
        entry = state[name]
        if "tested" not in entry:
            types[name] = {"not_small": entry["not_small"]}
            continue
        left = {} if entry["tested"]["left_padding"] else {"left_padding": False}
        types[name] = {
            "parameters": entry["parameters"],
            "split": entry["split"],
            "exact": entry["tested"]["exact"],
            **left,
            "cells": entry["cells"],
        }
    data = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "not_run": sorted(set(model_types()) - set(types)),
        "types": dict(sorted(types.items())),
    }
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Every causal model type under every layout.")
    parser.add_argument("--types", default="")
    parser.add_argument("--layouts", default=",".join(COLUMNS))
    parser.add_argument("--again", default="", help="all, or outcomes with commas between")
    parser.add_argument(
        "--jobs", type=int, default=1, help="types at a time, of two processes each"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the page from what was run before, and run nothing",
    )
    given = parser.parse_args(arguments)
    if not given.write:
        wanted = tuple(column for column in COLUMNS if column in given.layouts.split(","))
        again = frozenset(
            ("exact", "slices", "in full", "refused", "failed")
            if given.again == "all"
            else given.again.split(",")
        )
        sweep(
            tuple(given.types.split(",")) if given.types else model_types(),
            wanted,
            again=again,
            jobs=given.jobs,
        )
    write()


if __name__ == "__main__":
    main(sys.argv[1:])
