"""Groups over several axes exist before anyone asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh


def test_no_group_is_made_after_the_mesh(fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """B5: making one is collective over all ranks, and in a pipeline only some stages may want that of gradients split twice."""
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    fake_world(layout.world_size)
    mesh = build_mesh(layout)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a group is made")

    monkeypatch.setattr(dist, "new_group", refuse)
    monkeypatch.setattr(DeviceMesh, "_flatten", refuse)
    sizes = {
        ("pp", "dp_shard", "tp"): 8,
        ("dp_replicate", "dp_shard"): 4,
        ("pp", "dp_replicate", "dp_shard"): 8,
        ("tp",): 2,
        ("pp",): 2,
    }
    for axes, size in sizes.items():
        group = mesh.group(*axes)
        assert group is not None and group.size() == size
    assert dist.get_process_group_ranks(mesh.group("pp", "dp_shard", "tp")) == [0, 1, 2, 3, 8, 9, 10, 11]
    with pytest.raises(KeyError):
        mesh.group("pp", "tp")
