"""A process group's timeout is that of every group that Plait makes (defect B13)."""

import os
from unittest.mock import patch

import torch.distributed as dist

from plait._torch.groups import timeout_of
from plait.cluster.layout import Layout
from plait.cluster.mesh import Groups, build_mesh


def timeouts(rank, world):
    """Runs in a worker, whose default group was made with the pool's timeout."""
    stages = frozenset({0, 1})
    mesh = build_mesh(Layout(pp=2, dp_shard=2), groups=Groups(stages=(stages,)))
    groups = {axis: mesh.group(axis) for axis in ("pp", "dp_shard")} | {
        "both": mesh.group("pp", "dp_shard"),
        "down": mesh.reverse_pp,
    }
    groups["tied"] = mesh.stages[stages]
    place = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": rank // 2,
    }
    with patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
        machines = build_mesh(Layout(dp_shard=4), groups=Groups(levels=("dp_shard",)))
    levels = machines.levels("dp_shard")
    assert levels is not None and machines.machines("dp_shard") == 2
    groups |= {"inside": levels.inside, "across": levels.across}
    return {
        name: timeout_of(group) - timeout_of(dist.group.WORLD)
        for name, group in groups.items()
        if group is not None
    }


def test_a_user_s_timeout_reaches_every_group(pool):
    """B13."""
    for found in pool.run(4, timeouts):
        assert found == dict.fromkeys(
            ("pp", "dp_shard", "both", "down", "tied", "inside", "across"), 0.0
        )
