"""A Trainer's optimizer has the same groups on every layout, so its schedule goes on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import trainers
from tests.parity.trainers import zero
from tests.pool import Pool

STEPS = 3


def model(dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen 2, whose projections of attention have biases."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen2", **trainers.SHAPE), dtype=dtype
    )


def moved(
    rank: int, world: int, hops: list[tuple[dict[str, Any], int]], folder: str
) -> tuple[dict[str, Any], list[list[int]]]:
    """One step on each layout, each going on from the one before. Runs in a worker."""
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def __init__(self, last: int) -> None:
            self.last = last

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == self.last

    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        resume, counts = None, []
        for number, (config, accumulation) in enumerate(hops, 1):
            AcceleratorState._reset_state(reset_partial_state=True)
            settings: dict[str, Any] = {
                "gradient_accumulation_steps": accumulation,
                "save_strategy": "steps",
                "save_steps": 100,
            }
            arguments = trainers.arguments(TrainingArguments, folder, deepspeed=config, **settings)
            trainer = Trainer(
                model=model(),
                args=arguments,
                train_dataset=trainers.samples(),
                callbacks=[Stop(number)],
            )
            trainer.train(resume_from_checkpoint=resume)
            resume = f"{folder}/checkpoint-{number}"
            counts.append([len(group["params"]) for group in trainer.optimizer.param_groups])
            trainer.engine.close()
        return trainers.history(trainer), counts


@pytest.mark.parametrize(
    "where", [[zero(3), {"parallel": {"tp": 2}}, zero(3)]], ids=["zero3-tp2-zero3"]
)
def test_a_schedule_goes_on_elsewhere(
    pool: Pool, tmp_path: Path, where: list[dict[str, Any]]
) -> None:
    """Losses, norms and rates are those of one process that was never stopped."""
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        arguments = trainers.arguments(
            TrainingArguments, str(tmp_path), gradient_accumulation_steps=4
        )
        one = Trainer(model=model(), args=arguments, train_dataset=trainers.samples())
        one.train()
        wanted = trainers.history(one)

    hops = [(config, 4 if "parallel" in config else 2) for config in where]
    for found, counts in pool.run(2, moved, hops, str(tmp_path)):
        assert counts[0] == counts[1] == counts[2] and len(counts[0]) == 2
        for key in ("loss", "grad_norm", "learning_rate"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
