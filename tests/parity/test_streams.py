"""Iterable data sets without a length in the Trainer and in DeepSpeed's calls: each sample once, the numbers of one process, and a run that
goes on where it stood, on other layouts and over the end of the data."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

import plait.compat.deepspeed as deepspeed
from plait.errors import CheckpointError, InputError
from tests.parity import cases, trainers
from tests.parity.trainers import zero

STEPS, SAVED = 7, (3, 5)
"""Three steps are an epoch of 21 samples; the first checkpoint is at its end, the second inside of the next one."""
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2": (2, 2, zero(1)),
    "tp2": (2, 1, {"parallel": {"tp": 2}}),
    "pp2": (2, 1, {"parallel": {"pp": 2}}),
    "tp2-dp2": (4, 2, {"parallel": {"tp": 2}}),
    "pp2-zero3": (4, 2, {"parallel": {"pp": 2}, **zero(3)}),
}


def stream(kind):
    """Of the library, in shards, whose length nobody is told."""
    from datasets import Dataset

    rows = [{name: tensor.tolist() for name, tensor in one.items()} for one in trainers.samples()]
    found = Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    return found.shuffle(seed=3, buffer_size=6) if kind == "shuffled" else found


def trainer_of(trainer, arguments, folder, data, *, accumulation, **settings):
    fixed = {"max_steps": STEPS, "gradient_accumulation_steps": accumulation}
    args = trainers.arguments(arguments, folder, **fixed, **settings)
    return trainer(
        model=trainers.model(),
        args=args,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=trainers.metrics,
    )


class Sized(torch.utils.data.IterableDataset[Any]):
    """The same stream with a length, by which Transformers ends a step with an epoch."""

    def __init__(self, kind):
        self.data = stream(kind)

    def __len__(self):
        return trainers.SAMPLES

    def __iter__(self):
        yield from self.data

    def set_epoch(self, epoch):
        """The order is the epoch's."""
        self.data.set_epoch(epoch)


@cache
def alone(kind):
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        made = trainer_of(Trainer, TrainingArguments, folder, Sized(kind), accumulation=4)
        made.train()
        return trainers.history(made), made.evaluate()


def on_plait(rank, world, config, folder, kind, accumulation, resume=None, saved=0):
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        made = trainer_of(
            Trainer,
            TrainingArguments,
            folder,
            stream(kind),
            accumulation=accumulation,
            deepspeed=config,
            **({"save_strategy": "steps", "save_steps": saved} if saved else {}),
        )
        made.train(resume_from_checkpoint=resume)
        evaluated = made.evaluate()
        return trainers.history(made), evaluated


def assert_same(found, wanted):
    for key in ("loss", "grad_norm", "learning_rate"):
        assert found[0][key] == pytest.approx(wanted[0][key], rel=1e-5), key
    assert len(found[0]["loss"]) == STEPS
    for key in ("eval_loss", "eval_samples", "eval_right", "eval_order"):
        assert found[1][key] == pytest.approx(wanted[1][key], rel=1e-5), key
    assert found[1]["eval_samples"] == trainers.SAMPLES


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dp2", "shuffled"),
        *(
            pytest.param(name, kind, marks=pytest.mark.proof)
            for name in LAYOUTS
            for kind in ("plain", "shuffled")
            if name != "dp2"
        ),
    ],
)
def test_the_trainer_has_the_numbers_of_one_process(pool, tmp_path, name, kind):
    """Passes over a stream of 21 samples, each ending in a step that is not full."""
    world, dp, config = LAYOUTS[name]
    for found in pool.run(world, on_plait, config, str(tmp_path), kind, 4 // dp):
        assert_same(found, alone(kind))


@pytest.mark.parametrize(
    ("before", "then", "at"),
    [
        ("dp2", "tp2", SAVED[1]),
        *(
            pytest.param(before, then, at, marks=pytest.mark.proof)
            for before, then in (("dp2", "pp2"), ("tp2", "dp2"), ("dp2", "dp2"))
            for at in SAVED
        ),
        pytest.param("tp2-dp2", "pp2", SAVED[1], marks=pytest.mark.proof),
    ],
)
def test_a_trainer_goes_on(pool, tmp_path, before, then, at):
    """Transformers takes such a run for one endless epoch, and begins the data anew."""
    world, dp, config = LAYOUTS[before]
    pool.run(world, on_plait, config, str(tmp_path), "shuffled", 4 // dp, None, at)
    world, dp, config = LAYOUTS[then]
    for found in pool.run(
        world,
        on_plait,
        config,
        str(tmp_path / "other"),
        "shuffled",
        4 // dp,
        f"{tmp_path}/checkpoint-{at}",
    ):
        assert_same(found, alone("shuffled"))


def refused(rank, world, folder):
    """Runs in a worker."""
    said = []
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        for settings, data in (
            ({"max_steps": 2}, stream("plain").shuffle(seed=rank)),
            ({}, stream("plain")),
        ):
            try:
                args = trainers.arguments(TrainingArguments, folder, **settings)
                Trainer(model=trainers.model(), args=args, train_dataset=data).train()
            except (InputError, ValueError) as error:
                said.append(str(error))
    return said


def test_what_the_trainer_refuses(pool, tmp_path):
    """An order that differs between ranks, and no number of steps."""
    for orders, steps in pool.run(2, refused, str(tmp_path)):
        assert "its first rows differ between ranks" in orders and "a seed" in orders
        assert "max_steps has to be specified" in steps


class Numbers(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Sequences that differ, of which one says its number."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            ids = torch.arange(8) * (number + 3) % trainers.VOCABULARY
            ids[0] = number
            yield {"input_ids": ids, "labels": ids.clone()}


def engine_of(count, world, **parallel):
    dp = world // parallel.get("tp", 1)
    config = {
        "train_micro_batch_size_per_gpu": 2 if dp > 1 else 4,
        "gradient_accumulation_steps": 1,
        "optimizer": cases.OPTIMIZER,
        "parallel": parallel,
    }
    return deepspeed.initialize(
        model=trainers.model(torch.float64), training_data=Numbers(count), config=config
    )


def read(engine, batches):
    seen, losses = [], []
    for batch in batches:
        seen.append(batch["input_ids"][:, 0].tolist())
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return seen, losses


Read = tuple[list[list[int]], list[float]]


def script(rank, world, folder):
    """Two passes; the same with a checkpoint inside of the first; what goes on; and tp 2 that goes on. Runs in a worker."""
    engine, _, loader, _ = engine_of(18, world)
    passes = [read(engine, loader) for _ in range(2)]
    engine.destroy()
    engine, _, loader, _ = engine_of(18, world)
    part = read(engine, islice(loader, 3))
    engine.save_checkpoint(folder, client_state={"data": loader.state_dict()})
    engine.destroy()
    found = []
    for parallel in ({}, {"tp": 2}):
        engine, _, loader, _ = engine_of(18, world, **parallel)
        loader.load_state_dict(engine.load_checkpoint(folder)[1]["data"])
        rest = [read(engine, loader) for _ in range(2)]
        found.append((rest[0][0] + rest[1][0], rest[0][1] + rest[1][1]))
        engine.destroy()
    return (passes[0][0] + passes[1][0], passes[0][1] + passes[1][1]), part, found[0], found[1]


def test_deepspeeds_calls(pool, tmp_path):
    first, second = pool.run(2, script, str(tmp_path))
    for whole, part, rest, _ in (first, second):
        assert part[0] + rest[0] == whole[0]
        assert part[1] + rest[1] == pytest.approx(whole[1], rel=1e-7)
    for one, other in zip(first[0][0], second[0][0], strict=True):
        assert len(one) == len(other) == 2
    both = [one + other for one, other in zip(first[0][0], second[0][0], strict=True)]
    assert both[:5] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 16, 17],
    ]
    assert both[5:] == both[:5]
    # tp 2 reads a micro-batch of 4 on both ranks; its last one has the two samples that are left
    assert first[3][0] == second[3][0] == [*both[3:4], [16, 17], *both[:4], [16, 17]]
    mean = [(one + other) / 2 for one, other in zip(first[2][1], second[2][1], strict=True)]
    assert first[3][1] == pytest.approx(mean, rel=1e-6)


def refused_scripts(rank, world):
    said = []
    engine, _, loader, _ = engine_of(18, world)
    for call in (
        lambda: loader.load_state_dict({"epoch": 0, "read": 6}),
        lambda: engine.deepspeed_io(Numbers(4), num_local_io_workers=2),
        lambda: engine.deepspeed_io(iter([1])),
        lambda: engine.deepspeed_io(stream("plain").shuffle(seed=rank)),
        lambda: len(loader),
    ):
        try:
            call()
            said.append("")
        except (InputError, CheckpointError, TypeError) as error:
            said.append(str(error))
    engine.destroy()
    return said


def test_what_deepspeeds_calls_refuse(pool):
    for said in pool.run(2, refused_scripts):
        assert (
            "the saved position is after 6 samples, which is not a multiple of the 4 samples"
            in said[0]
        )
        assert (
            "with 2 workers: it is read in its own order, by one reader in every process" in said[1]
        )
        assert "has no length: ranks could not share it" in said[2]
        assert "its first rows differ between ranks" in said[3]
        assert "has no len()" in said[4]
