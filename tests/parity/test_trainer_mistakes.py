"""What a user of the Trainer does wrong is told with its remedy; labels that do not count are no mistake of the layout."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch

from plait.cluster.layout import Layout
from plait.config.resolving.resolve import load, resolve
from plait.errors import CheckpointError, InputError
from plait.hf.fields import examined
from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import zero


def without_targets(rank, world, config, folder, first, steps):
    """A run whose first `first` samples have no target. Runs in a worker."""
    with trainers.launched(rank, world):
        data = trainers.samples(12)
        for sample in data[:first]:
            sample["labels"][:] = -100
        trainer = trainers.trainer_of(
            folder,
            config,
            {"train_dataset": data},
            train_sampling_strategy="sequential",
            gradient_accumulation_steps=steps,
        )
        trainer.train()
        return trainers.history(trainer)


@pytest.mark.parametrize("first", proof_after(1, [12, 2, 8]))
def test_labels_that_do_not_count(pool, tmp_path, first):
    """Everything, the first micro-batch, the first step: a pipeline is data parallelism."""
    wanted = pool.run(2, without_targets, zero(1), str(tmp_path), first, 2)[0]
    found = pool.run(2, without_targets, {"parallel": {"pp": 2}}, str(tmp_path), first, 4)[0]
    assert len(found["loss"]) == 2 and (first < 12) == (wanted["grad_norm"][-1] > 0)
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5)


def mistakes(rank, world, folder):
    """Runs in a worker."""
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(folder, zero(3), **saving)
        copy.deepcopy(trainer.model)
        trainer.train()
        for part in (trainer.model, trainer.model.model.layers[0]):
            with pytest.raises(
                InputError,
                match=r"deepcopy of Llama\w+: .* sharded .*; copy the model before plait.initialize",
            ):
                copy.deepcopy(part)
        with pytest.raises(
            InputError, match="train_dataset has 0 samples.*at least 1; check the split"
        ):
            trainers.trainer_of(folder, zero(3), {"train_dataset": []}, **saving).train()
        state = Path(folder) / "checkpoint-1" / "trainer_state.json"
        for broken in (state.read_text(encoding="utf-8")[:50], "[]", '{"no_such_field": 1}', None):
            torch.distributed.barrier()
            if rank == 0 and broken is None:
                state.unlink()
            elif rank == 0:
                state.write_text(str(broken), encoding="utf-8")
            torch.distributed.barrier()
            with pytest.raises(
                CheckpointError,
                match="checkpoint-1.*trainer_state.json.*; pass another checkpoint-N",
            ):
                trainer.train(resume_from_checkpoint=str(state.parent))


def test_mistakes(pool, tmp_path):
    pool.run(2, mistakes, str(tmp_path))


def refused_remedy(folder, optim):
    """What is to be done about `TrainingArguments.optim`."""
    from plait.hf import TrainingArguments

    arguments = trainers.arguments(TrainingArguments, str(folder), optim=optim)
    (problem,) = examined(arguments, Layout())[0]
    return problem.remedy


def losses(rank, world, config, folder):
    """Train as a remedy says. Runs in a worker."""
    with trainers.launched(rank, world):
        wide = {"model": trainers.model(hidden_size=256)}
        trainer = trainers.trainer_of(folder, config, wide, optim="adamw_torch", max_steps=2)
        trainer.train()
        trainer.engine.close()
        return trainers.history(trainer)["loss"]


@pytest.mark.parametrize(
    "optim", proof_after(2, ["adafactor", "paged_adamw_32bit", "adamw_bnb_8bit"])
)
def test_a_refused_optimizer_names_one_that_trains(pool, tmp_path, optim):
    remedy = refused_remedy(tmp_path, optim)
    assert 'use "adamw_torch"' in remedy
    found = re.search(r'write ("\w+": \{.*\}) in the file', remedy)
    assert found is not None, remedy
    section = {"zero_optimization": {"stage": 1}, **json.loads(f"{{{found[1]}}}")}
    if "offload_optimizer" in section["zero_optimization"]:
        # The processes of this test have no device besides the host, and nothing to offload to it.
        resolved = resolve(load({"train_batch_size": 2, **section}), world_size=2)
        assert resolved.optimizer_offload.device == "cpu"
        return
    for losses_of_rank in pool.run(2, losses, section, str(tmp_path)):
        assert len(losses_of_rank) == 2 and all(loss > 0 for loss in losses_of_rank)


@pytest.mark.parametrize("optim", ["lion_8bit", "paged_lion_32bit", "galore_adamw", "stable_adamw"])
def test_other_refused_optimizers(tmp_path, optim):
    remedy = refused_remedy(tmp_path, optim)
    assert ('"type": "Lion"' if "lion" in optim else 'use "adamw_torch"') in remedy
    assert "optimizers=" not in remedy
