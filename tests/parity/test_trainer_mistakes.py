"""Mistakes of users of the Trainer are reported with their remedy."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from plait.cluster.layout import Layout
from plait.config.resolving.resolve import load, resolve
from plait.errors import CheckpointError, InputError
from plait.hf.fields import examined
from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import zero


def train_without_targets(rank, world, config, folder, first, accumulation):
    """Train on samples of which the first have no target. Runs on every rank."""
    with trainers.launched(rank, world):
        data = trainers.samples(12)
        for sample in data[:first]:
            sample["labels"][:] = -100
        trainer = trainers.trainer_of(
            folder,
            config,
            {"train_dataset": data},
            train_sampling_strategy="sequential",
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        return trainers.history(trainer)


@pytest.mark.parametrize("first", proof_after(1, [12, 2, 8]))
def test_samples_without_targets(pool, tmp_path, first):
    """All samples, the first micro-batch or the first step have none.

    A pipeline has the numbers of data parallelism.
    """
    folder = str(tmp_path)
    expected = pool.run(2, train_without_targets, zero(1), folder, first, 2)[0]
    pipeline = {"parallel": {"pp": 2}}
    actual = pool.run(2, train_without_targets, pipeline, folder, first, 4)[0]
    assert len(actual["loss"]) == 2 and (first < 12) == (expected["grad_norm"][-1] > 0)
    for key in ("loss", "grad_norm"):
        assert actual[key] == pytest.approx(expected[key], rel=1e-5)


def replace_file(rank, path, content):
    """Write a file on rank 0 while the others wait. None removes it."""
    dist.barrier()
    if rank == 0 and content is None:
        path.unlink()
    elif rank == 0:
        path.write_bytes(content)
    dist.barrier()


def make_mistakes(rank, world, folder):
    """Runs on every rank."""
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(folder, zero(3), **saving)
        # The copy is allowed before the model is sharded.
        copy.deepcopy(trainer.model)
        trainer.train()
        message = r"deepcopy of Llama\w+: .* sharded .*; copy the model before plait.initialize"
        for module in (trainer.model, trainer.model.model.layers[0]):
            with pytest.raises(InputError, match=message):
                copy.deepcopy(module)

        empty = trainers.trainer_of(folder, zero(3), {"train_dataset": []}, **saving)
        message = "train_dataset has 0 samples.*at least 1; check the split"
        with pytest.raises(InputError, match=message):
            empty.train()

        schedule = Path(folder) / "checkpoint-1" / "scheduler.pt"
        content = schedule.read_bytes()
        message = "checkpoint-1.*scheduler.pt.*; pass another checkpoint-N"
        for damaged in (content[: len(content) // 2], None):
            replace_file(rank, schedule, damaged)
            with pytest.raises(CheckpointError, match=message):
                trainer.train(resume_from_checkpoint=str(schedule.parent))
        replace_file(rank, schedule, content)

        state = Path(folder) / "checkpoint-1" / "trainer_state.json"
        message = "checkpoint-1.*trainer_state.json.*; pass another checkpoint-N"
        for content in (state.read_bytes()[:50], b"[]", b'{"no_such_field": 1}', None):
            replace_file(rank, state, content)
            with pytest.raises(CheckpointError, match=message):
                trainer.train(resume_from_checkpoint=str(state.parent))


def test_mistakes(pool, tmp_path):
    pool.run(2, make_mistakes, str(tmp_path))


def remedy_of(folder, optim):
    """Return the remedy for a value of `TrainingArguments.optim`."""
    from plait.hf import TrainingArguments

    arguments = trainers.arguments(TrainingArguments, str(folder), optim=optim)
    (problem,) = examined(arguments, Layout())[0]
    return problem.remedy


def train_as_advised(rank, world, config, folder):
    """Return the losses of two steps. Runs on every rank."""
    with trainers.launched(rank, world):
        arguments = {"model": trainers.model(hidden_size=256)}
        settings = {"optim": "adamw_torch", "max_steps": 2}
        trainer = trainers.trainer_of(folder, config, arguments, **settings)
        trainer.train()
        trainer.engine.close()
        return trainers.history(trainer)["loss"]


@pytest.mark.parametrize(
    "optim", proof_after(2, ["adafactor", "paged_adamw_32bit", "adamw_bnb_8bit"])
)
def test_a_refused_optimizer_names_one_that_trains(pool, tmp_path, optim):
    remedy = remedy_of(tmp_path, optim)
    assert 'use "adamw_torch"' in remedy
    section = re.search(r'write ("\w+": \{.*\}) in the file', remedy)
    assert section is not None, remedy
    config = {"zero_optimization": {"stage": 1}, **json.loads(f"{{{section[1]}}}")}
    if "offload_optimizer" in config["zero_optimization"]:
        # The processes of this test have no device besides the host, and nothing to offload to it.
        resolved = resolve(load({"train_batch_size": 2, **config}), world_size=2)
        assert resolved.optimizer_offload.device == "cpu"
        return
    for losses in pool.run(2, train_as_advised, config, str(tmp_path)):
        assert len(losses) == 2 and all(loss > 0 for loss in losses)


def test_other_refused_optimizers(tmp_path):
    lion = '"type": "Lion"'
    adamw = 'use "adamw_torch"'
    for optim, advised in (
        ("lion_8bit", lion),
        ("paged_lion_32bit", lion),
        ("galore_adamw", adamw),
        ("stable_adamw", adamw),
    ):
        remedy = remedy_of(tmp_path, optim)
        assert advised in remedy, optim
        assert "optimizers=" not in remedy, optim
