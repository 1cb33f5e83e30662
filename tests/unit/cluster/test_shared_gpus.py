"""More ranks than GPUs: each sees one, as if it had a machine of its own."""

import os

import pytest

from plait.cluster.topology import place, share_gpus


@pytest.mark.parametrize(
    ("rank", "world", "gpus", "visible", "chosen"),
    [
        (1, 2, 1, None, "0"),
        (3, 4, 3, None, "0"),
        (2, 4, 3, None, "2"),
        (1, 8, 2, "5,7", "7"),
        (0, 3, 2, "GPU-1a, GPU-2b", "GPU-1a"),
    ],
)
def test_each_sees_one(rank, world, gpus, visible, chosen, monkeypatch):
    for name, value in {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    assert share_gpus(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    here = place()
    assert (here.rank, here.world_size, here.local_rank, here.local_world_size, here.node_rank) == (
        rank,
        world,
        0,
        1,
        rank,
    )


def test_a_gpu_each(monkeypatch):
    """Nothing changes, nor without a launcher."""
    before = dict(os.environ)
    assert not share_gpus(1) and dict(os.environ) == before
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    before = dict(os.environ)
    assert not share_gpus(2) and dict(os.environ) == before
