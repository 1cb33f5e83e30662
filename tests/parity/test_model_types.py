"""Model types of Transformers on layouts and loaded from a folder, as the documentation says.

A few types with different properties run in `make test`, all types in `make proof`. A cell of
docs/reference/model_types.json that is exact or refused must stay so. One that failed may become
either.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest

from tests.covers import proof_after
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
DATA = json.loads((ROOT / "docs" / "reference" / "model_types.json").read_text())
TYPES = DATA["types"]
QUICK = (
    "gpt2",  # transposed fused weights, learned positions
    "bart",  # a decoder with a norm before its blocks
    "mixtral",  # grouped heads, experts
    "mamba",  # no attention
    "bloom",  # interleaved heads with biases
)
EVERY_TYPE = pytest.mark.parametrize(
    "name", proof_after(len(QUICK), [*QUICK, *sorted({*TYPES} - {*QUICK})])
)


@cache
def tool():
    path = ROOT / "tools" / "model_types.py"
    spec = importlib.util.spec_from_file_location("plait_model_types_tool", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented_cells(name):
    """Return the documented outcomes of a type, or skip the test."""
    if "cells" not in TYPES[name]:
        pytest.skip(TYPES[name]["not_small"])
    return TYPES[name]["cells"]


def run_all_layouts(rank, world, small):
    """Runs on every rank."""
    outcomes = {}
    for layout in LAYOUTS:
        outcomes[layout] = run_cell(rank, world, small.tested, layout).outcome
    return outcomes


@EVERY_TYPE
def test_a_type_is_exact_or_refused(pool, name):
    documented = documented_cells(name)
    small = make_small(name)
    expected = {}
    for layout in LAYOUTS:
        if layout in documented:
            expected[layout] = documented[layout]["outcome"]
    if name in QUICK:
        assert "failed" not in expected.values()
        assert pool.run(PROCESSES, run_all_layouts, small)[0] == expected
        return

    # One at a time, because a layout that fails ends its workers.
    for layout in LAYOUTS:
        if expected.get(layout, "failed") == "failed":
            continue
        try:
            cell = pool.run(PROCESSES, run_cell, small.tested, layout)[0]
        except WorkerFailed as failure:
            cell = Cell("refused" if LATE in str(failure) else "failed", reason=str(failure))
        assert cell.outcome == expected[layout], f"{layout}: {cell}"


@EVERY_TYPE
def test_a_type_is_loaded_in_slices_or_in_full(pool, tmp_path, name):
    documented = documented_cells(name)[FOLDER]
    results = pool.run(PROCESSES, load_cell, make_small(name).tested, str(tmp_path))
    assert results[0] == Loaded(documented["outcome"], documented["reason"])
    assert results[1].outcome == results[0].outcome != "failed"


def test_the_page_is_generated_from_the_data():
    page = (ROOT / "docs" / "reference" / "model_types.md").read_text()
    assert page == tool().page(DATA)
    names = {*TYPES, *DATA["not_run"]}
    assert names == set(model_types()), "run `make model-types` for this version of Transformers"
