"""A point compares the way that the measured links say with the best of those that the scene has."""

from __future__ import annotations

import pytest

from benchmarks.chooser.__main__ import SCENES, SIZES, Scene, _point
from plait.comm.links import Cost, GroupLinks, Level
from plait.comm.measure import SIZES as MEASURED
from plait.units import MIB

FITTED = GroupLinks("dp_replicate", 1, 2, Level(2, {"all-reduce": Cost(0, 2e-9), "ring": Cost(0, 1e-9), "shared-memory": Cost(0, 1e-10)}))
TIMED = {"all-reduce": 1e-3, "ring": 1.5e-3, "shared-memory": 0.1e-3}


@pytest.mark.parametrize(
    ("shared", "chosen", "best", "ratio"), [(False, "ring", "all-reduce", 1.5), (True, "shared-memory", "shared-memory", 1)]
)
def test_a_point(shared: bool, chosen: str, best: str, ratio: float) -> None:
    found = _point(Scene("x", 2, shared=shared), MIB, FITTED, TIMED)
    assert (found["chosen"], found["best"]) == (chosen, best)
    assert found["chosen_seconds"] / found["best_seconds"] == pytest.approx(ratio)
    assert ("shared-memory" in found["seconds"]) == shared


def test_the_judgement_is_at_other_sizes_than_the_measurement() -> None:
    assert not set(SIZES) & set(MEASURED)
    points = [(scene.title, size) for scene in SCENES for size in SIZES if size <= scene.largest]
    assert len(points) == len(set(points)) >= 20
