"""The timeout of the default process group is that of every group that Plait creates."""

import os
from unittest.mock import patch

import torch.distributed as dist

from plait._torch.groups import timeout_of
from plait.cluster.layout import Layout
from plait.cluster.mesh import Groups, build_mesh


def timeout_differences(rank, world):
    """Return by how much the timeout of each group differs from that of the default group.

    Runs on every rank. The pool has created the default group with a timeout of its own.
    """
    stages = frozenset({0, 1})
    mesh = build_mesh(Layout(pp=2, dp_shard=2), groups=Groups(stages=(stages,)))
    groups = {
        "pp": mesh.group("pp"),
        "dp_shard": mesh.group("dp_shard"),
        "both": mesh.group("pp", "dp_shard"),
        "reverse pp": mesh.reverse_pp,
        "tied": mesh.stages[stages],
    }

    # Two machines with two ranks each.
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
    }
    with patch.dict(os.environ, environment):
        machines = build_mesh(Layout(dp_shard=4), groups=Groups(levels=("dp_shard",)))
    levels = machines.levels("dp_shard")
    assert levels is not None and machines.machines("dp_shard") == 2
    groups |= {"inside": levels.inside, "across": levels.across}

    default = timeout_of(dist.group.WORLD)
    return {name: timeout_of(group) - default for name, group in groups.items() if group}


def test_every_group_has_the_users_timeout(pool):
    names = ("pp", "dp_shard", "both", "reverse pp", "tied", "inside", "across")
    for differences in pool.run(4, timeout_differences):
        assert differences == dict.fromkeys(names, 0.0)
