"""Gradients are compressed if the run's own steps show that it saves time.

All ranks take the same decision, and a restart keeps it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import plait
from plait.comm import measure
from plait.comm.all_reduce import AlgorithmBuckets
from plait.comm.choose import Cost, GroupLinks, Level
from plait.comm.collectives import AllToAllReduceScatter
from plait.comm.compress import PowerSGDBuckets, QuantisedBuckets, QuantisedReduceScatter
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.parallel.data.compression import (
    CompressionAutotuner,
    CompressionCandidate,
    Residuals,
    best_candidate,
)
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepEnd
from tests.clock import Clock
from tests.parity import cases
from tests.parity.data_parallel import settings

TRIAL_STEPS = 5
"""Steps of each candidate: two that do not count and three that do."""
UNCOMPRESSED_STEPS = 1 + TRIAL_STEPS
"""The first step of a run starts the clock."""
ALL_TRIED_AT = UNCOMPRESSED_STEPS + 2 * TRIAL_STEPS
DECIDES_AT = ALL_TRIED_AT + TRIAL_STEPS
"""Uncompressed gradients are measured once more before a candidate is taken."""

# Keys of the simulated durations, besides the bits of quantised gradients.
UNCOMPRESSED = 0
POWERSGD = 1
SLOW = {UNCOMPRESSED: 0.2}
"""Seconds that a step waits for uncompressed gradients."""

LINKS = GroupLinks("dp_replicate", 1, 2, Level(2, {"all-reduce": Cost(1.0, 0)}))
BUCKETS = {
    UNCOMPRESSED: AlgorithmBuckets,
    POWERSGD: PowerSGDBuckets,
    4: QuantisedBuckets,
    8: QuantisedBuckets,
}


def config_of(stage=0, **parallel):
    config = settings(2, stage, 1, 1)
    config["parallel"] |= {"transport": "torch", "compress_gradients": "auto", **parallel}
    return config


def fixed_links():
    """Replace the measurement of links, which would depend on the machine."""
    return patch.object(measure, "measure_algorithms", lambda *args, **options: LINKS)


def slow_buckets(clock, seconds):
    """Make the end of a step's reduction take simulated time, by the kind of its buckets."""
    stack = ExitStack()
    for kind in {BUCKETS[key] for key in seconds}:

        def finish(self, index, original=kind.finish):
            if index == 0:
                powersgd = isinstance(self, PowerSGDBuckets)
                key = POWERSGD if powersgd else getattr(self, "_bits", UNCOMPRESSED)
                clock.sleep(seconds.get(key, 0))
            original(self, index)

        stack.enter_context(patch.object(kind, "finish", finish))
    return stack


def trained(rank, world, config, seconds, steps):
    """Train on a simulated clock, and return what was decided. Runs on every rank."""
    clock = Clock()
    with fixed_links():
        model = cases.build("plain", tied=False)
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    batch = cases.steps_for("plain", world)[0][rank]
    with slow_buckets(clock, seconds), clock.instead():
        results = [engine.train_batch(batch) for _ in range(steps)]
    autotuner = engine.hooks.find(CompressionAutotuner)
    return {
        "description": engine.hooks.description,
        "communication": engine.communication,
        "decided": [result.decided for result in results],
        "losses": [float(result.loss) for result in results],
        "quantised": isinstance(engine.hooks.find(Reducer).reduction, QuantisedBuckets),
        "code": int(autotuner.decision) if autotuner is not None else 0,
        "autotuner": autotuner is not None,
        "parameters": [p.detach().clone() for p in engine.model.parameters()],
    }


def decision_steps(results):
    """Return the numbers of the steps that reported a decision."""
    return [step for step, text in enumerate(results["decided"], start=1) if text]


def test_compression_is_chosen_if_a_trial_saves_time(pool):
    first, second = pool.run(2, trained, config_of(), SLOW | {8: 0.03, 4: 0.2}, DECIDES_AT + 3)
    assert "The first steps decide on compression: int8, int4" in first["description"]
    assert first["quantised"] and second["quantised"]
    assert decision_steps(first) == [DECIDES_AT]
    decision = first["decided"][DECIDES_AT - 1]
    assert "gradients are sent as int8 from now on: a step takes" in decision
    assert " ms uncompressed; candidates: int8 " in decision
    assert ", uncompressed again " in decision
    assert first["communication"] == f"{first['description']}. {decision}"
    assert first["losses"] == second["losses"]
    assert all(map(torch.equal, first["parameters"], second["parameters"]))

    # The first steps are uncompressed, and the last one is not.
    config = config_of(compress_gradients="none")
    uncompressed = pool.run(2, trained, config, {}, DECIDES_AT + 3)[0]["losses"]
    compared = UNCOMPRESSED_STEPS + 1
    assert first["losses"][:compared] == pytest.approx(uncompressed[:compared], rel=1e-12)
    assert first["losses"][-1] != uncompressed[-1]
    assert first["losses"][-1] == pytest.approx(uncompressed[-1], rel=0.01)


@pytest.mark.parametrize(
    ("allowed", "seconds", "code"),
    [
        ("auto", {8: 0.12, 4: 0.02}, 4),
        (["int8"], {8: 0.1}, 8),
        (["powersgd", "int8"], {8: 0.12, POWERSGD: 0}, POWERSGD),
        (["powersgd", "int4"], {4: 0.03, POWERSGD: 0.2}, 4),
        ("auto", {8: 0.3, 4: 0.3}, UNCOMPRESSED),
    ],
)
def test_the_fastest_allowed_candidate_is_taken(pool, allowed, seconds, code):
    """The trials end early if no candidate is faster."""
    steps = UNCOMPRESSED_STEPS + (len(seconds) + bool(code)) * TRIAL_STEPS
    config = config_of(compress_gradients=allowed)
    results = pool.run(2, trained, config, SLOW | seconds, steps)
    assert [result["code"] for result in results] == [code, code]
    assert decision_steps(results[0]) == [steps]
    assert results[0]["quantised"] == (code in (4, 8))


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ({"int8": 0.96}, "uncompressed"),
        ({"int8": 0.94, "int4": 0.9}, "int8"),
        ({"int8": 0.94, "int4": 0.89}, "int4"),
        ({"int8": 2.0, "int4": 0.9}, "int4"),
    ],
)
def test_a_candidate_must_save_a_twentieth_of_the_best(trials, best):
    assert best_candidate({"uncompressed": 1.0, **trials}) == best


def on_a_clock(rank, world, seconds):
    """Return the decision, the candidates in turn, and the reports. Runs on every rank.

    `seconds` are the durations of the steps.
    """
    active: list[str] = []
    candidates = tuple(
        CompressionCandidate(name, code, partial(active.append, name))
        for name, code in (("int8", 8), ("int4", 4))
    )
    uncompressed = partial(active.append, "uncompressed")
    autotuner = CompressionAutotuner(
        (dist.group.WORLD,), torch.device("cpu"), uncompressed, candidates
    )
    now = 0.0
    reports = []
    with patch.object(time, "perf_counter", lambda: now):
        for step in seconds:
            now += step
            reports.append(autotuner.after_step(StepEnd(skipped=False)))
    return int(autotuner.decision), active, list(filter(None, reports))


def test_steps_that_were_slow_by_chance_decide_nothing(pool):
    """int8 seems to save a fifth until uncompressed gradients are as fast."""
    slow_at_first = [1.0] * UNCOMPRESSED_STEPS + [0.8] * 3 * TRIAL_STEPS
    decision, active, reports = pool.run(2, on_a_clock, slow_at_first)[0]
    assert (decision, active) == (0, ["int8", "int4", "uncompressed"])
    assert reports == [
        "gradients stay uncompressed: a step takes 800 ms uncompressed;"
        " candidates: int8 800 ms, int4 800 ms, uncompressed again 800 ms"
    ]
    slow = [1.0] * UNCOMPRESSED_STEPS + [0.8] * 2 * TRIAL_STEPS + [1.0] * TRIAL_STEPS
    decision, active, _ = pool.run(2, on_a_clock, slow)[0]
    assert (decision, active) == (8, ["int8", "int4", "uncompressed", "int8"])


def test_the_start_reports_why_nothing_is_tried(pool, tmp_path):
    reason = "Gradients stay uncompressed: shared memory is faster than compressing"
    result = pool.run(2, trained, config_of(transport="auto"), {}, 1)[0]
    assert reason in result["description"]
    assert not result["autotuner"]
    config = config_of(2, transport="auto")
    result = pool.run(2, sharded, config, {UNCOMPRESSED: 0.0}, 1, str(tmp_path))[0]
    assert reason in result["description"]

    result = pool.run(2, trained, config_of(compress_gradients="none"), {}, 1)[0]
    assert "stay uncompressed" not in result["description"]
    # Steps decide with or without measured links.
    assert pool.run(2, trained, config_of(measure_seconds=0), {}, 1)[0]["autotuner"]


def bits_of(engine):
    residuals = engine.hooks.find(Residuals)
    if residuals is None:
        return set()
    return {scatter._bits for scatter in residuals.units.values()}


def sharded(rank, world, config, seconds, steps, folder):
    """Train with simulated durations of reductions, save, and go on with a second engine.

    Runs on every rank.
    """
    kinds: dict[type, Any] = {
        AllToAllReduceScatter: lambda scatter: UNCOMPRESSED,
        QuantisedReduceScatter: lambda scatter: scatter._bits,
    }
    clock = Clock()
    with ExitStack() as stack:
        for kind, key_of in kinds.items():

            def reduce(self, *args, original=kind.__call__, key_of=key_of, **options):
                clock.sleep(seconds[key_of(self)])
                return original(self, *args, **options)

            stack.enter_context(patch.object(kind, "__call__", reduce))
        engine = cases.engine(cases.build("plain", tied=False), config)
        batch = cases.steps_for("plain", world)[0][rank]
        with clock.instead():
            results = [engine.train_batch(batch) for _ in range(steps)]
        engine.save_checkpoint(folder)
        resumed_engine = cases.engine(cases.build("plain", tied=False), config)
        resumed_engine.load_checkpoint(folder)
        next_losses = [float(each.train_batch(batch)) for each in (engine, resumed_engine)]
    return {
        "description": engine.hooks.description,
        "decided": [result.decided for result in results],
        "losses": [float(result.loss) for result in results],
        "bits": bits_of(engine),
        "resumed_bits": bits_of(resumed_engine),
        "next_losses": next_losses,
    }


FEEDBACK = {"error_feedback": True}


@pytest.mark.parametrize(
    ("stage", "seconds", "parallel", "bits"),
    [
        pytest.param(1, {0: 0.1, 8: 0.02, 4: 0.06}, {}, {8}, id="stage 1"),
        pytest.param(
            2, {0: 0.1, 8: 0.06, 4: 0.0}, FEEDBACK, {4}, marks=pytest.mark.proof, id="stage 2"
        ),
        pytest.param(
            3,
            {0: 0.1, 8: 0.06, 4: 0.0},
            {"compress_weights": "int8", **FEEDBACK},
            {4},
            id="stage 3",
        ),
        pytest.param(
            3, {0: 0.1, 8: 0.2, 4: 0.2}, {}, set(), marks=pytest.mark.proof, id="stage 3, slow"
        ),
    ],
)
def test_sharded_stages_decide_on_compression(pool, tmp_path, stage, seconds, parallel, bits):
    config = config_of(stage, **parallel)
    steps = DECIDES_AT + 2
    first, second = pool.run(2, sharded, config, seconds, steps, str(tmp_path))
    assert first["losses"] == second["losses"]
    assert "The first steps decide on compression: int8, int4" in first["description"]
    assert decision_steps(first) == [DECIDES_AT if bits else ALL_TRIED_AT]
    assert first["bits"] == second["bits"] == first["resumed_bits"] == bits
    # The errors of compression are in the checkpoint, so the resumed run has the same loss.
    assert first["next_losses"][0] == first["next_losses"][1]

    # The first steps are uncompressed, and later ones are not.
    config = config_of(stage, **parallel | {"compress_gradients": "none"})
    folder = str(tmp_path / "uncompressed")
    uncompressed = pool.run(2, sharded, config, seconds, steps, folder)[0]["losses"]
    assert first["losses"][:UNCOMPRESSED_STEPS] == uncompressed[:UNCOMPRESSED_STEPS]
    assert first["losses"][UNCOMPRESSED_STEPS + 1] != uncompressed[UNCOMPRESSED_STEPS + 1]


def test_powersgd_of_shards_is_refused():
    config = load(config_of(2, compress_gradients=["int8", "powersgd"]))
    message = "factors a matrix's full gradient, and ZeRO stage 2 reduces it in shards"
    with pytest.raises(ConfigError, match=message):
        resolve(config, world_size=2, micro_batch_size=1)


def resumed(rank, world, folder, compress):
    """Return the losses of a run and of its resumed copy, and whether the copy compresses.

    Runs on every rank.
    """
    batch = cases.steps_for("plain", world)[0][rank]
    with fixed_links():
        engine = cases.engine(cases.build("plain", tied=False), config_of())
        engine.train_batch(batch)
        engine.hooks.find(CompressionAutotuner).commit(8 if compress else 0)
        for _ in range(2):
            engine.train_batch(batch)
        engine.save_checkpoint(folder)
        copy = cases.engine(cases.build("plain", tied=False), config_of())
        copy.load_checkpoint(folder)
    compresses = isinstance(copy.hooks.find(Reducer).reduction, QuantisedBuckets)
    losses: list[float] = []
    copied_losses: list[float] = []
    with patch.object(CompressionAutotuner, "commit", side_effect=AssertionError("decided twice")):
        for _ in range(4):
            losses.append(float(engine.train_batch(batch)))
            copied_losses.append(float(copy.train_batch(batch)))
    return losses, copied_losses, compresses


@pytest.mark.parametrize("compress", [True, False])
def test_a_restart_keeps_the_decision(pool, tmp_path, compress):
    for losses, copied_losses, compresses in pool.run(2, resumed, tmp_path, compress):
        assert compresses == compress
        assert copied_losses == losses


def in_own_loop(rank, world):
    """Return what the steps of a user's training loop decide. Runs on every rank."""
    clock = Clock()
    with fixed_links():
        model = cases.build("plain", tied=False)
        sharded_model = plait.parallelize(model, config_of())
    optimizer = cases.adamw(list(model.parameters()))
    batch = cases.steps_for("plain", world)[0][rank]
    with slow_buckets(clock, SLOW | {8: 0.03, 4: 0.2}), clock.instead():
        for _ in range(DECIDES_AT):
            total, weight = plait.causal_lm_loss(model(batch["input_ids"]), batch)
            sharded_model.backward(total / weight)
            sharded_model.step(optimizer)
    return int(sharded_model.hooks.find(CompressionAutotuner).decision)


def test_steps_of_the_users_loop_decide(pool):
    assert pool.run(2, in_own_loop) == [8, 8]
