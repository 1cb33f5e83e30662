"""A checkpoint of every layout loads on every other.

The state has the same bits right after the load, and the losses that follow are the same.
"""

from __future__ import annotations

import pytest

from plait.checkpoint.inspect import differences, open_checkpoint
from plait.verify.keep_float64 import keeping_float64
from tests.parity import cases
from tests.parity.tensor_parallel import settings

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp2": (2, {"dp": 2}),
    "zero1x4": (4, {"dp": 4, "stage": 1}),
    "zero2x2": (2, {"dp": 2, "stage": 2}),
    "zero3x4": (4, {"dp": 4, "stage": 3}),
    "hybrid2x2": (4, {"dp": 4, "stage": 3, "replicas": 2}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2-zero3x2": (4, {"tp": 2, "dp": 2, "stage": 3}),
    "pp2-zero1x2": (4, {"pp": 2, "dp": 2, "stage": 1}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}),
}
"""Number of processes, and degrees."""
MICRO_BATCHES = 4
"""Number of micro-batches of a step over all ranks."""
STEPS = 2
SAVED_AT = 1


def engine_on(name):
    """Return an engine of a tied Llama, whose vocabulary of 101 no degree divides."""
    _, degrees = LAYOUTS[name]
    dp = degrees.get("dp", 1)
    tp = degrees.get("tp", 1)
    stage = degrees.get("stage", 0)
    config = settings(dp * tp, tp, stage, degrees.get("replicas", 1), MICRO_BATCHES // dp)
    config["parallel"]["pp"] = degrees.get("pp", 1)
    return cases.engine(cases.build("llama", tied=True), config)


def losses(engine, first, last):
    """Train steps on micro-batches that are the same on every layout."""
    count = engine.config.batch.accumulation
    start = engine.dp_rank * count
    steps = cases.ragged_steps(MICRO_BATCHES, steps=STEPS)[first:last]
    return [float(engine.train_batch(step[start : start + count])) for step in steps]


def saves(rank, world, name, folder):
    """Save after half of the steps, and return the losses of the other half.

    Runs on every rank.
    """
    engine = engine_on(name)
    with keeping_float64(engine.model):
        losses(engine, 0, SAVED_AT)
        engine.save_checkpoint(folder, tag=name)
        return losses(engine, SAVED_AT, STEPS)


def loads(rank, world, name, folder, sources):
    """Return the losses that follow each layout's checkpoint. Runs on every rank.

    What was loaded is saved again as NAME-from-SOURCE.
    """
    result = {}
    for source in sources:
        engine = engine_on(name)
        with keeping_float64(engine.model):
            loaded = engine.load_checkpoint(folder, tag=source, on_note=lambda _: None)
            assert loaded is not None and engine.global_steps == SAVED_AT
            engine.save_checkpoint(folder, tag=f"{name}-from-{source}")
            result[source] = losses(engine, SAVED_AT, STEPS)
    return result


def check(pool, folder, sources, targets):
    expected = {
        source: pool.run(LAYOUTS[source][0], saves, source, str(folder))[0] for source in sources
    }
    for target in targets:
        for by_source in pool.run(LAYOUTS[target][0], loads, target, str(folder), sources):
            assert list(by_source) == list(sources)
            for source, actual in by_source.items():
                pair = (source, target)
                assert actual == pytest.approx(expected[source], rel=0, abs=1e-11), pair
        for source in sources:
            saved = open_checkpoint(folder / source)
            saved_again = open_checkpoint(folder / f"{target}-from-{source}")
            changes = list(differences(saved, saved_again))
            assert not changes, (source, target, changes[:3])
            assert saved.manifest.content == saved_again.manifest.content, (source, target)


@pytest.mark.parametrize(("source", "target"), [("tp2-zero3x2", "pp2"), ("pp2", "tp2-zero3x2")])
def test_a_layout_loads_another(pool, tmp_path, source, target):
    check(pool, tmp_path, [source], [target])


@pytest.mark.proof
def test_every_layout_loads_every_other(pool, tmp_path):
    check(pool, tmp_path, list(LAYOUTS), list(LAYOUTS))
