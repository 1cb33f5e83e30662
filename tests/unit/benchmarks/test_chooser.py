"""A point compares the way that the measured links say with the best of those that the scene has."""

import argparse
from unittest.mock import Mock

import pytest

from benchmarks.chooser.__main__ import SCENES, SIZES, Scene, _chosen, _point
from plait.comm.choose import Cost, GroupLinks, Level
from plait.comm.measure import SIZES as MEASURED
from plait.sizes import MIB

FITTED = GroupLinks(
    "dp_replicate",
    1,
    2,
    Level(2, {"all-reduce": Cost(0, 2e-9), "ring": Cost(0, 1e-9), "shared-memory": Cost(0, 1e-10)}),
)
TIMED = {"all-reduce": 1e-3, "ring": 1.5e-3, "shared-memory": 0.1e-3}


@pytest.mark.parametrize(
    ("shared", "compared", "by_links", "chosen", "best", "ratio"),
    [
        (False, {"ring": 2e-3, "all-reduce": 1e-3}, "ring", "all-reduce", "all-reduce", 1),
        (False, {"ring": 1e-3, "all-reduce": 2e-3}, "ring", "ring", "all-reduce", 1.5),
        (True, None, "shared-memory", "shared-memory", "shared-memory", 1),
    ],
)
def test_a_point(shared, compared, by_links, chosen, best, ratio):
    """What the links say, what was refined beside it, and what is best; only the ways that the scene has."""
    worker_group, scene = Mock(), Scene("x", 2, shared=shared)
    worker_group.ask.return_value = [compared] * 2
    found = _point(
        scene,
        MIB,
        *_chosen(worker_group, scene, MIB, FITTED, argparse.Namespace(refine_seconds=1.0)),
        TIMED,
    )
    assert worker_group.ask.called == (compared is not None)
    assert (found["chosen_by_links"], found["chosen"], found["best"]) == (by_links, chosen, best)
    assert found["chosen_seconds"] / found["best_seconds"] == pytest.approx(ratio)
    assert ("shared-memory" in found["seconds"]) == shared


def test_the_judgement_is_at_other_sizes_than_the_measurement():
    assert not set(SIZES) & set(MEASURED)
    points = [(scene.title, size) for scene in SCENES for size in SIZES if size <= scene.largest]
    assert len(points) == len(set(points)) >= 20
