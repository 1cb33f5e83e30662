"""MISSION Z9: the recipes in `examples/` are files that load, resolve for the machines they name, and can be laid out."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.layout import app
from plait.config.resolving.resolve import load

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {
    # name: (machines, devices of each, parameters in billions, ZeRO stage, what its layout says)
    "medium_zero2": (1, 8, 1.3, 2, {"dp_shard": 8}),
    "huge_3d": (128, 8, 175, 1, {"pp": 8, "dp_shard": 16, "tp": 8}),
    "huge_zero3": (8, 8, 69, 3, {"dp_shard": 64}),
    "scarce_offload": (1, 1, 6.7, 3, {}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    """Degrees, size, and states that the recipe's devices hold."""
    machines, devices, billions, stage, degrees = RECIPES[name]
    file = EXAMPLES / f"{name}.json"
    assert load(file).zero_optimization.stage == stage
    done = CliRunner().invoke(
        app, [str(file), "--nnodes", str(machines), "--nproc-per-node", str(devices), "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {axis: degree for axis, degree in told["layout"].items() if degree > 1} == degrees
    states = sum(told["memory"][kind] for kind in ("parameters", "gradients", "optimizer"))
    ranks = machines * devices
    assert states == pytest.approx(16e9 * billions / ranks, rel=0.15), (
        "float32 masters, gradients and two moments, shared out"
    )
    if name == "huge_3d":
        ranks_costs = [
            sum(row["cost"] for row in told["stages"] if row["rank"] == rank) for rank in range(8)
        ]
        assert len(told["stages"]) == 16
        assert max(ranks_costs) / (sum(ranks_costs) / 8) < 1.05


def test_every_example_is_here():
    """A new file gets a row."""
    assert {path.stem for path in EXAMPLES.glob("*.json")} == {*RECIPES, "quickstart"}
