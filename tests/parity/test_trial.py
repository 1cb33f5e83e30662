"""Compression that the user allows is taken where the run's own steps show that it pays, on all ranks alike, and stays over a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import plait
from plait.comm import startup
from plait.comm.buckets import AlgorithmBuckets
from plait.comm.compress import QuantisedBuckets
from plait.comm.links import Cost, GroupLinks, Level
from plait.errors import ConfigError
from plait.parallel.trial import Trial
from tests.parity import cases
from tests.parity.test_data_parallel import settings
from tests.pool import Pool

DECIDES_AT = 6
WAIT_SECONDS = 0.05


def config_of(**parallel: Any) -> dict[str, Any]:
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"transport": "torch", "compress_gradients": "auto", **parallel}
    return config


def links(saves_seconds: float, more_seconds: float = -0.001) -> GroupLinks:
    """Of which int8 takes so much less, for any number of bytes, and int4 so much less again."""
    int8 = 1.0 - saves_seconds
    return GroupLinks(
        "dp_replicate", 1, 2, Level(2, {"all-reduce": Cost(1.0, 0), "int8": Cost(int8, 0), "int4": Cost(int8 - more_seconds, 0)})
    )


def slow_finish(self: AlgorithmBuckets, index: int) -> None:
    time.sleep(WAIT_SECONDS)
    HONEST(self, index)


HONEST = AlgorithmBuckets.finish


def trained(
    rank: int, world: int, config: dict[str, Any], saves_seconds: float, slow: bool, steps: int, more_seconds: float = -0.001
) -> dict[str, Any]:
    """Runs in a worker."""
    finish = slow_finish if slow else HONEST
    with (
        patch.object(startup, "measure_ways", lambda *args, **options: links(saves_seconds, more_seconds)),
        patch.object(AlgorithmBuckets, "finish", finish),
    ):
        engine = plait.initialize(cases.build("plain", tied=False), config, loss_fn=plait.causal_lm_loss)
        batch = cases.steps_for("plain", world)[0][rank]
        results = [engine.train_batch(batch) for _ in range(steps)]
    assert engine.parts.reducer is not None
    return {
        "said": engine.parts.communication,
        "says_now": engine.communication,
        "decided": [result.decided for result in results],
        "losses": [float(result.loss) for result in results],
        "compressed": isinstance(engine.parts.reducer.reduction, QuantisedBuckets),
        "bits": int(engine.parts.trial.verdict) if engine.parts.trial is not None else 0,
        "trial": engine.parts.trial is not None,
        "parameters": [p.detach().clone() for p in engine.model.parameters()],
    }


def test_it_is_taken_where_a_step_waits_and_the_links_say_that_it_saves(pool: Pool) -> None:
    first, second = pool.run(2, trained, config_of(), 0.03, True, DECIDES_AT + 3)
    assert "The first steps decide on compression, which would save up to: int8 30 ms, int4 29 ms" in first["said"]
    assert first["compressed"]
    assert second["compressed"]
    assert [bool(said) for said in first["decided"]] == [step + 1 == DECIDES_AT for step in range(DECIDES_AT + 3)]
    assert "gradients travel as int8 from here on: a step takes" in first["decided"][DECIDES_AT - 1]
    assert first["says_now"] == f"{first['said']}. {first['decided'][DECIDES_AT - 1]}"
    assert "int8 saves 30 ms" in first["decided"][DECIDES_AT - 1]
    assert first["losses"] == second["losses"]
    assert all(torch.equal(a, b) for a, b in zip(first["parameters"], second["parameters"], strict=True))
    whole = pool.run(2, trained, config_of(compress_gradients="none"), 0.03, False, DECIDES_AT + 3)[0]
    assert first["losses"][: DECIDES_AT + 1] == pytest.approx(whole["losses"][: DECIDES_AT + 1], rel=1e-12), "the first steps are whole"
    assert first["losses"][-1] != whole["losses"][-1]
    assert first["losses"][-1] == pytest.approx(whole["losses"][-1], rel=0.01)


def test_fewer_bits_are_taken_where_they_save_as_much_again(pool: Pool) -> None:
    """A step of some 0.1 s: int4 has to save 10 ms more than int8."""
    assert {found["bits"] for found in pool.run(2, trained, config_of(), 0.02, True, DECIDES_AT, 0.025)} == {4}
    assert {found["bits"] for found in pool.run(2, trained, config_of(), 0.03, True, DECIDES_AT, 0.001)} == {8}


def test_it_is_not_taken_where_it_saves_little(pool: Pool) -> None:
    """A step waits for long, and not because of its bytes."""
    found = pool.run(2, trained, config_of(), 1e-4, True, DECIDES_AT)[0]
    assert not found["compressed"]
    assert "gradients stay whole: a step takes" in found["decided"][-1]
    assert "less than 10%" in found["decided"][-1]


def test_where_nothing_is_open_the_reason_is_said_at_once(pool: Pool) -> None:
    for config, saves, why in (
        (config_of(transport="auto"), 0.03, "Gradients stay whole: the links were not measured, or processes share memory"),
        (config_of(measure_seconds=0), 0.03, "Gradients stay whole: the links were not measured"),
        (config_of(), -0.002, "Gradients stay whole: int4 would take 3 ms longer"),
    ):
        found = pool.run(2, trained, config, saves, False, 1)[0]
        assert why in found["said"]
        assert not found["trial"]
    assert "stay whole" not in pool.run(2, trained, config_of(compress_gradients="none"), 0.03, False, 1)[0]["said"]


def resumed(rank: int, world: int, folder: Path, compress: bool) -> tuple[list[float], list[float], bool]:
    """(losses of an uninterrupted run after its checkpoint, those of the one that goes on there, whether that compresses at once). Runs in
    a worker."""
    batch = cases.steps_for("plain", world)[0][rank]
    with patch.object(startup, "measure_ways", lambda *args, **options: links(0.03)):
        one = plait.initialize(cases.build("plain", tied=False), config_of(), loss_fn=plait.causal_lm_loss)
        assert one.parts.trial is not None
        one.train_batch(batch)
        one.parts.trial.conclude(8 if compress else 0)
        for _ in range(2):
            one.train_batch(batch)
        one.save_checkpoint(folder)
        other = plait.initialize(cases.build("plain", tied=False), config_of(), loss_fn=plait.causal_lm_loss)
        other.load_checkpoint(folder)
    assert other.parts.reducer is not None
    compresses = isinstance(other.parts.reducer.reduction, QuantisedBuckets)
    with patch.object(Trial, "conclude", side_effect=AssertionError("decided twice")):
        after = [[float(engine.train_batch(batch)) for _ in range(DECIDES_AT + 1)] for engine in (one, other)]
    return after[0], after[1], compresses


@pytest.mark.parametrize("compress", [True, False])
def test_a_restart_goes_on_with_what_was_decided(pool: Pool, tmp_path: Path, compress: bool) -> None:
    for uninterrupted, again, compresses in pool.run(2, resumed, tmp_path, compress):
        assert compresses == compress
        assert again == uninterrupted


def test_a_loop_of_ones_own_is_refused() -> None:
    """Nothing there would ever decide."""
    config = settings(1, 0, 1, 1)
    config["parallel"] = {"compress_gradients": "auto"}
    with pytest.raises(ConfigError, match="compress_gradients = 'auto': whole steps are timed to decide it"):
        plait.parallelize(cases.build("plain", tied=False), config)
