"""Optimizers of `TrainingArguments.optim`: what is refused names something that trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plait.cluster.layout import Layout
from plait.config.resolving.resolve import load, resolve
from plait.hf import TrainingArguments
from plait.hf.fields import examined
from tests.parity import trainers
from tests.pool import Pool


def losses(rank: int, world: int, config: dict[str, Any], folder: str, optim: str) -> list[float]:
    """Train as a remedy says. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer
        from plait.hf import TrainingArguments as Arguments

        arguments = trainers.arguments(
            Arguments, folder, deepspeed=config, optim=optim, max_steps=2, learning_rate=1e-2
        )
        trainer = Trainer(
            model=trainers.model(hidden_size=256), args=arguments, train_dataset=trainers.samples()
        )
        trainer.train()
        found = trainers.history(trainer)["loss"]
        trainer.engine.close()
        return found


def section_in(remedy: str) -> dict[str, Any]:
    """The part of a file that a remedy writes."""
    found = re.search(r'write ("\w+": \{.*\}) in the file', remedy)
    assert found is not None, remedy
    section: dict[str, Any] = json.loads(f"{{{found[1]}}}")
    return section


@pytest.mark.parametrize("optim", ["adafactor", "adamw_bnb_8bit", "paged_adamw_32bit"])
def test_a_refused_optimizer_names_one_that_trains(pool: Pool, tmp_path: Path, optim: str) -> None:
    arguments = trainers.arguments(TrainingArguments, str(tmp_path), optim=optim)
    (problem,) = examined(arguments, Layout())[0]
    assert 'use "adamw_torch"' in problem.remedy
    section = {"zero_optimization": {"stage": 1}, **section_in(problem.remedy)}
    if "offload_optimizer" in section["zero_optimization"]:
        # The processes of this test have no device besides the host, and nothing to offload to it.
        assert (
            resolve(load({"train_batch_size": 2, **section}), world_size=2).optimizer_offload.device
            == "cpu"
        )
        section = {"zero_optimization": {"stage": section["zero_optimization"]["stage"]}}
    for found in pool.run(2, losses, section, str(tmp_path), "adamw_torch"):
        assert len(found) == 2 and all(loss > 0 for loss in found)


@pytest.mark.parametrize("optim", ["lion_8bit", "paged_lion_32bit", "galore_adamw", "stable_adamw"])
def test_other_refused_optimizers(tmp_path: Path, optim: str) -> None:
    arguments = trainers.arguments(TrainingArguments, str(tmp_path), optim=optim)
    (problem,) = examined(arguments, Layout())[0]
    words = '"type": "Lion"' if "lion" in optim else 'use "adamw_torch"'
    assert words in problem.remedy and "optimizers=" not in problem.remedy
