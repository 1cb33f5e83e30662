"""The loops of docs/how-to/migration.md: theirs and ours on two processes have the same losses and weights."""

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

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "migration.md").read_text(encoding="utf-8")
BLOCKS = {
    title.strip(): code
    for title, code in re.findall(
        r"^```python\n# ([^\n]*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
    )
}
ANY = "plait: any layout"


def run(titles, changes):
    """(losses, weights) of blocks with changed settings, each on a model of its own. The group of the workers is there already."""
    found = []
    for title in titles:
        names: dict[str, Any] = {}
        code = BLOCKS[title].replace("dist.init_process_group()\n", "")
        for before, after in changes.items():
            assert before in code or title.startswith("theirs")
            code = code.replace(before, after)
        exec(BLOCKS["both"], names)
        model = names["model"]
        exec(code, names)
        found.append(
            (
                names["losses"],
                {
                    name: full_tensor_on_cpu(p).detach().clone()
                    for name, p in model.named_parameters()
                },
            )
        )
        for handle in ("engine", "sharded"):
            if handle in names:
                names[handle].close()
    return found


def on_plait(rank, world, titles, changes):
    """Runs in a worker."""
    with trainers.launched(rank, world):
        return run(titles, changes)


def close(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, tensor in found[1].items():
        torch.testing.assert_close(
            tensor,
            wanted[1][name],
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
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
    for theirs, ours in pool.run(2, on_plait, [f"theirs: {kind}", f"plait: {kind}"], changes):
        close(ours, theirs)
        assert len(ours[0]) >= 2 and ours[0][0] != ours[0][-1]


@pytest.mark.parametrize("axis", ["pp", pytest.param("tp", marks=pytest.mark.proof)])
def test_any_layout(pool, axis):
    """Against the same loop in one process."""
    wanted: dict[str, Any] = {}
    exec(BLOCKS["both"], wanted)
    model = wanted["model"]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in wanted["tokens"].split(2):
        found = [model(input_ids=piece, labels=piece).loss / 2 for piece in step]
        losses.append(float(sum(found).detach()))
        sum(found).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for (ours,) in pool.run(2, on_plait, [ANY], {'"pp": 2': f'"{axis}": 2'}):
        close(ours, (losses, dict(model.named_parameters())))


def test_files_and_flags_of_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"^```yaml\n# accelerate.yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "accelerate.yaml").write_text(text)
    lines = [line for line in PAGE.splitlines() if line.startswith("plait config")]
    assert len(lines) == 4
    for line in lines:
        with pytest.raises(SystemExit) as end:
            main(shlex.split(line)[1:])
        assert end.value.code == 0


ROWS = re.findall(r"^\| `([^`]*)` \| `(\{\"[^`]*)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    ("theirs", "ours"), [row for row in ROWS if row[0].startswith(("{", "--"))]
)
def test_a_row(tmp_path, theirs, ours):
    """What a table says of a file is all that becomes of it, besides `run.processes`; of flags, besides Megatron's own defaults."""
    wanted = json.loads(ours)
    if theirs.startswith("{"):
        (tmp_path / "file.yaml").write_text(theirs)
        tree = convert(tmp_path / "file.yaml").tree
        assert {name: value for name, value in tree.items() if name != "run"} == wanted
    else:
        conversion = convert(shlex.split(theirs))
        assert {name: conversion.tree[name] for name in wanted} == wanted
        assert not conversion.problems


def test_there_are_rows_of_both():
    assert (
        sum(theirs.startswith("{") for theirs, _ in ROWS) == 9
        and sum(theirs.startswith("--") for theirs, _ in ROWS) == 11
    )
