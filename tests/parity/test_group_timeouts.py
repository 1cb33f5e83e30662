"""A process group's timeout is that of every group that Plait makes (defect B13)."""

from __future__ import annotations

from plait._torch.groups import timeout_of
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh, split_by_node
from tests.pool import SECONDS, Pool


def timeouts(rank: int, world: int) -> dict[str, float]:
    """Runs in a worker, whose default group was made with the pool's timeout."""
    mesh = build_mesh(Layout(pp=2, dp_shard=2))
    groups = {axis: mesh.group(axis) for axis in ("pp", "dp_shard")} | {"both": mesh.group("pp", "dp_shard"), "down": mesh.reverse_pp}
    both = groups["both"]
    levels = split_by_node(both, [0, 0, 1, 1]) if both is not None else None
    if levels is not None:
        groups |= {"inside": levels.inside, "across": levels.across}
    return {name: timeout_of(group) for name, group in groups.items() if group is not None}


def test_a_user_s_timeout_reaches_every_group(pool: Pool) -> None:
    """B13."""
    for found in pool.run(4, timeouts):
        assert found == dict.fromkeys(("pp", "dp_shard", "both", "down", "inside", "across"), float(SECONDS))
