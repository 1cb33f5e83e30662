"""What acts on a step: which calls a hook gets, how often and in which order, from the engine and from your own training loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

import plait
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.micro_batches import default_forward
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.pipeline_parallel import Pipeline
from tests.parity import cases
from tests.parity.data_parallel import settings


class Counting(StepHook):
    """Writes down every call, and whether gradients were sums over the ranks by then."""

    description = "calls are written down"

    def __init__(self):
        self.calls: list[str] = []
        self.loaded: Mapping[str, torch.Tensor] = {}

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
        return "" if len(self.calls) > 20 else "it was decided"

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
    """A technique of today attaches one hook more."""
    own = DataParallel.attach

    def attach(self, parts, mesh):
        return [hook, *own(self, parts, mesh)]

    return patch.object(DataParallel, "attach", attach)


def counted(rank, world, stage, folder):
    """Runs in a worker."""
    hook, own = Counting(), Counting()
    config = settings(world, stage, 1, 2)
    with attached(hook):
        engine = cases.engine(cases.build("plain", tied=False), config)
    batch = cases.steps_for("plain", 2 * world)[0][2 * rank : 2 * rank + 2]
    found: dict[str, Any] = {
        "order": [type(each).__name__ for each in engine.hooks.all],
        "said": engine.communication,
    }
    found["decided"] = engine.train_batch(batch).decided
    found["step"], hook.calls[:] = list(hook.calls), []
    for piece in batch:
        engine.backward(plait.causal_lm_loss(default_forward(engine, piece), piece)[0])
        engine.step()
    found["three calls"], hook.calls[:] = list(hook.calls), []
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    found["loaded"] = hook.loaded["counting"].item()
    engine.loss_fn = None
    engine.zero_grad()
    with patch.object(type(engine.model), "forward", side_effect=RuntimeError("planted")):
        try:
            default_forward(engine, batch[0])
        except RuntimeError:
            engine.zero_grad()
    found["error"], hook.calls[:] = list(hook.calls), []
    engine.close()
    found["close"] = hook.calls
    model = cases.build("plain", tied=False)
    with attached(own):
        sharded = plait.parallelize(model, settings(world, 0, 1, 2))
    with sharded.accumulate():
        pass
    found["own loop"] = own.calls
    return found


def test_what_a_hook_is_told(pool, tmp_path):
    for stage in (0, 2):
        for found in pool.run(2, counted, stage, tmp_path / str(stage)):
            own = ["Reducer"] if stage == 0 else ["ShardedSteps", "UnusedTracker"]
            assert found["order"] == [*own, "ChangingBuffers", "Recomputed", "Counting", "Guard"], (
                "other hooks follow"
            )
            assert found["said"].endswith("calls are written down")
            assert found["decided"] == "it was decided"
            micro = ["micro-batch not last", "backward", "micro-batch last", "backward"]
            assert found["step"] == [*micro, "reduction", "update", "step, skipped False"]
            calls = [
                ["micro-batch " + last] * 2 + ["backward", "after backward"]
                for last in ("not last", "last")
            ]
            assert found["three calls"] == [
                *calls[0],
                *calls[1],
                "reduction",
                "update",
                "step, skipped False",
            ]
            assert found["loaded"] == 0
            assert found["error"] == ["drop", "micro-batch not last", "error in forward", "drop"]
            assert found["close"] == ["release", "close"]
            assert found["own loop"] == ["micro-batch not last", "micro-batch last"]


def traced(rank, world):
    """How often a pipeline and a split over tp are planned while an engine is made. Runs in a worker."""
    from plait.parallel.techniques.tensor_parallel import make_plan

    config = settings(world, 0, 1, 2)
    config["parallel"] = {
        "pp": 2,
        "recompute": {"mode": "budget", "budget_gib": 1, "sequence_length": 8},
    }
    config["train_micro_batch_size_per_gpu"] = 1
    with (
        patch.object(Pipeline, "_bounds", autospec=True, side_effect=Pipeline._bounds) as bounds,
        patch(
            "plait.parallel.techniques.tensor_parallel.make_plan", side_effect=make_plan
        ) as plans,
    ):
        engine = cases.engine(
            cases.build("llama", tied=False, dtype=torch.float32, layers=2), config
        )
    engine.close()
    return bounds.call_count, plans.call_count


def test_a_pipeline_is_planned_once(pool):
    assert pool.run(2, traced) == [(1, 0)] * 2


def test_only_what_is_overridden_is_called():
    """No call of a hook that does nothing there."""

    class Quiet(StepHook):
        def finish_reduction(self):
            pass

    hooks = Hooks([Quiet(), StepHook()])
    assert len(hooks.finish_reduction) == 1
    lists = {name: value for name, value in vars(hooks).items() if isinstance(value, list)}
    assert len(lists) == 15
    assert [name for name, calls in lists.items() if calls] == ["finish_reduction"]
    assert hooks.find(Reducer) is None
    assert hooks.find(Quiet) is hooks.all[0]
    assert hooks.state() == {}
    assert hooks.description == ""
