"""Reports of a rank on its rows, in the process that runs them."""

import json
import sys
import time
import types

import pytest
import torch

from plait.cli.validating.worker import _Events, run_row
from plait.validation.rows import NotRun, verdict


def passes(context, settings):
    context.progress({"rounds": 1})
    assert 0 < context.row_deadline - time.monotonic() <= 5
    return verdict([], settings=settings)


def runs_out(context, settings):
    elements = torch.zeros(settings["elements"]).numel()
    raise torch.OutOfMemoryError(f"CUDA out of memory with {elements} elements\nmore lines")


def cannot_run(context, settings):
    raise NotRun("no links")


@pytest.fixture
def checks():
    """A module of checks that has the functions above."""
    module = types.ModuleType("plait.validation.of_this_test")
    for function in (passes, runs_out, cannot_run):
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


@pytest.mark.usefixtures("checks")
def test_a_process_continues_after_a_failed_row(context, tmp_path):
    """A row that runs out of memory has failed with its stack, and the next row runs."""
    file = tmp_path / "events.jsonl"
    events = _Events(file)
    for name in ("runs_out", "cannot_run", "passes"):
        row = {"name": name, "check": f"of_this_test:{name}", "planned_seconds": 5}
        run_row(context, {**row, "settings": {"elements": 3}}, events)

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ended = {line["row"]: line for line in lines if line["event"] == "ended"}
    failed = ended["runs_out"]
    assert failed["outcome"] == "failed"
    assert failed["reason"] == "OutOfMemoryError: CUDA out of memory with 3 elements"
    assert failed["numbers"]["stack"][-1].endswith("runs_out")
    assert not any(frame.startswith("/") for frame in failed["numbers"]["stack"])
    not_run = ended["cannot_run"]
    assert (not_run["outcome"], not_run["reason"]) == ("not run", "no links")
    assert ended["passes"]["outcome"] == "passed"
    assert [line["event"] for line in lines[-3:]] == ["began", "progress", "ended"]
