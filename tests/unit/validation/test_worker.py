"""What a rank reports of a row, in the process that runs it."""

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
    kept = torch.zeros(settings["kept"])
    raise torch.OutOfMemoryError(f"CUDA out of memory beside {kept.numel()} elements\nmore lines")


def cannot(context, settings):
    raise NotRun("no links")


@pytest.fixture
def checks():
    """The functions above as a module of checks."""
    module = types.ModuleType("plait.validation.of_this_test")
    for function in (passes, runs_out, cannot):
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


@pytest.mark.usefixtures("checks")
def test_a_process_outlives_its_rows(context, tmp_path):
    """A row that runs out of memory has failed with its stack, and the next row runs."""
    events = _Events(tmp_path / "events.jsonl")
    for name in ("runs_out", "cannot", "passes"):
        row = {
            "name": name,
            "check": f"of_this_test:{name}",
            "planned_seconds": 5,
            "settings": {"kept": 3},
        }
        run_row(context, row, events)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    ended = {line["row"]: line for line in lines if line["event"] == "ended"}
    failed = ended["runs_out"]
    assert failed["outcome"] == "failed"
    assert failed["reason"] == "OutOfMemoryError: CUDA out of memory beside 3 elements"
    assert failed["numbers"]["stack"][-1].endswith("runs_out")
    assert not any(frame.startswith("/") for frame in failed["numbers"]["stack"])
    assert (ended["cannot"]["outcome"], ended["cannot"]["reason"]) == ("not run", "no links")
    assert ended["passes"]["outcome"] == "passed"
    assert [line["event"] for line in lines[-3:]] == ["began", "progress", "ended"]
