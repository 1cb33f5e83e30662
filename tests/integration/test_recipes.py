"""The recipes in `examples/` load, resolve for their machines, and have the expected layout."""

import json
from pathlib import Path

import pytest

from plait.config.resolving.resolve import load
from tests.integration.commands import run_plait

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {
    # name: (machines, devices per machine, parameters in billions, ZeRO stage, degrees)
    "medium_zero2": (1, 8, 1.3, 2, {"dp_shard": 8}),
    "huge_3d": (128, 8, 175, 1, {"pp": 8, "dp_shard": 16, "tp": 8}),
    "huge_zero3": (8, 8, 69, 3, {"dp_shard": 64}),
    "scarce_offload": (1, 1, 6.7, 3, {}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name, capsys):
    machines, devices, billions, stage, degrees = RECIPES[name]
    file = EXAMPLES / f"{name}.json"
    assert load(file).zero_optimization.stage == stage
    run_plait(f"layout {file} --nnodes {machines} --nproc-per-node {devices} --json")
    report = json.loads(capsys.readouterr().out)
    assert {axis: degree for axis, degree in report["layout"].items() if degree > 1} == degrees
    states = sum(report["memory"][kind] for kind in ("parameters", "gradients", "optimizer"))
    # Float32 masters, gradients and two moments, sharded over all ranks.
    assert states == pytest.approx(16e9 * billions / (machines * devices), rel=0.15)

    if name == "huge_3d":
        stages = report["stages"]
        assert len(stages) == 16
        costs = [sum(row["cost"] for row in stages if row["rank"] == rank) for rank in range(8)]
        assert max(costs) / (sum(costs) / 8) < 1.05


def test_every_example_has_a_row():
    assert {path.stem for path in EXAMPLES.glob("*.json")} == {*RECIPES, "quickstart"}
