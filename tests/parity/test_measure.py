"""Links are measured between real processes, in a run and by `plait doctor --links`."""

import json
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait.cluster.mesh import split_by_node
from plait.comm import measure
from plait.comm.choose import (
    Cost,
    GroupLinks,
    Level,
    algorithm_seconds,
    choose_all_reduce,
    load_with_facts,
)
from plait.comm.measure import measure_group
from plait.sizes import MIB
from tests.parity import cases
from tests.parity.data_parallel import settings


def measure_two_levels(rank, ranks, per_machine):
    """Runs on every rank."""
    machines = [number // per_machine for number in range(ranks)]
    levels = split_by_node([range(ranks)], machines)
    return measure_group(
        "dp_replicate",
        dist.group.WORLD,
        levels,
        machines=ranks // per_machine,
        device=torch.device("cpu"),
        seconds=0.2,
    )


def test_two_levels_are_measured_alike_on_every_rank(pool):
    """Ranks with different costs would choose differently and wait for each other forever."""
    first, *others = pool.run(4, measure_two_levels, 2)
    assert all(other.whole == first.whole for other in others)
    assert (first.machines, first.per_machine, first.ranks) == (2, 2, 4)
    assert first.inside is not None and first.across is not None
    algorithms = {
        "shared-memory",
        "all-reduce",
        "reduce-scatter+all-gather",
        "hierarchical",
        "recursive-doubling",
        "ring",
    }
    assert set(first.whole.costs) == algorithms | {
        "int8",
        "int4",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "exchange",
        "far_exchange",
    }
    for cost in first.whole.costs.values():
        assert 0 < cost.seconds(MIB) < 5
    assert set(algorithm_seconds(MIB, first)) == algorithms


def train_with_links(rank, world, config, links):
    """Return the description of the communication, and the loss of a step.

    Runs on every rank.
    """
    with patch.object(measure, "measure_algorithms", lambda *args, **options: links):
        engine = cases.engine(cases.build("plain", tied=False), config)
    loss = engine.train_batch(cases.steps_for("plain", world)[0][rank])
    return engine.communication, float(loss)


@pytest.mark.parametrize(
    ("fastest", "slower"),
    [("recursive-doubling", "all-reduce"), ("all-reduce", "recursive-doubling")],
)
def test_training_uses_the_fastest_algorithm(pool, fastest, slower):
    """The choice changes with the measurement, and the numbers do not."""
    costs = {fastest: Cost(1e-6, 1e-10), slower: Cost(1e-6, 1e-7)}
    links = GroupLinks("dp_replicate", 1, 2, Level(2, costs))
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"transport": "torch", "measure_seconds": 0}
    _, expected_loss = pool.run(2, train_with_links, config, links)[0]
    del config["parallel"]["measure_seconds"]
    results = pool.run(2, train_with_links, config, links)
    assert results[0] == results[1]
    communication, loss = results[0]
    assert f"by {fastest}" in communication
    assert "2 ranks on 1 machine" in communication
    assert loss == pytest.approx(expected_loss, rel=1e-12)


@pytest.mark.proof
def test_the_command_on_two_processes(tmp_path):
    path = tmp_path / "links.json"
    options = f"doctor --links --nproc-per-node 2 --seconds 0.3 --out {path}"
    command = [sys.executable, "-m", "plait", *options.split()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    group = load_with_facts(path)[0]["dp_replicate"]
    assert group.ranks == 2
    assert choose_all_reduce(MIB, group).reason in process.stdout
    assert json.loads(path.read_text())["facts"]["device"] == "cpu"
