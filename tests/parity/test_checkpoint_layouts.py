"""A checkpoint of every layout loads on every other: bit for bit the same state right after, and the same losses from there on."""

from __future__ import annotations

import pytest

import plait
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
"""Name to (processes, degrees)."""
MICRO_BATCHES, STEPS = 4, 2
"""Of a step over all ranks; steps, half of them before the checkpoint."""


def engine_on(name):
    """A tied Llama whose vocabulary of 101 no degree divides, float64."""
    _, degrees = LAYOUTS[name]
    dp, tp, pp = (degrees.get(axis, 1) for axis in ("dp", "tp", "pp"))
    config = settings(
        dp * tp, tp, degrees.get("stage", 0), degrees.get("replicas", 1), MICRO_BATCHES // dp
    )
    config["parallel"]["pp"] = pp
    return plait.initialize(cases.build("llama", tied=True), config, loss_fn=plait.causal_lm_loss)


def losses(engine, first, last):
    """Of steps on the same micro-batches, whatever the layout."""
    count = engine.config.batch.accumulation
    steps = cases.ragged_steps(MICRO_BATCHES, steps=STEPS)[first:last]
    return [
        float(engine.train_batch(step[engine.dp_rank * count : (engine.dp_rank + 1) * count]))
        for step in steps
    ]


def saves(rank, world, name, folder):
    """Half of the steps, a checkpoint, and the losses of the other half. Runs in a worker."""
    engine = engine_on(name)
    with keeping_float64(engine.model):
        losses(engine, 0, STEPS // 2)
        engine.save_checkpoint(folder, tag=name)
        return losses(engine, STEPS // 2, STEPS)


def loads(rank, world, name, folder, others):
    """By the layout that saved: the losses that follow. What was loaded is saved again, as NAME-from-OTHER. Runs in a worker."""
    found = {}
    for other in others:
        engine = engine_on(name)
        with keeping_float64(engine.model):
            loaded = engine.load_checkpoint(folder, tag=other, on_note=lambda _: None)
            assert loaded is not None and engine.global_steps == STEPS // 2
            engine.save_checkpoint(folder, tag=f"{name}-from-{other}")
            found[other] = losses(engine, STEPS // 2, STEPS)
    return found


def check(pool, folder, sources, targets):
    """How many pairs were tried."""
    straight = {name: pool.run(LAYOUTS[name][0], saves, name, str(folder))[0] for name in sources}
    for target in targets:
        for rank in pool.run(LAYOUTS[target][0], loads, target, str(folder), sources):
            for source, seen in rank.items():
                assert seen == pytest.approx(straight[source], rel=0, abs=1e-11), (source, target)
        for source in sources:
            one, other = (
                open_checkpoint(folder / source),
                open_checkpoint(folder / f"{target}-from-{source}"),
            )
            differing = list(differences(one, other))
            assert not differing, (source, target, differing[:3])
            assert one.manifest.content == other.manifest.content, (source, target)
    return len(sources) * len(targets)


def test_some_pairs(pool, tmp_path):
    for source, target in (("tp2-zero3x2", "pp2"), ("pp2", "tp2-zero3x2")):
        assert check(pool, tmp_path, [source], [target]) == 1


@pytest.mark.proof
def test_every_pair(pool, tmp_path):
    assert check(pool, tmp_path, list(LAYOUTS), list(LAYOUTS)) == 121
