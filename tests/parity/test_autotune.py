"""Compression that the user allows is taken where the run's own steps show that it pays, on all ranks alike, and stays over a restart."""

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

WHOLE_STEPS, TRIED_STEPS = 6, 5
"""Of whole gradients, and of each way that is tried: one before the clock, two uncounted, three that count."""
ALL_TRIED_AT = WHOLE_STEPS + 2 * TRIED_STEPS
DECIDES_AT = ALL_TRIED_AT + TRIED_STEPS
"""Whole gradients once more, before another way is taken."""
COMPUTATION = -1


def config_of(**parallel):
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"transport": "torch", "compress_gradients": "auto", **parallel}
    return config


LINKS = GroupLinks("dp_replicate", 1, 2, Level(2, {"all-reduce": Cost(1.0, 0)}))


WAYS = {8: QuantisedBuckets, 4: QuantisedBuckets, 0: AlgorithmBuckets, 1: PowerSGDBuckets}


def slowed(clock, seconds):
    """Finishing the buckets of a step takes so long in each way (bits; 0 whole, 1 PowerSGD)."""
    stack = ExitStack()
    for kind in {WAYS[way] for way in seconds if way != COMPUTATION}:

        def finish(self, index, honest=kind.finish):
            if index == 0:
                clock.sleep(
                    seconds.get(
                        1 if isinstance(self, PowerSGDBuckets) else getattr(self, "_bits", 0), 0
                    )
                )
            honest(self, index)

        stack.enter_context(patch.object(kind, "finish", finish))
    return stack


def trained(rank, world, config, slow, steps):
    """Runs in a worker."""
    clock = Clock()
    with patch.object(measure, "measure_algorithms", lambda *args, **options: LINKS):
        model = cases.build("plain", tied=False)
        model.register_forward_pre_hook(lambda *_: clock.sleep(slow.get(COMPUTATION, 0)))
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    batch = cases.steps_for("plain", world)[0][rank]
    with slowed(clock, slow), clock.instead():
        results = [engine.train_batch(batch) for _ in range(steps)]
    assert engine.hooks.find(Reducer) is not None
    return {
        "said": engine.hooks.description,
        "says_now": engine.communication,
        "decided": [result.decided for result in results],
        "losses": [float(result.loss) for result in results],
        "compressed": isinstance(engine.hooks.find(Reducer).reduction, QuantisedBuckets),
        "code": int(engine.hooks.find(CompressionAutotuner).decision)
        if engine.hooks.find(CompressionAutotuner) is not None
        else 0,
        "autotuner": engine.hooks.find(CompressionAutotuner) is not None,
        "parameters": [p.detach().clone() for p in engine.model.parameters()],
    }


SLOW = {0: 0.2}
"""Seconds that a step of whole gradients waits for them."""


def test_compression_is_chosen_where_a_trial_saves_time(pool):
    first, second = pool.run(2, trained, config_of(), SLOW | {8: 0.03, 4: 0.2}, DECIDES_AT + 3)
    assert "The first steps decide on compression: int8, int4" in first["said"]
    assert first["compressed"] and second["compressed"]
    assert [bool(said) for said in first["decided"]] == [
        step + 1 == DECIDES_AT for step in range(DECIDES_AT + 3)
    ]
    decided = first["decided"][DECIDES_AT - 1]
    assert "gradients are sent as int8 from now on: a step takes" in decided
    assert " ms uncompressed; candidates: int8 " in decided
    assert ", uncompressed again " in decided
    assert first["says_now"] == f"{first['said']}. {decided}"
    assert first["losses"] == second["losses"]
    assert all(
        torch.equal(a, b) for a, b in zip(first["parameters"], second["parameters"], strict=True)
    )
    whole = pool.run(2, trained, config_of(compress_gradients="none"), {}, DECIDES_AT + 3)[0]
    assert first["losses"][: WHOLE_STEPS + 1] == pytest.approx(
        whole["losses"][: WHOLE_STEPS + 1], rel=1e-12
    ), "the first steps are whole"
    assert first["losses"][-1] != whole["losses"][-1]
    assert first["losses"][-1] == pytest.approx(whole["losses"][-1], rel=0.01)


@pytest.mark.parametrize(
    ("allowed", "takes", "code"),
    [
        ("auto", {8: 0.12, 4: 0.02}, 4),
        ("auto", {8: 0.03, 4: 0.2}, 8),
        (["int8"], {8: 0.1}, 8),
        (["powersgd", "int8"], {8: 0.12, 1: 0}, 1),
        (["powersgd", "int4"], {4: 0.03, 1: 0.2}, 4),
        ("auto", {8: 0.3, 4: 0.3}, 0),
    ],
)
def test_what_changes_more_has_to_save_more(pool, allowed, takes, code):
    steps = WHOLE_STEPS + (len(takes) + bool(code)) * TRIED_STEPS
    results = pool.run(2, trained, config_of(compress_gradients=allowed), SLOW | takes, steps)
    assert [found["code"] for found in results] == [code, code]
    assert [bool(said) for said in results[0]["decided"]] == [
        step + 1 == steps for step in range(steps)
    ]
    assert results[0]["compressed"] == (code > 1)


@pytest.mark.parametrize(
    ("tried", "taken"),
    [
        ({"int8": 0.96}, "whole"),
        ({"int8": 0.94, "int4": 0.9}, "int8"),
        ({"int8": 0.94, "int4": 0.89}, "int4"),
        ({"int8": 2.0, "int4": 0.9}, "int4"),
    ],
)
def test_a_twentieth_of_the_best_before_has_to_be_saved(tried, taken):
    assert best_candidate({"whole": 1.0, **tried}) == taken


def on_a_clock(rank, world, seconds):
    """(decision, ways taken in turn, what was said), of steps that take so long. Runs in a worker."""
    taken: list[str] = []
    options = tuple(
        CompressionCandidate(name, code, partial(taken.append, name))
        for name, code in (("int8", 8), ("int4", 4))
    )
    autotuner = CompressionAutotuner(
        (dist.group.WORLD,), torch.device("cpu"), partial(taken.append, "whole"), options
    )
    now, said = 0.0, []
    with patch.object(time, "perf_counter", lambda: now):
        for step in seconds:
            now += step
            said.append(autotuner.after_step(StepEnd(skipped=False)))
    return int(autotuner.decision), taken, [text for text in said if text]


def test_whole_steps_that_were_slow_by_chance_decide_nothing(pool):
    """int8 seems to save a fifth, until whole gradients take as long."""
    slow_at_first = [1.0] * WHOLE_STEPS + [0.8] * 3 * TRIED_STEPS
    decision, taken, said = pool.run(2, on_a_clock, slow_at_first)[0]
    assert (decision, taken) == (0, ["int8", "int4", "whole"])
    assert said == [
        "gradients stay uncompressed: a step takes 800 ms uncompressed; candidates: int8 800 ms, int4 800 ms, uncompressed again 800 ms"
    ]
    slow = [1.0] * WHOLE_STEPS + [0.8] * 2 * TRIED_STEPS + [1.0] * TRIED_STEPS
    assert pool.run(2, on_a_clock, slow)[0][:2] == (8, ["int8", "int4", "whole", "int8"])


def test_a_step_that_computes_longer_stays_uncompressed(pool):
    found = pool.run(2, trained, config_of(), {COMPUTATION: 0.3}, ALL_TRIED_AT)[0]
    assert not found["compressed"] and found["code"] == 0
    assert "gradients stay uncompressed: a step takes" in found["decided"][-1]


def test_where_nothing_is_open_the_reason_is_said_at_once(pool):
    found = pool.run(2, trained, config_of(transport="auto"), {}, 1)[0]
    assert "Gradients stay uncompressed: shared memory is faster than compressing" in found["said"]
    assert not found["autotuner"]
    assert (
        "stay uncompressed"
        not in pool.run(2, trained, config_of(compress_gradients="none"), {}, 1)[0]["said"]
    )
    assert pool.run(2, trained, config_of(measure_seconds=0), {}, 1)[0]["autotuner"], (
        "the steps decide, with or without measured links"
    )


def sharded_config(stage, **more):
    config = settings(2, stage, 1, 1)
    config["parallel"] |= {"transport": "torch", "compress_gradients": "auto", **more}
    return config


def bits_of(engine):
    residuals = engine.hooks.find(Residuals)
    return (
        {scatter._bits for scatter in residuals.units.values()} if residuals is not None else set()
    )


def sharded(rank, world, config, takes, steps, folder):
    """Each reduction takes so long (bits; 0 whole). A checkpoint at the end, and a step of an engine that goes on from it. Runs in a
    worker."""
    kinds: dict[type, Any] = {
        AllToAllReduceScatter: lambda scatter: 0,
        QuantisedReduceScatter: lambda scatter: scatter._bits,
    }
    clock = Clock()
    with ExitStack() as stack:
        for kind, bits in kinds.items():

            def reduce(self, *args, honest=kind.__call__, bits=bits, **options):
                clock.sleep(takes[bits(self)])
                return honest(self, *args, **options)

            stack.enter_context(patch.object(kind, "__call__", reduce))
        engine = cases.engine(cases.build("plain", tied=False), config)
        batch = cases.steps_for("plain", world)[0][rank]
        with clock.instead():
            results = [engine.train_batch(batch) for _ in range(steps)]
        engine.save_checkpoint(folder)
        other = cases.engine(cases.build("plain", tied=False), config)
        other.load_checkpoint(folder)
        again = [float(one.train_batch(batch)) for one in (engine, other)]
    return {
        "said": engine.hooks.description,
        "decided": [result.decided for result in results],
        "losses": [float(result.loss) for result in results],
        "bits": bits_of(engine),
        "others_bits": bits_of(other),
        "again": again,
    }


@pytest.mark.parametrize(
    ("stage", "takes", "more", "bits"),
    [
        (1, {0: 0.1, 8: 0.02, 4: 0.06}, {}, {8}),
        pytest.param(
            2, {0: 0.1, 8: 0.06, 4: 0.0}, {"error_feedback": True}, {4}, marks=pytest.mark.proof
        ),
        (3, {0: 0.1, 8: 0.06, 4: 0.0}, {"compress_weights": "int8", "error_feedback": True}, {4}),
        pytest.param(3, {0: 0.1, 8: 0.2, 4: 0.2}, {}, set(), marks=pytest.mark.proof),
    ],
)
def test_sharded_stages_decide_too(pool, tmp_path, stage, takes, more, bits):
    first, second = pool.run(
        2, sharded, sharded_config(stage, **more), takes, DECIDES_AT + 2, str(tmp_path)
    )
    assert first["losses"] == second["losses"]
    assert "The first steps decide on compression: int8, int4" in first["said"]
    decides_at = DECIDES_AT if bits else ALL_TRIED_AT
    assert [bool(said) for said in first["decided"]] == [
        step + 1 == decides_at for step in range(DECIDES_AT + 2)
    ]
    assert first["bits"] == second["bits"] == first["others_bits"] == bits
    assert first["again"][0] == first["again"][1], "a run that goes on is the same, errors and all"
    fixed = sharded_config(stage, **more | {"compress_gradients": "none"})
    whole = pool.run(2, sharded, fixed, takes, DECIDES_AT + 2, str(tmp_path / "whole"))[0]
    assert first["losses"][:WHOLE_STEPS] == whole["losses"][:WHOLE_STEPS], (
        "the first steps are whole"
    )
    assert first["losses"][WHOLE_STEPS + 1] != whole["losses"][WHOLE_STEPS + 1]


def test_shared_memory_leaves_sharded_gradients_whole(pool, tmp_path):
    config = sharded_config(2, transport="auto")
    found = pool.run(2, sharded, config, {0: 0.0}, 1, str(tmp_path))[0]
    assert "Gradients stay uncompressed: shared memory is faster than compressing" in found["said"]


def test_factors_of_shards_are_refused():
    with pytest.raises(
        ConfigError, match="factors a matrix's full gradient, and ZeRO stage 2 reduces it in shards"
    ):
        resolve(
            load(sharded_config(2, compress_gradients=["int8", "powersgd"])),
            world_size=2,
            micro_batch_size=1,
        )


def resumed(rank, world, folder, compress):
    """(losses of an uninterrupted run after its checkpoint, those of the one that goes on there, whether that compresses at once). Runs in
    a worker."""
    batch = cases.steps_for("plain", world)[0][rank]
    with patch.object(measure, "measure_algorithms", lambda *args, **options: LINKS):
        one = cases.engine(cases.build("plain", tied=False), config_of())
        assert one.hooks.find(CompressionAutotuner) is not None
        one.train_batch(batch)
        one.hooks.find(CompressionAutotuner).commit(8 if compress else 0)
        for _ in range(2):
            one.train_batch(batch)
        one.save_checkpoint(folder)
        other = cases.engine(cases.build("plain", tied=False), config_of())
        other.load_checkpoint(folder)
    assert other.hooks.find(Reducer) is not None
    compresses = isinstance(other.hooks.find(Reducer).reduction, QuantisedBuckets)
    with patch.object(CompressionAutotuner, "commit", side_effect=AssertionError("decided twice")):
        after = [[float(engine.train_batch(batch)) for _ in range(4)] for engine in (one, other)]
    return after[0], after[1], compresses


@pytest.mark.parametrize("compress", [True, False])
def test_a_restart_goes_on_with_what_was_decided(pool, tmp_path, compress):
    for uninterrupted, again, compresses in pool.run(2, resumed, tmp_path, compress):
        assert compresses == compress
        assert again == uninterrupted


def in_a_loop(rank, world):
    """What the steps of your own training loop decide. Runs in a worker."""
    clock = Clock()
    with patch.object(measure, "measure_algorithms", lambda *args, **options: LINKS):
        model = cases.build("plain", tied=False)
        sharded = plait.parallelize(model, config_of())
    optimizer, batch = (
        cases.adamw(list(model.parameters())),
        cases.steps_for("plain", world)[0][rank],
    )
    with slowed(clock, SLOW | {8: 0.03, 4: 0.2}), clock.instead():
        for _ in range(DECIDES_AT):
            total, weight = plait.causal_lm_loss(model(batch["input_ids"]), batch)
            sharded.backward(total / weight)
            sharded.step(optimizer)
    return int(sharded.hooks.find(CompressionAutotuner).decision)


def test_the_steps_of_a_loop_decide(pool):
    assert pool.run(2, in_a_loop) == [8, 8]
