"""Links measured between real processes, and the verb that does it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from plait.cluster.mesh import split_by_node
from plait.comm.choose import choose_all_reduce, prices
from plait.comm.links import GroupLinks, load
from plait.comm.measure import measure_group
from plait.units import MIB
from tests.pool import Pool


def measured(rank: int, ranks: int, per_machine: int) -> GroupLinks:
    """Runs in a worker."""
    levels = split_by_node(dist.group.WORLD, [r // per_machine for r in range(ranks)])
    return measure_group("dp_replicate", dist.group.WORLD, levels, device=torch.device("cpu"), seconds=0.2)


def test_two_levels_are_measured_and_every_rank_knows_the_same(pool: Pool) -> None:
    """Equal costs, or ranks would choose differently and wait for each other for ever."""
    first, *others = pool.run(4, measured, 2)
    assert all(other.whole == first.whole for other in others)
    assert (first.machines, first.per_machine, first.ranks) == (2, 2, 4)
    assert first.inside is not None and first.across is not None
    assert set(first.whole.costs) == {"all_reduce", "all_gather", "reduce_scatter", "exchange", "far_exchange", "shared_memory"}
    for cost in first.whole.costs.values():
        assert 0 < cost.at(MIB) < 5
    assert set(prices(MIB, first)) == {
        "shared-memory",
        "all-reduce",
        "reduce-scatter+all-gather",
        "two-level",
        "recursive-doubling",
        "ring",
    }


def test_the_verb(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    command = [sys.executable, "-m", "plait", "doctor", "--links", "--processes", "2", "--seconds", "0.3", "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    group = load(path)["dp_replicate"]
    assert group.ranks == 2
    assert choose_all_reduce(MIB, group).reason in done.stdout
    assert json.loads(path.read_text())["facts"]["device"] == "cpu"
    refused = subprocess.run([sys.executable, "-m", "plait", "doctor"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "say --links" in refused.stderr
