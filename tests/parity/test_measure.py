"""Links are measured between real processes, in a run and by `plait doctor --links`."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from plait.cluster.mesh import split_by_node
from plait.comm.choose import (
    algorithm_seconds,
    choose_all_reduce,
    load_with_facts,
)
from plait.comm.measure import measure_group
from plait.sizes import MIB


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
