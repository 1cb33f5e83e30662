"""More ranks than GPUs: each rank uses one GPU, as if it were on a machine of its own."""

import os

import pytest

from plait.cluster.topology import RankInfo, place, share_gpus


def set_rank(monkeypatch, rank, world):
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    for name, value in {**sizes, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("rank", "world", "gpus", "visible", "chosen"),
    [
        (1, 2, 1, "", "0"),
        (3, 4, 3, "", "0"),
        (2, 4, 3, "", "2"),
        (1, 8, 2, "5,7", "7"),
        (0, 3, 2, "GPU-1a, GPU-2b", "GPU-1a"),
    ],
)
def test_each_rank_sees_one_gpu(rank, world, gpus, visible, chosen, monkeypatch):
    set_rank(monkeypatch, rank, world)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert share_gpus(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    assert place() == RankInfo(rank, world, 0, 1, rank)


def test_enough_gpus_are_not_shared(monkeypatch):
    """Nothing changes, with and without a launcher."""
    before = dict(os.environ)
    assert not share_gpus(1)
    assert dict(os.environ) == before
    set_rank(monkeypatch, 1, 2)
    before = dict(os.environ)
    assert not share_gpus(2)
    assert dict(os.environ) == before
