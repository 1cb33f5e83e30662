"""Run every causal language model type of Transformers under four layouts, and load it.

    python -m tools.model_types [--types llama,bart] [--again failed]
    python -m tools.model_types --write      only write the page

It writes docs/reference/model_types.json after every type, so that a run that was stopped goes on,
and model_types.md at the end.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers

from benchmarks.common.report import ROOT, markdown, read, revision, with_sections
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

DATA = ROOT / "docs" / "reference" / "model_types.json"
PAGE = ROOT / "docs" / "reference" / "model_types.md"
SECONDS = 150
"""Limit of a cell. On a quiet machine one takes two seconds."""

COLUMNS = (*LAYOUTS, FOLDER)
Entry = dict[str, Any]


def small(rank: int, world: int, name: str) -> Small:
    return make_small(name)


def last_line(failure: WorkerFailed) -> str:
    """Return the message of a worker's exception, without its traceback."""
    kinds = f"Error|Exception|{CellFailed.__name__}"
    last = message = ""
    for line in filter(str.strip, str(failure).splitlines()):
        last = line
        if line[0].isalpha() and re.search(kinds, line):
            message = line
    text = message or last
    return text.removeprefix(f"{CellFailed.__module__}.{CellFailed.__name__}: ")[:600]


def prepare(pool: Pool, name: str) -> tuple[Entry, TestedModel | None]:
    """Return the entry of a type without cells, and its small model if one builds."""
    try:
        (model,) = pool.run(1, small, name, timeout=SECONDS)
    except WorkerFailed as failure:
        return {"not_small": last_line(failure)}, None
    parameters = next(line for line in model.lines if line.endswith(" parameters"))
    entry = {"parameters": parameters.rpartition(" -> ")[2], "split": round(model.split, 4)}
    entry["exact"] = model.tested.exact
    if not model.tested.left_padding:
        entry["left_padding"] = False
    return entry, model.tested


def cell(pool: Pool, tested: TestedModel, layout: str) -> Entry:
    try:
        if layout == FOLDER:
            with tempfile.TemporaryDirectory() as folder:
                return asdict(pool.run(PROCESSES, load_cell, tested, folder, timeout=SECONDS)[0])
        outcomes = pool.run(PROCESSES, run_cell, tested, layout, timeout=SECONDS)
    except WorkerFailed as failure:
        reason = last_line(failure)
        if reason.startswith(LATE):
            return {"outcome": "refused", "error": None, "reason": reason}
        return {"outcome": "failed", "error": None, "reason": reason}
    if len({outcome.outcome == "refused" for outcome in outcomes}) > 1:
        reason = f"refused on one rank only: {outcomes}"
        return {"outcome": "failed", "error": None, "reason": reason}
    return asdict(outcomes[0])


def sweep(types: Sequence[str], *, again: frozenset[str]) -> None:
    """Run the cells that are missing, and those whose outcome is in `again`."""
    data = read(DATA, {})
    done: dict[str, Entry] = {}
    if data.get("transformers") == transformers.__version__:
        done = data["types"]
    commit = revision()
    pool = Pool()
    try:
        for name in types:
            before = done.get(name, {})
            cells = before.get("cells", {})
            missing = [c for c in COLUMNS if c not in cells or cells[c]["outcome"] in again]
            is_refused = "not_small" in before and "failed" not in again
            if is_refused or not missing:
                continue
            entry, tested = prepare(pool, name)
            print(f"{name}: {entry.get('not_small') or entry['parameters']}", flush=True)
            if tested is not None:
                entry["cells"] = cells
                for layout in missing:
                    outcome = {**cell(pool, tested, layout), "commit": commit}
                    cells[layout] = outcome
                    print(f"{name}: {layout}: {outcome['outcome']} {outcome['reason']}", flush=True)
            done[name] = entry
            store(done)
    finally:
        pool.close()


def store(types: dict[str, Entry]) -> None:
    data = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "not_run": sorted(set(model_types()) - set(types)),
        "types": dict(sorted(types.items())),
    }
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def page(data: Mapping[str, Any]) -> str:
    types: Mapping[str, Entry] = data["types"]
    reasons: dict[str, int] = {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    rows = []
    not_small = []
    for name, entry in types.items():
        if "cells" not in entry:
            not_small.append(f"- `{name}`: {_flat(entry['not_small'])}")
            continue
        row = [name, entry["parameters"].removesuffix(" parameters")]
        for column in COLUMNS:
            cell = entry["cells"].get(column, {"outcome": "not run"})
            outcome = text = cell["outcome"]
            counts[column][outcome] += 1
            if outcome == "exact":
                text = f"{cell['error']:.0e}{'' if entry['exact'] else '*'}"
                if column == "tp 2":
                    text += f", {100 * entry['split']:.0f} % split"
            elif outcome in ("refused", "failed"):
                reason = cell["reason"].replace(f"plan of {name} has", "plan of it has")
                number = reasons.setdefault(reason, len(reasons) + 1)
                text = f"{outcome.replace('failed', '**failed**')} ({number})"
            row.append(text)
        rows.append(row)
    outcomes = ("exact", "refused", "failed")
    totals = []
    for layout in LAYOUTS:
        totals.append([layout, *(str(counts[layout][outcome]) for outcome in outcomes)])
    loads = ("slices", "in full", "refused", "failed")
    loaded = ", ".join(f"{counts[FOLDER][outcome]} {outcome}" for outcome in loads)
    parts = [
        f"{len(types)} types; {len(rows)} build small. Transformers {data['transformers']}, torch "
        f"{data['torch']}.\n",
        markdown(("layout", *outcomes), totals),
        "",
        f"From a folder: {loaded}.",
        "",
        markdown(("type", "parameters", *COLUMNS), rows),
        "",
        "## Reasons",
        "",
        *(f"{number}. {_flat(reason)}" for reason, number in reasons.items()),
    ]
    if not_small:
        parts += ["", "## Not compared: no small version builds and runs", "", *not_small]
    if data["not_run"]:
        names = ", ".join(data["not_run"])
        parts += ["", "## Not run yet", "", f"`make model-types` goes on with them: {names}."]
    text = "\n".join(parts).rstrip() + "\n"
    return with_sections(PAGE, {"results": text})


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default="", help="with commas between; default: all")
    parser.add_argument("--again", default="", help="outcomes to repeat, with commas between")
    parser.add_argument("--write", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    if not options.write:
        types = options.types.split(",") if options.types else model_types()
        sweep(types, again=frozenset(options.again.split(",")))
    PAGE.write_text(page(read(DATA)))


if __name__ == "__main__":
    main(sys.argv[1:])
