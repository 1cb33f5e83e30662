"""The loops of docs/how-to/migration.md have the same losses and weights before and after."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli.main import main
from plait.config.convert.conversion import convert
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import trainers
from tests.table import check_rows

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "migration.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python\n# ([^\n]*?) *\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
"""Code blocks of the page, keyed by their title."""


def run_block(title, changes):
    """Run a block with other settings on a model of its own, and return losses and weights."""
    variables: dict[str, Any] = {}
    exec(BLOCKS["both"], variables)
    model = variables["model"]
    # Workers have a process group already.
    code = BLOCKS[title].replace("dist.init_process_group()\n", "")
    for before, after in changes.items():
        assert before in code or title.startswith("theirs")
        code = code.replace(before, after)
    exec(code, variables)

    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = full_tensor_on_cpu(parameter).detach().clone()
    for handle in ("engine", "sharded"):
        if handle in variables:
            variables[handle].close()
    return variables["losses"], weights


def run_blocks(rank, world, titles, changes):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        return [run_block(title, changes) for title in titles]


def assert_close(actual, expected):
    """Compare losses and weights. A pipeline stage has only its own weights."""
    losses, weights = actual
    expected_losses, expected_weights = expected
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, tensor in weights.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(
            tensor, expected_weights[name], rtol=1e-5, atol=1e-5, msg=message
        )


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("ddp", 0),
        ("accelerate", 0),
        ("fsdp2", 3),
        *(pytest.param("ddp", stage, marks=pytest.mark.proof) for stage in (1, 2, 3)),
    ],
)
def test_a_loop(pool, kind, stage):
    changes = {'"stage": 0': f'"stage": {stage}'} if kind == "ddp" else {}
    titles = [f"theirs: {kind}", f"plait: {kind}"]
    for expected, actual in pool.run(2, run_blocks, titles, changes):
        assert_close(actual, expected)
        losses, _ = actual
        assert len(losses) >= 2 and losses[0] != losses[-1]


@pytest.mark.parametrize("axis", ["pp", pytest.param("tp", marks=pytest.mark.proof)])
def test_the_loop_for_any_layout_equals_one_process(pool, axis):
    variables: dict[str, Any] = {}
    exec(BLOCKS["both"], variables)
    model = variables["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in variables["tokens"].split(2):
        loss = sum(model(input_ids=ids, labels=ids).loss / 2 for ids in step)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    expected = (losses, dict(model.named_parameters()))
    changes = {'"pp": 2': f'"{axis}": 2'}
    for (actual,) in pool.run(2, run_blocks, ["plait: any layout"], changes):
        assert_close(actual, expected)


def test_files_and_flags_of_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"^```yaml\n# accelerate.yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "accelerate.yaml").write_text(text)
    commands = [line for line in PAGE.splitlines() if line.startswith("plait config")]
    assert len(commands) == 4
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command)[1:])
        assert end.value.code == 0


ROWS = re.findall(r"^\| `([^`]*)` \| `(\{\"[^`]*)` \|$", PAGE, re.MULTILINE)


def test_table_of_accelerate_files(tmp_path):
    """The second column is all that becomes of a file, besides `run.processes`."""

    def check(row):
        theirs, ours = row
        (tmp_path / "file.yaml").write_text(theirs)
        settings = convert(tmp_path / "file.yaml").tree
        settings.pop("run", None)
        assert settings == json.loads(ours)

    rows = {row[0]: row for row in ROWS if row[0].startswith("{")}
    assert len(rows) == 9
    check_rows(rows, check)


def test_table_of_megatron_flags():
    """The second column is all that becomes of flags, besides Megatron's own defaults."""

    def check(row):
        theirs, ours = row
        conversion = convert(shlex.split(theirs))
        expected = json.loads(ours)
        assert {name: conversion.tree[name] for name in expected} == expected
        assert not conversion.problems

    rows = {row[0]: row for row in ROWS if row[0].startswith("--")}
    assert len(rows) == 11
    check_rows(rows, check)
