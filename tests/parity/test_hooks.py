"""Hooks of a step: which calls they receive, how often and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

import plait
from plait.parallel.hooks import StepHook
from plait.parallel.micro_batches import default_forward
from plait.parallel.techniques.data_parallel import DataParallel
from tests.parity import cases
from tests.parity.data_parallel import settings


class RecordingHook(StepHook):
    """A hook that records its calls."""

    description = "calls are recorded"

    def __init__(self):
        self.calls: list[str] = []
        self.loaded: Mapping[str, torch.Tensor] = {}

    def take(self):
        """Return the calls since the last time."""
        calls = list(self.calls)
        self.calls.clear()
        return calls

    def before_microbatch(self, last):
        self.calls.append(f"micro-batch {'last' if last else 'not last'}")

    def backward(self):
        self.calls.append("backward")
        return nullcontext()

    def after_backward(self):
        self.calls.append("after backward")

    def finish_reduction(self):
        self.calls.append("reduction")

    def before_update(self):
        self.calls.append("update")

    def after_step(self, end):
        self.calls.append(f"step, skipped {end.skipped}")
        return "a decision"

    def drop_gradients(self):
        self.calls.append("drop")

    def on_error(self, lost):
        self.calls.append(f"error in {lost}")

    def state(self):
        return {"counting": torch.tensor(len(self.calls))}

    def load_state(self, saved):
        self.loaded = saved

    def release(self):
        self.calls.append("release")

    def close(self):
        self.calls.append("close")


def attached(hook):
    """Let an existing technique attach one more hook."""
    original = DataParallel.attach

    def attach(self, parts, mesh):
        return [hook, *original(self, parts, mesh)]

    return patch.object(DataParallel, "attach", attach)


def recorded_calls(rank, world, stage, folder):
    """Return the calls of each phase of an engine and of an own loop. Runs on every rank."""
    hook = RecordingHook()
    with attached(hook):
        engine = cases.engine(cases.build("plain", tied=False), settings(world, stage, 1, 2))
    results: dict[str, Any] = {
        "order": [type(each).__name__ for each in engine.hooks.all],
        "communication": engine.communication,
    }

    batch = cases.steps_for("plain", 2 * world)[0][2 * rank : 2 * rank + 2]
    results["decided"] = engine.train_batch(batch).decided
    results["train_batch"] = hook.take()

    for micro_batch in batch:
        output = default_forward(engine, micro_batch)
        engine.backward(plait.causal_lm_loss(output, micro_batch)[0])
        engine.step()
    results["three calls"] = hook.take()

    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    results["loaded"] = hook.loaded["counting"].item()

    engine.zero_grad()
    with patch.object(type(engine.model), "forward", side_effect=RuntimeError("planted")):
        try:
            default_forward(engine, batch[0])
        except RuntimeError:
            engine.zero_grad()
    results["error"] = hook.take()
    engine.close()
    results["close"] = hook.take()

    with attached(hook):
        sharded = plait.parallelize(cases.build("plain", tied=False), settings(world, 0, 1, 2))
    with sharded.accumulate():
        pass
    results["own loop"] = hook.take()
    return results


def test_calls_of_a_hook(pool, tmp_path):
    micro_batch = "micro-batch not last"
    last = "micro-batch last"
    end_of_step = ["reduction", "update", "step, skipped False"]
    for stage in (0, 2):
        reduction = ["Reducer"] if stage == 0 else ["ShardedSteps", "UnusedTracker"]
        for results in pool.run(2, recorded_calls, stage, tmp_path / str(stage)):
            expected_order = [*reduction, "ChangingBuffers", "Recomputed", "RecordingHook", "Guard"]
            assert results["order"] == expected_order
            assert results["communication"].endswith("calls are recorded")
            assert results["decided"] == "a decision"
            assert results["train_batch"] == [
                *(micro_batch, "backward", last, "backward"),
                *end_of_step,
            ]
            assert results["three calls"] == [
                *(micro_batch, micro_batch, "backward", "after backward"),
                *(last, last, "backward", "after backward"),
                *end_of_step,
            ]
            assert results["loaded"] == 0
            assert results["error"] == ["drop", micro_batch, "error in forward", "drop"]
            assert results["close"] == ["release", "close"]
            assert results["own loop"] == [micro_batch, last]
