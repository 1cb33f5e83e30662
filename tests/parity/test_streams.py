"""Iterable data sets without a length, in the Trainer and in DeepSpeed's calls.

Each sample is read once, numbers are those of one process, and a run resumes at its position, also
on another layout and after the end of the data.
"""

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
from tests.parity.refusals import message_of
from tests.parity.trainers import zero

STEPS = 7
SAVED = (3, 5)
"""Three steps are an epoch of 21 samples. The first checkpoint is at its end, the second inside."""
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2": (2, 2, zero(1)),
    "tp2": (2, 1, {"parallel": {"tp": 2}}),
    "pp2": (2, 1, {"parallel": {"pp": 2}}),
    "tp2-dp2": (4, 2, {"parallel": {"tp": 2}}),
    "pp2-zero3": (4, 2, {"parallel": {"pp": 2}, **zero(3)}),
}
"""(ranks, data-parallel ranks, configuration)."""


def stream(kind):
    """Return the samples as a stream of the datasets library, which has shards and no length."""
    from datasets import Dataset

    rows = []
    for sample in trainers.samples():
        rows.append({name: tensor.tolist() for name, tensor in sample.items()})
    data = Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    return data.shuffle(seed=3, buffer_size=6) if kind == "shuffled" else data


class SizedStream(torch.utils.data.IterableDataset[Any]):
    """A stream with a length, by which Transformers ends a step with the epoch."""

    def __init__(self, kind):
        self.data = stream(kind)

    def __len__(self):
        return trainers.SAMPLES

    def __iter__(self):
        yield from self.data

    def set_epoch(self, epoch):
        self.data.set_epoch(epoch)


def run(trainer_class, arguments_class, folder, data, *, resume=None, **settings):
    """Return the history and the metrics of a run."""
    trainer = trainer_class(
        model=trainers.model(),
        args=trainers.arguments(arguments_class, folder, max_steps=STEPS, **settings),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=trainers.metrics,
    )
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    return trainers.history(trainer), metrics


@cache
def native(kind):
    """Run Transformers' Trainer in one process."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        data = SizedStream(kind)
        return run(Trainer, TrainingArguments, folder, data, gradient_accumulation_steps=4)


def on_plait(rank, world, layout, folder, kind, settings):
    """Runs on every rank."""
    _, dp, config = LAYOUTS[layout]
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        settings = {"deepspeed": config, "gradient_accumulation_steps": 4 // dp, **settings}
        return run(Trainer, TrainingArguments, folder, stream(kind), **settings)


def assert_same(actual, expected):
    history, metrics = actual
    for key in ("loss", "grad_norm", "learning_rate"):
        assert history[key] == pytest.approx(expected[0][key], rel=1e-5), key
    assert len(history["loss"]) == STEPS
    for key in ("eval_loss", "eval_samples", "eval_right", "eval_order"):
        assert metrics[key] == pytest.approx(expected[1][key], rel=1e-5), key
    assert metrics["eval_samples"] == trainers.SAMPLES


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp2", "shuffled"),
        *(
            pytest.param(layout, kind, marks=pytest.mark.proof)
            for layout in ("tp2", "pp2", "tp2-dp2", "pp2-zero3")
            for kind in ("plain", "shuffled")
        ),
    ],
)
def test_the_trainer_has_the_numbers_of_one_process(pool, tmp_path, layout, kind):
    """Each pass over the 21 samples ends in a step that is not full."""
    for actual in pool.run(LAYOUTS[layout][0], on_plait, layout, str(tmp_path), kind, {}):
        assert_same(actual, native(kind))


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [
        ("dp2", "tp2", SAVED[1]),
        *(
            pytest.param(first, second, at, marks=pytest.mark.proof)
            for first, second in (("dp2", "pp2"), ("tp2", "dp2"), ("dp2", "dp2"))
            for at in SAVED
        ),
        pytest.param("tp2-dp2", "pp2", SAVED[1], marks=pytest.mark.proof),
    ],
)
def test_a_trainer_resumes_inside_the_stream(pool, tmp_path, first, second, at):
    """Transformers treats such a run as one endless epoch, and would read the data again."""
    saving = {"save_strategy": "steps", "save_steps": at}
    pool.run(LAYOUTS[first][0], on_plait, first, str(tmp_path), "shuffled", saving)
    folder = str(tmp_path / "second")
    resume = {"resume": f"{tmp_path}/checkpoint-{at}"}
    for actual in pool.run(LAYOUTS[second][0], on_plait, second, folder, "shuffled", resume):
        assert_same(actual, native("shuffled"))


def train_on_refused_streams(rank, world, folder):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        def train(data, **settings):
            args = trainers.arguments(TrainingArguments, folder, **settings)
            Trainer(model=trainers.model(), args=args, train_dataset=data).train()

        order = message_of(train, stream("plain").shuffle(seed=rank), max_steps=2, error=InputError)
        assert "its first rows differ between ranks" in order and "a seed" in order
        with pytest.raises(ValueError, match="max_steps has to be specified"):
            train(stream("plain"))


def test_unequal_orders_and_endless_runs_are_refused(pool, tmp_path):
    pool.run(2, train_on_refused_streams, str(tmp_path))


class NumberedSequences(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Sequences whose first token is their number."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            ids = torch.arange(8) * (number + 3) % trainers.VOCABULARY
            ids[0] = number
            yield {"input_ids": ids, "labels": ids.clone()}


def initialize(world, **parallel):
    """Return the engine and the loader of 18 sequences. A micro-batch of all ranks has 4."""
    dp = world // parallel.get("tp", 1)
    config = {
        "train_micro_batch_size_per_gpu": 4 // dp,
        "gradient_accumulation_steps": 1,
        "optimizer": cases.OPTIMIZER,
        "parallel": parallel,
    }
    model = trainers.model(torch.float64)
    data = NumberedSequences(18)
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=data, config=config)
    return engine, loader


def train_on(engine, *passes):
    """Train on all batches. Return the numbers of their sequences, and the losses."""
    numbers = []
    losses = []
    for batches in passes:
        for batch in batches:
            numbers.append(batch["input_ids"][:, 0].tolist())
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return numbers, losses


def run_script(rank, world, folder):
    """Train two passes uninterrupted, and with a checkpoint in the first. Runs on every rank.

    Returns the numbers and losses of the uninterrupted run, of the run until the checkpoint, and
    of the runs that resume on the same layout and with tp = 2.
    """
    engine, loader = initialize(world)
    uninterrupted = train_on(engine, loader, loader)
    engine.destroy()

    engine, loader = initialize(world)
    saved = train_on(engine, islice(loader, 3))
    engine.save_checkpoint(folder, client_state={"data": loader.state_dict()})
    engine.destroy()

    resumed = []
    for parallel in ({}, {"tp": 2}):
        engine, loader = initialize(world, **parallel)
        loader.load_state_dict(engine.load_checkpoint(folder)[1]["data"])
        resumed.append(train_on(engine, loader, loader))
        engine.destroy()
    return uninterrupted, saved, *resumed


def test_deepspeeds_calls(pool, tmp_path):
    first, second = pool.run(2, run_script, str(tmp_path))
    for uninterrupted, saved, resumed, _ in (first, second):
        assert saved[0] + resumed[0] == uninterrupted[0]
        assert saved[1] + resumed[1] == pytest.approx(uninterrupted[1], rel=1e-7)

    for numbers, others in zip(first[0][0], second[0][0], strict=True):
        assert len(numbers) == len(others) == 2
    of_both = [a + b for a, b in zip(first[0][0], second[0][0], strict=True)]
    full_batches = [[n, n + 1, n + 2, n + 3] for n in range(0, 16, 4)]
    # The last two sequences are read by both ranks.
    assert of_both == [*full_batches, [16, 17, 16, 17]] * 2

    # With tp = 2 both ranks read a micro-batch of 4, and the last one has the two that are left.
    numbers, losses = first[3]
    assert numbers == second[3][0] == [full_batches[3], [16, 17], *full_batches, [16, 17]]
    means = [(a + b) / 2 for a, b in zip(first[2][1], second[2][1], strict=True)]
    assert losses == pytest.approx(means, rel=1e-6)


def call_what_deepspeed_refuses(rank, world):
    """Runs on every rank."""
    engine, loader = initialize(world)
    numbers = NumberedSequences(4)
    unequal = stream("plain").shuffle(seed=rank)
    with pytest.raises(CheckpointError, match="after 6 samples, which is not a multiple of the 4"):
        loader.load_state_dict({"epoch": 0, "read": 6})
    with pytest.raises(InputError, match="with 2 workers: it is read in its own order, by one"):
        engine.deepspeed_io(numbers, num_local_io_workers=2)
    with pytest.raises(InputError, match="has no length: ranks could not share it"):
        engine.deepspeed_io(iter([1]))
    with pytest.raises(InputError, match="its first rows differ between ranks"):
        engine.deepspeed_io(unequal)
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader)
    engine.destroy()


def test_refused_calls_of_deepspeed(pool):
    pool.run(2, call_what_deepspeed_refuses)
