"""Groups over several axes exist before anyone asks for them."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.cluster.layout import TOKEN_AXES, Layout
from plait.cluster.mesh import Groups, build_mesh
from plait.errors import ConfigError


def test_no_group_is_made_after_the_mesh(fake_world, monkeypatch):
    """B5: making one is collective over all ranks, and in a pipeline only some stages may want that of gradients split twice."""
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    fake_world(layout.world_size)
    both = frozenset({0, 1})
    mesh = build_mesh(
        layout,
        groups=Groups(axes=(("dp_shard", "tp"),), stages=(both,), levels=("dp_shard",))
        + Groups(stages=(both,)),
    )

    def refuse(*_, **__):
        raise AssertionError("a group is made")

    monkeypatch.setattr(dist, "new_group", refuse)
    monkeypatch.setattr(DeviceMesh, "_flatten", refuse)
    sizes = {
        ("pp", "dp_shard", "tp"): 8,
        ("dp_replicate", "dp_shard"): 4,
        ("pp", "dp_replicate", "dp_shard"): 8,
        ("dp_shard", "tp"): 4,
        ("tp",): 2,
        ("pp",): 2,
    }
    for axes, size in sizes.items():
        group = mesh.group(*axes)
        assert group is not None and group.size() == size
    assert dist.get_process_group_ranks(mesh.group("pp", "dp_shard", "tp")) == [
        0,
        1,
        2,
        3,
        8,
        9,
        10,
        11,
    ]
    tied = mesh.stages[both]
    assert tied is not None and dist.get_process_group_ranks(tied) == [0, 8]
    assert mesh.levels("dp_shard") is None and mesh.machines("dp_shard") == 1  # of one machine
    for ask in (
        lambda: mesh.group("pp", "tp"),
        lambda: mesh.levels("dp_replicate"),
        lambda: mesh.machines("dp_replicate"),
    ):
        with pytest.raises(KeyError):
            ask()


def test_cp_has_groups_and_none_where_its_degree_is_1(fake_world):
    """The batch is summed over cp too, and the norm, and a layout without cp has the groups that it had."""
    for layout, ranks in (
        (Layout(dp_shard=2, cp=2, tp=2), [0, 2, 4, 6]),
        (Layout(dp_replicate=2, dp_shard=2), [0, 1, 2, 3]),
    ):
        fake_world(layout.world_size)
        mesh = build_mesh(layout)
        assert dist.get_process_group_ranks(mesh.group(*TOKEN_AXES)) == ranks
        assert len(mesh.combined) == (2 if layout.cp > 1 else 1)


def test_a_layout_of_another_number_of_processes(fake_world):
    """One process is singular, and the group stays for a layout that fits."""
    fake_world(2)
    with pytest.raises(
        ConfigError, match="needs 1 process, and the process group has 2; start 1 process,"
    ):
        build_mesh(Layout())
    with pytest.raises(ConfigError, match="needs 4 processes, and the process group has 2"):
        build_mesh(Layout(tp=4))
    assert build_mesh(Layout(tp=2)).layout.world_size == 2
