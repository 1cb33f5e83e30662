"""A loop with Accelerate on Plait's layouts equals the same loop in one process."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader

from plait.errors import CheckpointError
from tests.covers import proof_after
from tests.parity import adapted, trainers
from tests.parity.trainers import zero

MICRO_BATCH = 2
ACCUMULATION = 2
CLIPPING = 0.5
EPOCHS = 2
DTYPE = torch.float64

TP: dict[str, Any] = {"parallel": {"tp": 2}}
SEQUENCE: dict[str, Any] = {"parallel": {"tp": 2, "sequence_parallel": True}}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any] | None, bool]] = {
    "zero3": (2, 2, zero(3), False),
    "tp2": (2, 1, TP, False),
    "replicas": (2, 2, None, False),
    "zero1": (2, 2, zero(1), False),
    "zero2": (2, 2, zero(2), False),
    "sp2": (2, 1, SEQUENCE, False),
    "tp2-zero3": (4, 2, {**TP, **zero(3)}, False),
    "zero3-lora": (2, 2, zero(3), True),
    "tp2-lora": (2, 1, TP, True),
}
"""Number of ranks, of data-parallel ranks, configuration, and whether the model has adapters."""


def model_of(lora):
    return adapted.model(DTYPE) if lora else trainers.model(DTYPE)


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=9)


def answers_of(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"]).logits[:, -1].argmax(-1)


def one_process(dp, *, lora=False):
    """Train in plain PyTorch.

    A round has one batch for each of `dp` ranks, and a step has `ACCUMULATION` rounds. The last
    round and the last step of an epoch have fewer.
    """
    model = model_of(lora)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    batches = list(DataLoader(trainers.samples(), batch_size=MICRO_BATCH))
    rounds = [batches[start : start + dp] for start in range(0, len(batches), dp)]
    result: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for _ in range(EPOCHS):
        model.train()
        for start in range(0, len(rounds), ACCUMULATION):
            for round_batches in rounds[start : start + ACCUMULATION]:
                losses = [model(**batch).loss for batch in round_batches]
                result["losses"].append([loss.item() for loss in losses])
                (sum(losses) / (len(losses) * ACCUMULATION)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            result["norms"].append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
            # Accelerate steps a schedule once per rank.
            for _ in range(dp):
                schedule.step()
            result["rates"].append(schedule.get_last_lr()[0])

    model.eval()
    result["answers"] = torch.cat([answers_of(model, batch) for batch in batches]).tolist()
    result["weights"] = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return result


def on_plait(rank, world, config, lora):
    """Train with `plait.hf.Accelerator`. Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Accelerator

        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATION, plait_config=config
        )
        model = model_of(lora)
        optimizer = optimizer_of(model)
        train, model, optimizer, schedule, evaluation = accelerator.prepare(
            DataLoader(trainers.samples(), batch_size=MICRO_BATCH),
            model,
            optimizer,
            schedule_of(optimizer),
            DataLoader(trainers.samples(), batch_size=MICRO_BATCH),
        )
        result: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
        result["index"] = accelerator.process_index
        for _ in range(EPOCHS):
            model.train()
            for batch in train:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
                        result["norms"].append(float(norm))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        result["rates"].append(schedule.get_last_lr()[0])
                result["losses"].append(accelerator.gather_for_metrics(loss).tolist())

        model.eval()
        answers = []
        result["objects"] = []
        for batch in evaluation:
            metrics = accelerator.gather_for_metrics({"answers": answers_of(model, batch)})
            answers.append(metrics["answers"])
            index = [accelerator.process_index]
            objects = accelerator.gather_for_metrics(index, use_gather_object=True)
            result["objects"].append(objects)
        result["answers"] = torch.cat(answers).tolist()
        result["weights"] = accelerator.get_state_dict(accelerator.unwrap_model(model))
        accelerator.free_memory()
        return result


@pytest.mark.parametrize("name", proof_after(3, LAYOUTS))
def test_layout_equals_one_process(pool, name):
    world, dp, config, lora = LAYOUTS[name]
    expected = one_process(dp, lora=lora)
    ranks = pool.run(world, on_plait, config, lora)
    for actual in ranks:
        for key in ("norms", "rates"):
            assert actual[key] == pytest.approx(expected[key], rel=1e-9), key
        for losses, expected_losses in zip(actual["losses"], expected["losses"], strict=True):
            assert losses == pytest.approx(expected_losses, rel=1e-9)
        # There are 21 samples, so the last round has too few for all ranks.
        assert len(actual["answers"]) == trainers.SAMPLES
        assert actual["answers"] == expected["answers"]
        assert actual["objects"][-1] == [0] and actual["index"] < dp
    torch.testing.assert_close(ranks[0]["weights"], expected["weights"], rtol=1e-9, atol=1e-11)
    assert all(not actual["weights"] for actual in ranks[1:])


class StepCounter:
    """An object of the user that `register_for_checkpointing` saves."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def resumed(rank, world, config, folder, save, seedable):
    """Train two epochs in a random order, and return the losses after the checkpoint.

    With `save` the checkpoint is written in the second epoch. Otherwise the run begins with it.
    Runs on every rank.
    """
    with trainers.launched(rank, world):
        from accelerate.utils import DataLoaderConfiguration

        from plait.hf import Accelerator

        # A resumed process has another seed, and must still continue the saved order.
        torch.manual_seed(5 if save else 99)
        accelerator = Accelerator(
            cpu=True,
            plait_config=config,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=seedable, data_seed=4 if seedable else None
            ),
            step_scheduler_with_optimizer=False,
        )
        model = trainers.model(DTYPE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(trainers.samples(16), batch_size=2, shuffle=True)
        loader, model, optimizer, schedule = accelerator.prepare(
            loader, model, optimizer, schedule_of(optimizer)
        )
        counter = StepCounter()
        accelerator.register_for_checkpointing(counter)
        losses: list[float] = []

        def epoch(batches, *, save_after=None):
            for index, batch in enumerate(batches):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                counter.steps += 1
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                if index == save_after:
                    accelerator.save_state(folder)
                    losses.clear()

        if save:
            epoch(loader)
            epoch(loader, save_after=1)
        else:
            accelerator.load_state(folder)
            epoch(accelerator.skip_first_batches(loader, 2))
        epoch(loader)
        accelerator.free_memory()
        return losses, counter.steps


RESUMED = {
    "zero3-to-zero1": ((2, zero(3)), (2, zero(1)), False),
    "zero2-to-tp2-zero3-seedable": ((2, zero(2)), (4, {**TP, **zero(3)}), True),
}


@pytest.mark.parametrize("name", proof_after(1, RESUMED))
def test_resume_in_mid_epoch_on_another_layout(pool, tmp_path, name):
    (world, config), (next_world, next_config), seedable = RESUMED[name]
    expected, _ = pool.run(world, resumed, config, str(tmp_path), True, seedable)[0]
    assert len(expected) == 2 + 4
    for losses, steps in pool.run(next_world, resumed, next_config, str(tmp_path), False, seedable):
        assert steps == 12
        assert losses == pytest.approx(expected, rel=1e-9)


class Creates:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Pickled(StepCounter):
    """An object of the user whose state is not plain data."""

    def state_dict(self):
        return {"steps": self}


def interrupted_saves(rank, world, folder):
    """Save twice to one folder, of which the second save is interrupted. Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Accelerator

        def prepared(*registered):
            accelerator = Accelerator(cpu=True)
            model = trainers.model(DTYPE)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            model, optimizer, schedule = accelerator.prepare(
                model, optimizer, schedule_of(optimizer)
            )
            for entry in registered:
                accelerator.register_for_checkpointing(entry)

            def step():
                batch = trainers.samples(1)[0]
                accelerator.backward(
                    model(input_ids=batch["input_ids"][None]).logits.square().mean()
                )
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

            return accelerator, schedule, step

        def ends(*registered):
            accelerator, schedule, _ = prepared(*registered)
            accelerator.load_state(folder)
            steps = accelerator.engine.global_steps
            accelerator.free_memory()
            return steps, schedule.scheduler.last_epoch

        # Schedules belong to the engine's checkpoint.
        accelerator, _, step = prepared()
        for _ in range(2):
            step()
            with patch("torch.save", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
                accelerator.save_state(folder)
        accelerator.free_memory()
        steps, position = ends()
        assert steps == position == 2

        accelerator, _, step = prepared(StepCounter())
        step()
        accelerator.save_state(folder)
        # A save that is interrupted before the engine's checkpoint leaves the one before it.
        counter = StepCounter()
        counter.steps = 7
        for interrupted in ("save_checkpoint", None):
            accelerator._custom_objects = [counter]
            patched = nullcontext()
            if interrupted:
                patched = patch.object(accelerator.engine, interrupted, side_effect=OSError)
            with patched, suppress(OSError):
                accelerator.save_state(folder)
            loaded = StepCounter()
            accelerator._custom_objects = [loaded]
            accelerator.load_state(folder)
            assert loaded.steps == (0 if interrupted else 7)
        assert len(list(Path(folder).glob("custom_checkpoint_*"))) == 1

        # The checkpoint that is replaced counts until the new one is there.
        (Path(folder) / "plait").rename(Path(folder) / ".plait.replaced")
        accelerator.load_state(folder)
        (Path(folder) / ".plait.replaced").rename(Path(folder) / "plait")

        # A state that cannot be loaded is refused, and the file of the earlier save stays.
        accelerator._custom_objects = [Pickled()]
        with pytest.raises(CheckpointError, match=r"Pickled contains .*Pickled, whose code would"):
            accelerator.save_state(folder)
        accelerator.free_memory()
        assert ends(StepCounter()) == (1, 1)
        with pytest.raises(CheckpointError, match="1 objects, but 0 were given to .*register_for"):
            ends()

        canary = Path(folder) / "created"
        (saved,) = Path(folder).glob("custom_checkpoint_0-*.pkl")
        torch.save(Creates(str(canary)), saved)
        with pytest.raises(CheckpointError, match=r"custom_checkpoint_0-.* is missing or damaged"):
            ends(StepCounter())
        assert not canary.exists()


def test_interrupted_saves_and_changed_files(pool, tmp_path):
    pool.run(1, interrupted_saves, str(tmp_path))
