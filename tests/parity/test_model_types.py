"""Model types of Transformers under tensor, sequence and pipeline parallelism and ZeRO 3, and loaded from a folder: what
docs/reference/model_types.json says still holds.

A cover of the kinds runs in `make test`, all types in `make proof`. A cell that is exact or refused must stay so; one that failed may
become either.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.measured.loaded_types import FOLDER, Loaded, load_cell
from tests.measured.model_types import (
    LATE,
    LAYOUTS,
    PROCESSES,
    Cell,
    make_small,
    model_types,
    run_cell,
)
from tests.pool import WorkerFailed

ROOT = Path(__file__).parents[2]
COVER = ("gpt2", "bart", "mixtral", "mamba", "bloom")
"""Fused weights transposed, learned positions; a decoder with a norm before its blocks; grouped heads, experts; no attention; interleaved
heads with biases."""


@cache
def known():
    """What was found and is documented."""
    found: dict[str, Any] = json.loads(
        (ROOT / "docs" / "reference" / "model_types.json").read_text()
    )
    return found["types"]


@cache
def tool():
    spec = importlib.util.spec_from_file_location(
        "plait_model_types_tool", ROOT / "tools" / "model_types.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_cells(rank, world, small):
    """Runs in a worker."""
    return {layout: run_cell(rank, world, small.tested, layout) for layout in LAYOUTS}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in COVER else pytest.mark.proof)
        for n in (*COVER, *sorted({*known()} - {*COVER}))
    ],
)
def test_a_type_is_exact_or_refused(pool, name):
    """A3 among them: a parameter of a stage that is used and not there is no longer right by luck."""
    entry = known()[name]
    if "cells" not in entry:
        pytest.skip(entry["not_small"])
    small = make_small(name)
    before = {
        layout: entry["cells"][layout]["outcome"] for layout in LAYOUTS if layout in entry["cells"]
    }
    if name in COVER:
        assert "failed" not in before.values()
        after = {
            layout: cell.outcome
            for layout, cell in pool.run(PROCESSES, all_cells, small)[0].items()
        }
        assert after == before
        return
    for layout in LAYOUTS:  # one at a time, because one that fails ends its workers
        if before.get(layout, "failed") == "failed":
            continue
        try:
            cell = pool.run(PROCESSES, run_cell, small.tested, layout)[0]
        except WorkerFailed as failure:
            cell = Cell("refused" if LATE in str(failure) else "failed", reason=str(failure))
        assert cell.outcome == before[layout], f"{layout}: {cell}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in COVER else pytest.mark.proof)
        for n in (*COVER, *sorted({*known()} - {*COVER}))
    ],
)
def test_a_type_is_loaded_in_slices_or_in_full(pool, tmp_path, name):
    entry = known()[name]
    if "cells" not in entry:
        pytest.skip(entry["not_small"])
    before = entry["cells"][FOLDER]
    found = pool.run(PROCESSES, load_cell, make_small(name).tested, str(tmp_path))
    assert (
        found[0] == Loaded(before["outcome"], before["reason"])
        and found[1].outcome == found[0].outcome != "failed"
    )


def test_the_page_is_made_from_the_data():
    assert (ROOT / "docs" / "reference" / "model_types.md").read_text() == tool().page(
        json.loads((ROOT / "docs" / "reference" / "model_types.json").read_text())
    )
    rest = json.loads((ROOT / "docs" / "reference" / "model_types.json").read_text())["not_run"]
    assert {*known(), *rest} == set(model_types()), "run `make model-types` for this Transformers"
