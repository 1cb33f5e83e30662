"""Links measured between real processes, and the verb that does it."""

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


def measured(rank, ranks, per_machine):
    """Runs in a worker."""
    levels = split_by_node([range(ranks)], [r // per_machine for r in range(ranks)])
    return measure_group(
        "dp_replicate",
        dist.group.WORLD,
        levels,
        machines=ranks // per_machine,
        device=torch.device("cpu"),
        seconds=0.2,
    )


def test_two_levels_are_measured_and_every_rank_knows_the_same(pool):
    """Equal costs, or ranks would choose differently and wait for each other for ever."""
    first, *others = pool.run(4, measured, 2)
    assert all(other.whole == first.whole for other in others)
    assert (first.machines, first.per_machine, first.ranks) == (2, 2, 4)
    assert first.inside is not None and first.across is not None
    ways = {
        "shared-memory",
        "all-reduce",
        "reduce-scatter+all-gather",
        "hierarchical",
        "recursive-doubling",
        "ring",
    }
    assert set(first.whole.costs) == ways | {
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
    assert set(algorithm_seconds(MIB, first)) == ways


def trained(rank, world, config, measured):
    """(what is said of the communication, loss of a step). Runs in a worker."""
    with patch.object(measure, "measure_algorithms", lambda *args, **options: measured):
        engine = cases.engine(cases.build("plain", tied=False), config)
    return engine.communication, float(engine.train_batch(cases.steps_for("plain", world)[0][rank]))


@pytest.mark.parametrize("cheap", ["recursive-doubling", "all-reduce"])
def test_training_takes_what_the_measured_links_say(pool, cheap):
    """The choice changes with the measurement, and not the numbers."""
    costs = {
        name: Cost(1e-6, 1e-10 if name == cheap else 1e-7)
        for name in ("all-reduce", "recursive-doubling")
    }
    measured = GroupLinks("dp_replicate", 1, 2, Level(2, costs))
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"transport": "torch"}
    plain = pool.run(
        2, trained, {**config, "parallel": {**config["parallel"], "measure_seconds": 0}}, measured
    )
    results = pool.run(2, trained, config, measured)
    assert results[0] == results[1]
    assert f"by {cheap}" in results[0][0]
    assert "2 ranks on 1 machine" in results[0][0]
    assert results[0][1] == pytest.approx(plain[0][1], rel=1e-12)


@pytest.mark.proof
def test_the_verb(tmp_path):
    """As a user runs it, on two processes."""
    path = tmp_path / "links.json"
    command = [
        sys.executable,
        "-m",
        "plait",
        "doctor",
        "--links",
        "--nproc-per-node",
        "2",
        "--seconds",
        "0.3",
        "--out",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    group = load_with_facts(path)[0]["dp_replicate"]
    assert group.ranks == 2
    assert choose_all_reduce(MIB, group).reason in done.stdout
    assert json.loads(path.read_text())["facts"]["device"] == "cpu"
