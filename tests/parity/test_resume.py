"""What a checkpoint keeps, what wins when a run goes on otherwise than it was saved, and that saving changes nothing. Bit for bit: the same
numbers in the same order, on the same layout."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import CheckpointError, InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases

LAMBDA = torch.optim.lr_scheduler.LambdaLR


class Plain(torch.optim.Optimizer):
    """A user's optimizer that looks at no `lr`, decays at every step, and counts in its group, in a state and beside both."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "rate": 0.01, "count": 0})
        self.total = 0

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        self.total += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["history"] = [*state.get("history", []), group["count"]]
                    state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                    p.mul_(0.99).sub_(
                        group["rate"] * state["mean"] * (len(state["history"]) + self.total)
                    )

    def state_dict(self):
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict):
        self.total = state_dict.pop("total")
        super().load_state_dict(state_dict)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused, lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "foreach, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "a user's": Plain,
}


def engine_of(world, *, stage=2, lr=0.01, kind="plain", layers=None, made=None, **more):
    """One micro-batch of two samples a rank and step, float64."""
    conf: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        **({} if made is not None else {"optimizer": {"type": "AdamW", "params": {"lr": lr}}}),
        "parallel": {"dp_shard": world if stage else 1, "dp_replicate": 1 if stage else world},
        "run": {"seed": 3},
    }
    scheduler = more.pop("lr_scheduler", None)
    model = cases.build(kind, tied=True, layers=layers)
    return cases.engine(model, conf | more, optimizer=made, lr_scheduler=scheduler)


def batch(rank, step):
    ids = torch.randint(
        0, cases.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank)
    )
    return {"input_ids": ids, "labels": ids}


def go(engine, *steps):
    for step in steps:
        engine.train_batch(batch(engine.dp_rank, step))
    return engine


def weights(engine):
    return {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


def saved_and_not(rank, world, folder, names):
    """By optimizer: the parameters that differ, with a word for when. Runs in a worker."""
    found: dict[str, list[str]] = {}
    for name in names:
        make, at = OPTIMIZERS[name], Path(folder) / re.sub(r"\W", "-", name)
        straight = weights(go(engine_of(world, made=make), 1, 2, 3))
        saved = engine_of(world, made=make)
        saved.save_checkpoint(at, tag="first")
        assert not saved.optimizer.state
        go(saved, 1)
        saved.save_checkpoint(at, tag="second")
        go(saved, 2, 3)
        loaded = go(
            engine_of(world, made=make), 9
        )  # has states of its own, which the checkpoint has not
        loaded.load_checkpoint(at, tag="first")
        assert not loaded.optimizer.state
        go(loaded, 1, 2, 3)
        resumed = engine_of(world, made=make)
        resumed.load_checkpoint(at, tag="second")
        go(resumed, 2, 3)
        wrong = {"saved": saved, "loaded": loaded, "resumed": resumed}
        found[name] = [
            f"{word}: {where}"
            for word, engine in wrong.items()
            for where in differing(straight, weights(engine))
        ]
    return found


def test_saving_and_loading_change_nothing(pool, tmp_path):
    """A7: saved or loaded before the first update, and saved and loaded after one, training goes on to the same bits."""
    for world, names in (
        (2, ["adamw", "a user's"]),
        (1, [name for name in OPTIMIZERS if name not in ("adamw", "a user's")]),
    ):
        assert pool.run(world, saved_and_not, str(tmp_path), names)[0] == {
            name: [] for name in names
        }


def skipped_first(rank, world, folder):
    """Runs in a worker."""

    def build():
        return engine_of(world, fp16={"enabled": True, "initial_scale_power": 40}, stage=0)

    straight, saved = go(build(), 1), go(build(), 1)
    assert straight.skipped_steps == 1
    saved.save_checkpoint(folder)
    again = build()
    again.load_checkpoint(folder)
    assert again.skipped_steps == 1
    again.close()
    while not straight.was_step_applied():
        go(straight, 2)
        go(saved, 2)
    return differing(weights(straight), weights(saved))


def test_saving_after_skipped_steps_changes_nothing(pool, tmp_path):
    """A7, where every step so far overflowed."""
    assert pool.run(1, skipped_first, str(tmp_path))[0] == []


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 5], gamma=0.5),
    "lambda": lambda o: LAMBDA(o, lambda step: 1 / (1 + step)),
    "partial": lambda o: LAMBDA(o, functools.partial(lambda rate, step: rate**step, 0.7)),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[3],
    ),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
}


def schedules_go_on(rank, world, folder):
    """(rates straight, rates resumed) by schedule. Runs in a worker."""
    found: dict[str, Any] = {}
    for name, make in SCHEDULERS.items():
        at = Path(folder) / name.replace(" ", "-")
        straight = engine_of(1, stage=0, lr_scheduler=make)
        rates = [go(straight, step).get_lr()[0] for step in range(6)]
        saved = go(engine_of(1, stage=0, lr_scheduler=make), 0, 1, 2)
        saved.save_checkpoint(at, client_state={4: (1, 2), "set": {3}})
        resumed = engine_of(1, stage=0, lr_scheduler=make)
        loaded = resumed.load_checkpoint(at)
        assert loaded is not None and loaded[1] == {4: (1, 2), "set": {3}}
        found[name] = (
            rates[3:],
            [go(resumed, step).get_lr()[0] for step in (3, 4, 5)],
            differing(weights(straight), weights(resumed)),
        )
    return found


def test_every_schedule_goes_on(pool, tmp_path):
    """A9: integer keys, functions, schedules of schedules; and a client state of such values."""
    for name, (straight, resumed, different) in pool.run(1, schedules_go_on, str(tmp_path))[
        0
    ].items():
        assert resumed == straight, name
        assert not different, name
        assert len(set(straight)) > 1, name
    for file in tmp_path.glob("*/*/plait.json"):  # whoever reads it needs nothing of Plait
        json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_schedule_that_needs_a_metric_is_refused(pool):
    """B15: before the first step, with the way to use it."""
    said = pool.run(1, refusals)[0]
    assert (
        "ReduceLROnPlateau follows a metric" in said[0]
        and "call its step(metric) after each validation" in said[0]
    )
    assert "the state of LambdaLR.odd is a object" in said[1]


def refusals(rank, world):
    """Runs in a worker."""

    def odd(optimizer):
        scheduler = LAMBDA(optimizer, lambda _: 1.0)
        scheduler.odd = object()  # type: ignore[attr-defined]
        return scheduler

    said = []
    for make in (torch.optim.lr_scheduler.ReduceLROnPlateau, odd):
        with pytest.raises(InputError) as error:
            engine_of(1, stage=0, lr_scheduler=make)
        said.append(str(error.value))
    return said


LONGER = {"type": "CosineAnnealingLR", "params": {"T_max": 9}}
COSINE = {"type": "CosineAnnealingLR", "params": {"T_max": 6}}
WARM = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"},
}


def changed(rank, world, folder):
    """(rates after resuming, the same as if it had always been so, notes) by case. Runs in a worker."""

    def adamw(**params):
        return {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, **params}}}

    decay = {"lr_scheduler": SCHEDULERS["lambda"]}
    pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "nothing": (adamw(), adamw()),
        "lr": (adamw(), adamw(lr=0.005)),
        "lr under a schedule": (
            {**adamw(), "scheduler": COSINE},
            {**adamw(lr=0.005), "scheduler": COSINE},
        ),
        "lr that a schedule replaces": (
            {**adamw(), "scheduler": WARM},
            {**adamw(lr=0.005), "scheduler": WARM},
        ),
        "lr under a passed schedule": (adamw() | decay, adamw(lr=0.005) | decay),
        "a longer schedule": ({**adamw(), "scheduler": COSINE}, {**adamw(), "scheduler": LONGER}),
        "another schedule": ({**adamw(), "scheduler": COSINE}, {**adamw(), "scheduler": WARM}),
        "no schedule": ({**adamw(), "scheduler": COSINE}, adamw()),
        "a new schedule": (adamw(), {**adamw(), "scheduler": COSINE}),
    }
    found: dict[str, Any] = {}
    for name, (before, after) in pairs.items():
        at = Path(folder) / name.replace(" ", "-")
        go(engine_of(1, stage=0, **before), 0, 1).save_checkpoint(at)
        always = go(engine_of(1, stage=0, **after), 0, 1)
        resumed, notes = engine_of(1, stage=0, **after), []
        resumed.load_checkpoint(at, on_note=notes.append)
        rates = [
            [engine.get_lr()[0], *(go(engine, step).get_lr()[0] for step in (2, 3))]
            for engine in (resumed, always)
        ]
        found[name] = (*rates, notes)
    go(engine_of(1, stage=0, **adamw(weight_decay=0.1)), 0).save_checkpoint(Path(folder) / "decay")
    resumed, notes = engine_of(1, stage=0, **adamw(weight_decay=0.2, betas=[0.8, 0.99])), []
    resumed.load_checkpoint(Path(folder) / "decay", on_note=notes.append)
    group = resumed.optimizer.param_groups[0]
    found["decay"] = (group["weight_decay"], tuple(group["betas"]), notes)
    by_hand = go(engine_of(1, stage=0), 0)
    by_hand.optimizer.param_groups[0]["lr"] = 0.123
    by_hand.save_checkpoint(Path(folder) / "hand")
    resumed = engine_of(1, stage=0)
    resumed.load_checkpoint(Path(folder) / "hand")
    found["by hand"] = resumed.get_lr()
    with pytest.raises(CheckpointError) as error:
        engine_of(1, stage=0, **adamw(amsgrad=True)).load_checkpoint(Path(folder) / "hand")
    found["amsgrad"] = str(error.value)
    with pytest.raises(CheckpointError) as error:
        engine_of(1, stage=0, optimizer={"type": "SGD", "params": {"lr": 0.1}}).load_checkpoint(
            Path(folder) / "hand"
        )
    found["class"] = str(error.value)
    return found


def test_what_the_configuration_says_now_wins(pool, tmp_path):
    """A10: a changed learning rate, schedule, weight decay or beta takes effect and is said; what did not change goes on."""
    found = pool.run(1, changed, str(tmp_path))[0]
    assert found.pop("by hand") == [0.123]
    assert "amsgrad = True: it needs `max_exp_avg_sq`" in found.pop("amsgrad")
    assert (
        "holds the states of torch.optim.AdamW, but this run's optimizer is torch.optim.SGD"
        in found.pop("class")
    )
    decay, betas, notes = found.pop("decay")
    assert (decay, betas) == (0.2, (0.8, 0.99))
    assert {note.partition(" is ")[0] for note in notes} == {"weight_decay", "betas"}
    said = {}
    for name, (resumed, always, notes) in found.items():
        if name == "lr under a passed schedule":
            assert resumed == pytest.approx(always, rel=1e-14), name
        else:
            assert resumed == always, name
        said[name] = notes
    assert said["nothing"] == []
    assert said["lr"] == ["lr is 0.005 in the configuration, 0.01 when the checkpoint was written"]
    assert (
        len(said["lr under a schedule"]) == 2 and "continues at" in said["lr under a schedule"][1]
    )
    assert said["lr that a schedule replaces"] == [
        "lr is 0.005 in the configuration, 0.01 when the checkpoint was written, which changes nothing: the schedule sets it"
    ]
    assert len(said["lr under a passed schedule"]) == 2
    for name in ("a longer schedule", "another schedule", "no schedule", "a new schedule"):
        assert len(said[name]) == 1 and "the learning rate continues at" in said[name][0], name


def other_depth(rank, world, folder):
    """Runs in a worker."""
    go(engine_of(1, stage=0, layers=4), 0).save_checkpoint(Path(folder) / "four")
    go(engine_of(1, stage=0, layers=2), 0).save_checkpoint(Path(folder) / "two")
    said = []
    for layers, name in ((2, "four"), (4, "two")):
        engine = engine_of(1, stage=0, layers=layers)
        before = weights(engine)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(Path(folder) / name)
        assert not differing(before, weights(engine))
        said.append(str(error.value))
    return said


def test_missing_and_extra_tensors_are_refused(pool, tmp_path):
    """A13: a deeper checkpoint does not load into a shallower model, nor the other way round."""
    deeper, shallower = pool.run(1, other_depth, str(tmp_path))[0]
    assert "is of another model: it has 14 tensors that this model lacks: blocks.2." in deeper
    assert "is of another model: it lacks 14 tensors that this model has: blocks.2." in shallower


def drawn(rank, world, folder, first, second):
    """(state when saved, state when loaded, a draw, notes). Runs in a worker."""

    def build(degrees):
        return engine_of(world, kind="llama", parallel=degrees)

    engine = build(first)
    torch.rand(5 + engine.dp_rank)
    engine.save_checkpoint(folder)
    at_save, others = torch.get_rng_state(), (random.getstate(), np.random.random(2).tolist())
    torch.rand(3), random.random(), random.gauss(0, 1)
    notes: list[str] = []
    build(second).load_checkpoint(folder, on_note=notes.append)
    same = torch.equal(at_save, torch.get_rng_state())
    assert ((random.getstate(), np.random.random(2).tolist()) == others) == same
    return (
        same,
        [*torch.rand(4).tolist(), random.random()],
        [note for note in notes if "generators" in note],
    )


def test_generators_follow_the_layout(pool, tmp_path):
    """A6: the same layout goes on where it was; on another one, ranks of tp draw alike, and ranks of dp do not."""
    data, tensor = {"dp_shard": 2, "tp": 1}, {"dp_shard": 1, "tp": 2}
    for index, (first, second) in enumerate([(data, data), (data, tensor), (tensor, data)]):
        results = pool.run(2, drawn, str(tmp_path / str(index)), first, second)
        same, draws, notes = zip(*results, strict=True)
        assert (draws[0] == draws[1]) == (second == tensor)
        assert same == ((True, True) if first == second else (False, False))
        assert [len(one) for one in notes] == ([0, 0] if first == second else [1, 1])
