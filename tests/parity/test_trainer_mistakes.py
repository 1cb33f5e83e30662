"""What a user of the Trainer does wrong is told with its remedy; labels that do not count are no mistake of the layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import CheckpointError, InputError
from tests.parity import trainers
from tests.parity.trainers import zero
from tests.pool import Pool


def without_targets(
    rank: int, world: int, config: dict[str, Any], folder: str, first: int
) -> dict[str, list[float]]:
    """A run whose first `first` samples have no target. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        data = trainers.samples(12)
        for sample in data[:first]:
            sample["labels"][:] = -100
        settings: dict[str, Any] = {
            "train_sampling_strategy": "sequential",
            "gradient_accumulation_steps": 4 // config.get("dp", 1),
        }
        arguments = trainers.arguments(
            TrainingArguments,
            folder,
            deepspeed={k: v for k, v in config.items() if k != "dp"},
            **settings,
        )
        trainer = Trainer(model=trainers.model(), args=arguments, train_dataset=data)
        trainer.train()
        return trainers.history(trainer)


@pytest.mark.parametrize("first", [2, 8, 12], ids=["a-micro-batch", "a-step", "all"])
def test_labels_that_do_not_count(pool: Pool, tmp_path: Path, first: int) -> None:
    """The first micro-batch, the first step, and everything: a pipeline is data parallelism."""
    wanted = pool.run(2, without_targets, zero(1) | {"dp": 2}, str(tmp_path), first)[0]
    found = pool.run(2, without_targets, {"parallel": {"pp": 2}}, str(tmp_path), first)[0]
    assert len(found["loss"]) == 2 and (first < 12) == (wanted["grad_norm"][-1] > 0)
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5)


def mistakes(rank: int, world: int, folder: str) -> None:
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        arguments = trainers.arguments(
            TrainingArguments,
            folder,
            deepspeed=zero(3),
            save_strategy="steps",
            save_steps=1,
            max_steps=1,
        )
        trainer = Trainer(model=trainers.model(), args=arguments, train_dataset=trainers.samples())
        copy.deepcopy(trainer.model)
        trainer.train()
        for part in (trainer.model, trainer.model.model.layers[0]):
            with pytest.raises(
                InputError,
                match=r"deepcopy of Llama\w+: .* sharded .*; copy the model before plait.initialize",
            ):
                copy.deepcopy(part)
        with pytest.raises(
            InputError, match="train_dataset has 0 samples.*1 at least; look at the split"
        ):
            Trainer(model=trainers.model(), args=arguments, train_dataset=[]).train()
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


def test_mistakes(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, mistakes, str(tmp_path))
