"""Process groups over several mesh dimensions exist as soon as the mesh is built."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.cluster.layout import TOKEN_AXES, Layout
from plait.cluster.mesh import Groups, build_mesh
from plait.errors import ConfigError


def test_no_group_is_created_after_the_mesh(fake_world, monkeypatch):
    """Creating a group is collective, and only some stages of a pipeline may need it later."""
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    fake_world(layout.world_size)
    both = frozenset({0, 1})
    groups = Groups(axes=(("dp_shard", "tp"),), stages=(both,), levels=("dp_shard",))
    mesh = build_mesh(layout, groups=groups + Groups(stages=(both,)))

    def refuse(*_, **__):
        raise AssertionError("a group is created")

    # torch's functions, the only ones that create groups.
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
    ranks = dist.get_process_group_ranks(mesh.group("pp", "dp_shard", "tp"))
    assert ranks == [*range(4), *range(8, 12)]
    tied = mesh.stages[both]
    assert tied is not None and dist.get_process_group_ranks(tied) == [0, 8]
    assert mesh.levels("dp_shard") is None and mesh.machines("dp_shard") == 1  # of one machine

    with pytest.raises(KeyError):
        mesh.group("pp", "tp")
    with pytest.raises(KeyError):
        mesh.levels("dp_replicate")
    with pytest.raises(KeyError):
        mesh.machines("dp_replicate")


def test_tokens_are_summed_over_cp(fake_world):
    """A layout without cp has no group more."""
    for layout, ranks in (
        (Layout(dp_shard=2, cp=2, tp=2), [0, 2, 4, 6]),
        (Layout(dp_replicate=2, dp_shard=2), [0, 1, 2, 3]),
    ):
        fake_world(layout.world_size)
        mesh = build_mesh(layout)
        assert dist.get_process_group_ranks(mesh.group(*TOKEN_AXES)) == ranks
        assert len(mesh.combined) == (2 if layout.cp > 1 else 1)


def test_layout_of_another_number_of_processes_is_refused(fake_world):
    """The process group can be used afterwards by a layout that fits."""
    fake_world(2)
    message = "needs 1 process, and the process group has 2; start 1 process,"
    with pytest.raises(ConfigError, match=message):
        build_mesh(Layout())
    with pytest.raises(ConfigError, match="needs 4 processes, and the process group has 2"):
        build_mesh(Layout(tp=4))
    assert build_mesh(Layout(tp=2)).layout.world_size == 2
