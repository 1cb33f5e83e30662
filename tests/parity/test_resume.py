"""Content of a checkpoint, settings that change between runs, and that saving changes nothing.

Runs are compared bit by bit: they compute the same numbers in the same order on the same layout.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import CheckpointError, InputError
from plait.hashing import sha256_of
from tests.parity import cases
from tests.parity.full_tensors import full_weights, names_of_differences

LAMBDA = torch.optim.lr_scheduler.LambdaLR


class CountingOptimizer(torch.optim.Optimizer):
    """A user's optimizer with state in its groups, per parameter, and as an attribute.

    It ignores `lr` and decays at every step.
    """

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "rate": 0.01, "count": 0})
        self.total = 0

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        self.total += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["history"] = [*state.get("history", []), group["count"]]
                state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                factor = group["rate"] * (len(state["history"]) + self.total)
                p.mul_(0.99).sub_(factor * state["mean"])

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
    "a user's": CountingOptimizer,
}


def adamw(**params):
    return {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, **params}}}


def build(
    world,
    *,
    stage=0,
    kind="plain",
    layers=None,
    make_optimizer=None,
    make_scheduler=None,
    **sections,
):
    """Return an engine with one micro-batch of two samples per rank and step, in float64."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "parallel": {"dp_shard": world if stage else 1, "dp_replicate": 1 if stage else world},
        "run": {"seed": 3},
    }
    if make_optimizer is None:
        config |= adamw()
    model = cases.build(kind, tied=True, layers=layers)
    return cases.engine(
        model, config | sections, optimizer=make_optimizer, lr_scheduler=make_scheduler
    )


def train(engine, *steps):
    """Train on the batches of these steps, and return the engine."""
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + engine.dp_rank)
        ids = torch.randint(0, cases.VOCABULARY, (2, 7), generator=generator)
        engine.train_batch({"input_ids": ids, "labels": ids})
    return engine


def learning_rates(engine, *steps):
    """Return the learning rate after each step."""
    return [train(engine, step).get_lr()[0] for step in steps]


def interrupted_runs(rank, world, folder, names):
    """Return the weights that differ from those of an uninterrupted run, by optimizer.

    Runs on every rank.
    """
    differences: dict[str, list[str]] = {}
    for name in names:
        optimizer = OPTIMIZERS[name]
        checkpoints = Path(folder) / re.sub(r"\W", "-", name)

        def new_engine(optimizer=optimizer):
            return build(world, stage=2, make_optimizer=optimizer)

        expected = full_weights(train(new_engine(), 1, 2, 3).model)

        saved = new_engine()
        saved.save_checkpoint(checkpoints, tag="first")
        assert not saved.optimizer.state
        train(saved, 1)
        saved.save_checkpoint(checkpoints, tag="second")
        train(saved, 2, 3)

        # This engine has states, which the first checkpoint does not have.
        loaded = train(new_engine(), 9)
        loaded.load_checkpoint(checkpoints, tag="first")
        assert not loaded.optimizer.state
        train(loaded, 1, 2, 3)

        resumed = new_engine()
        resumed.load_checkpoint(checkpoints, tag="second")
        train(resumed, 2, 3)

        differences[name] = []
        for run, engine in (("saved", saved), ("loaded", loaded), ("resumed", resumed)):
            differing = names_of_differences(expected, full_weights(engine.model))
            differences[name] += [f"{run}: {parameter}" for parameter in differing]
    return differences


def test_saving_and_loading_change_nothing(pool, tmp_path):
    """Training continues to the same bits after a save or load (A7).

    The checkpoints are from before the first update and from after it.
    """
    several_ranks = ["adamw", "a user's"]
    one_rank = [name for name in OPTIMIZERS if name not in several_ranks]
    for world, names in ((2, several_ranks), (1, one_rank)):
        differences = pool.run(world, interrupted_runs, str(tmp_path), names)[0]
        assert differences == {name: [] for name in names}


def save_after_a_skipped_step(rank, world, folder):
    """Return the weights that differ after a save. Runs on every rank."""

    def engine_after_overflow():
        return train(build(world, fp16={"enabled": True, "initial_scale_power": 40}), 1)

    expected = engine_after_overflow()
    saved = engine_after_overflow()
    assert expected.skipped_steps == 1
    saved.save_checkpoint(folder)
    loaded = build(world, fp16={"enabled": True, "initial_scale_power": 40})
    loaded.load_checkpoint(folder)
    assert loaded.skipped_steps == 1
    loaded.close()

    while not expected.was_step_applied():
        train(expected, 2)
        train(saved, 2)
    return names_of_differences(full_weights(expected.model), full_weights(saved.model))


def test_saving_after_skipped_steps_changes_nothing(pool, tmp_path):
    """Covers A7 where every step so far overflowed."""
    assert pool.run(1, save_after_a_skipped_step, str(tmp_path))[0] == []


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


def resume_schedules(rank, world, folder):
    """Compare a resumed with an uninterrupted run per schedule. Runs on every rank."""
    client_state = {4: (1, 2), "set": {3}}
    for name, scheduler in SCHEDULERS.items():
        checkpoints = Path(folder) / name.replace(" ", "-")
        uninterrupted = build(1, make_scheduler=scheduler)
        expected = learning_rates(uninterrupted, *range(6))[3:]
        assert len(set(expected)) > 1, name

        saved = train(build(1, make_scheduler=scheduler), 0, 1, 2)
        saved.save_checkpoint(checkpoints, client_state=client_state)
        resumed = build(1, make_scheduler=scheduler)
        loaded = resumed.load_checkpoint(checkpoints)
        assert loaded is not None and loaded[1] == client_state
        assert learning_rates(resumed, 3, 4, 5) == expected, name
        weights = full_weights(uninterrupted.model)
        assert names_of_differences(weights, full_weights(resumed.model)) == [], name


def test_every_schedule_resumes(pool, tmp_path):
    """Schedules may have integer keys, functions, and schedules in them (A9)."""
    pool.run(1, resume_schedules, str(tmp_path))
    # Other programs can read the manifests, which are plain JSON.
    for file in tmp_path.glob("*/*/plait.json"):
        json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def scheduler_with_an_object(optimizer):
    scheduler = LAMBDA(optimizer, lambda _: 1.0)
    scheduler.odd = object()  # type: ignore[attr-defined]
    return scheduler


def build_with_an_object_in_the_schedule(rank, world):
    """Runs on every rank."""
    with pytest.raises(InputError, match="the state of LambdaLR.odd is a object"):
        build(1, make_scheduler=scheduler_with_an_object)


def test_schedules_without_a_storable_state_are_refused(pool):
    """The refusal comes before the first step (B15)."""
    pool.run(1, build_with_an_object_in_the_schedule)


COSINE = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 6}}}
LONGER = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}}
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
}
LOWER_LR = adamw(lr=0.005)
PASSED = {"make_scheduler": SCHEDULERS["lambda"]}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": (adamw(), adamw()),
    "lr": (adamw(), LOWER_LR),
    "lr under a schedule": (COSINE, LOWER_LR | COSINE),
    "lr that a schedule replaces": (WARMUP, LOWER_LR | WARMUP),
    "lr under a passed schedule": (PASSED, LOWER_LR | PASSED),
    "a longer schedule": (COSINE, LONGER),
    "another schedule": (COSINE, WARMUP),
    "no schedule": (COSINE, adamw()),
    "a new schedule": (adamw(), COSINE),
}
"""Settings of the run that saves and of the one that loads."""


def resume_with_changes(rank, world, folder):
    """Return the notes of each changed run, and check its learning rates. Runs on every rank."""
    notes_by_change = {}
    for change, (before, after) in CHANGES.items():
        checkpoints = Path(folder) / change.replace(" ", "-")
        saved = train(build(1, **before), 0, 1)
        saved.save_checkpoint(checkpoints)
        # A run that had the new settings from its first step.
        unchanged = train(build(1, **after), 0, 1)
        resumed = build(1, **after)
        notes: list[str] = []
        resumed.load_checkpoint(checkpoints, on_note=notes.append)

        expected = [unchanged.get_lr()[0], *learning_rates(unchanged, 2, 3)]
        actual = [resumed.get_lr()[0], *learning_rates(resumed, 2, 3)]
        if change == "lr under a passed schedule":
            # The factor of a function is multiplied into the new rate, which rounds once more.
            assert actual == pytest.approx(expected, rel=1e-14)
        else:
            assert actual == expected, change
        notes_by_change[change] = notes
    return notes_by_change


def resume_with_other_optimizer_settings(rank, world, folder):
    """Runs on every rank."""
    checkpoints = Path(folder)
    train(build(1, **adamw(weight_decay=0.1)), 0).save_checkpoint(checkpoints / "decay")
    resumed = build(1, **adamw(weight_decay=0.2, betas=[0.8, 0.99]))
    notes: list[str] = []
    resumed.load_checkpoint(checkpoints / "decay", on_note=notes.append)
    group = resumed.optimizer.param_groups[0]
    assert group["weight_decay"] == 0.2 and tuple(group["betas"]) == (0.8, 0.99)
    assert {note.partition(" is ")[0] for note in notes} == {"weight_decay", "betas"}

    # A rate that the program set is not in the configuration, and continues.
    saved = train(build(1), 0)
    saved.optimizer.param_groups[0]["lr"] = 0.123
    saved.save_checkpoint(checkpoints / "assigned")
    resumed = build(1)
    resumed.load_checkpoint(checkpoints / "assigned")
    assert resumed.get_lr() == [0.123]

    other = build(1, **adamw(amsgrad=True))
    with pytest.raises(CheckpointError, match="amsgrad = True: it needs `max_exp_avg_sq`"):
        other.load_checkpoint(checkpoints / "assigned")
    other = build(1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    classes = "the states of torch.optim.AdamW, but this run's optimizer is torch.optim.SGD"
    with pytest.raises(CheckpointError, match=classes):
        other.load_checkpoint(checkpoints / "assigned")


def test_changed_settings_of_the_configuration_win(pool, tmp_path):
    """A changed LR, schedule, weight decay or beta takes effect with a note (A10)."""
    pool.run(1, resume_with_other_optimizer_settings, str(tmp_path))
    notes = pool.run(1, resume_with_changes, str(tmp_path))[0]

    lr = "lr is 0.005 in the configuration, 0.01 when the checkpoint was written"
    assert notes["nothing"] == []
    assert notes["lr"] == [lr]
    assert len(notes["lr under a schedule"]) == 2
    assert "continues at" in notes["lr under a schedule"][1]
    replaced = f"{lr}, which changes nothing: the schedule sets it"
    assert notes["lr that a schedule replaces"] == [replaced]
    assert len(notes["lr under a passed schedule"]) == 2
    for change in ("a longer schedule", "another schedule", "no schedule", "a new schedule"):
        assert len(notes[change]) == 1, change
        assert "the learning rate continues at" in notes[change][0], change


def scheduled(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)


def save_to_be_forged(rank, world, folder):
    train(build(world, make_scheduler=scheduled), 0).save_checkpoint(folder, tag="a")


def load_forged(rank, world, folder, names):
    """Return the message per forged checkpoint, and whether the weights changed."""
    engine = build(world, make_scheduler=scheduled)
    before = full_weights(engine.model)
    messages = {}
    for name in names:
        try:
            engine.load_checkpoint(folder / name)
            messages[name] = "loaded"
        except CheckpointError as error:
            messages[name] = str(error)
    return messages, names_of_differences(before, full_weights(engine.model))


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "scheduler.state": lambda m: m["scheduler"].update(state=[1]),
    "scheduler.state.last_epoch": lambda m: m["scheduler"]["state"].update(last_epoch="x"),
    "scheduler.state.base_lrs": lambda m: m["scheduler"]["state"].update(base_lrs=[]),
    "scheduler.state.total_iters": lambda m: m["scheduler"]["state"].pop("total_iters"),
    "the optimizer's extra entries": lambda m: m["optimizer"].update(extra=[1]),
    "optimizer.groups[0].betas": lambda m: m["optimizer"]["groups"][0]["now"].update(betas=[0.9]),
    "optimizer.groups[0].betas[1]": (
        lambda m: m["optimizer"]["groups"][0]["now"].update(betas=[0.9, "x"])
    ),
    "optimizer.groups[0].eps": lambda m: m["optimizer"]["groups"][0]["now"].update(eps={}),
    "optimizer.groups[0].maximize": (
        lambda m: m["optimizer"]["groups"][0]["now"].update(maximize=None)
    ),
    "optimizer.groups[0].lr": (
        lambda m: m["optimizer"]["groups"][0]["now"].update(lr={"$": "float", "value": "nan"})
    ),
}


def test_forged_values_of_other_kinds_are_refused(pool, tmp_path):
    """Their hashes are right. Otherwise they would fail in a later step, or train with NaN."""
    pool.run(2, save_to_be_forged, tmp_path / "real")
    for name, forge in FORGED.items():
        shutil.copytree(tmp_path / "real", tmp_path / name)
        path = tmp_path / name / "a" / "manifest.json"
        manifest = json.loads(path.read_text())
        forge(manifest["metadata"])
        rehash(tmp_path / name, manifest)

    def without_steps(tensors):
        for key in [key for key in tensors if key.endswith(".step")]:
            del tensors[key]

    def without_elements(tensors):
        for key in [key for key in tensors if key.endswith(".exp_avg_sq")]:
            tensors[key]["shape"][0] = 0

    # States that AdamW needs in every step. A fused kernel does not check their sizes.
    forged_tensors = {"step": without_steps, "shape": without_elements}
    for name, change in forged_tensors.items():
        shutil.copytree(tmp_path / "real", tmp_path / name)
        manifest = json.loads((tmp_path / name / "a" / "manifest.json").read_text())
        path = tmp_path / name / "a" / "00000.json"
        leader = json.loads(path.read_text())
        change(leader["tensors"])
        path.write_text(json.dumps(leader))
        manifest["ranks"][0] = sha256_of(path.read_text())
        rehash(tmp_path / name, manifest)

    expected = {name: f"{tmp_path / name / 'a'}: {name}" for name in FORGED}
    expected |= {"step": "state step of ", "shape": "state exp_avg_sq of "}
    for messages, changed in pool.run(2, load_forged, tmp_path, [*FORGED, *forged_tensors]):
        for name, message in messages.items():
            assert expected[name] in message, (name, message)
        assert not changed


def rehash(folder, manifest):
    """Write a manifest, and its hash to the two files that contain it."""
    text = json.dumps(manifest)
    (folder / "a" / "manifest.json").write_text(text)
    (folder / "a" / "manifest.sha256").write_text(sha256_of(text))
    (folder / "LATEST").write_text(json.dumps({"tag": "a", "manifest_sha256": sha256_of(text)}))


def load_other_depths(rank, world, folder):
    """Return the messages for a deeper and for a shallower checkpoint. Runs on every rank."""
    for layers in (2, 4):
        train(build(1, layers=layers), 0).save_checkpoint(Path(folder) / f"{layers}")
    messages = []
    for layers, saved_layers in ((2, 4), (4, 2)):
        engine = build(1, layers=layers)
        before = full_weights(engine.model)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(Path(folder) / f"{saved_layers}")
        assert not names_of_differences(before, full_weights(engine.model))
        messages.append(str(error.value))
    return messages


def test_missing_and_extra_tensors_are_refused(pool, tmp_path):
    """Covers A13."""
    deeper, shallower = pool.run(1, load_other_depths, str(tmp_path))[0]
    assert "is of another model: it has 14 tensors that this model lacks: blocks.2." in deeper
    assert "is of another model: it lacks 14 tensors that this model has: blocks.2." in shallower


def random_draws(rank, world, folder, first, second):
    """Return whether the random state was restored, what is drawn next, and the notes.

    Runs on every rank.
    """

    def python_and_numpy():
        return random.getstate(), np.random.random(2).tolist()

    engine = build(world, stage=2, kind="llama", parallel=first)
    torch.rand(5 + engine.dp_rank)
    engine.save_checkpoint(folder)
    torch_state = torch.get_rng_state()
    other_states = python_and_numpy()
    # Draws that a load has to undo.
    torch.rand(3)
    random.random()
    random.gauss(0, 1)

    notes: list[str] = []
    engine = build(world, stage=2, kind="llama", parallel=second)
    engine.load_checkpoint(folder, on_note=notes.append)
    restored = torch.equal(torch_state, torch.get_rng_state())
    assert (python_and_numpy() == other_states) == restored
    draws = [*torch.rand(4).tolist(), random.random()]
    return restored, draws, [note for note in notes if "generators" in note]


def test_generators_follow_the_layout(pool, tmp_path):
    """Generators are restored on the same layout (A6).

    On another layout, ranks of tp draw the same numbers, and ranks of dp different ones.
    """
    data = {"dp_shard": 2, "tp": 1}
    tensor = {"dp_shard": 1, "tp": 2}
    for index, (first, second) in enumerate([(data, data), (data, tensor), (tensor, data)]):
        results = pool.run(2, random_draws, str(tmp_path / str(index)), first, second)
        restored, draws, notes = zip(*results, strict=True)
        assert (draws[0] == draws[1]) == (second == tensor)
        assert restored == (first == second,) * 2
        assert [len(of_rank) for of_rank in notes] == [int(first != second)] * 2
