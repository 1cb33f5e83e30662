"""One run of the Trainer that is stopped twice inside of an epoch, and goes on each time on another layout and number of processes: its
data order, losses, norms, metrics and weights are those of one process that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import trainers
from tests.parity.trainers import zero
from tests.pool import Pool

pytestmark = pytest.mark.proof  # three starts, one of four processes
COUNT, STEPS = 45, 12
"""Samples, of which 8 are a step: an epoch has 5 steps that are full and one of 5 samples, and there are two."""
HOPS: tuple[tuple[int, int, dict[str, Any], int], ...] = (
    (2, 2, zero(1), 2),
    (4, 2, {"parallel": {"tp": 2}, **zero(2)}, 9),
    (2, 1, {"parallel": {"pp": 2}}, STEPS),
)
"""Processes, data-parallel ranks, file, and the step after which it is stopped: inside of the first epoch, of the second, and its end."""


class Noting:
    """A collator that remembers which samples every micro-batch has."""

    def __init__(self) -> None:
        self.numbers = {
            tuple(row["input_ids"].tolist()): number
            for number, row in enumerate(trainers.samples(COUNT))
        }
        self.seen: list[list[int]] = []
        assert len(self.numbers) == COUNT

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.seen.append([self.numbers[tuple(row["input_ids"].tolist())] for row in rows])
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def run(
    kinds: tuple[Any, Any], folder: str, steps: int, last: int, resume: str | None, **settings: Any
) -> dict[str, Any]:
    """Train until step `last`, with `steps` micro-batches of 2 in a step. Adds "seen": the samples of every micro-batch."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == last

    trainer, arguments = kinds
    collator = Noting()
    both = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": steps,
        "save_strategy": "steps",
        "save_steps": 100,
        **settings,
    }
    made = trainer(
        model=trainers.model(torch.float64),
        args=trainers.arguments(arguments, folder, **both),
        data_collator=collator,
        train_dataset=trainers.samples(COUNT),
        eval_dataset=trainers.samples(),
        compute_metrics=trainers.metrics,
        callbacks=[Stop()],
    )
    made.train(resume_from_checkpoint=resume)
    seen = list(collator.seen)
    evaluated = made.evaluate()
    made.save_model(f"{folder}/model")
    return {**trainers.result(made, evaluated, f"{folder}/model"), "seen": seen}


def hop(
    rank: int,
    world: int,
    config: dict[str, Any],
    folder: str,
    steps: int,
    last: int,
    resume: str | None,
) -> dict[str, Any]:
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return run((Trainer, TrainingArguments), folder, steps, last, resume, deepspeed=config)


def order_of(alone: list[list[int]], dp: int, index: int, first: int, last: int) -> list[list[int]]:
    """The micro-batches that a data-parallel rank has to read in the steps from `first` to `last`, by what one process read in all."""
    found = []
    each = len(alone) // 2
    for step in range(first, last):
        epoch, within = divmod(step, STEPS // 2)
        found += alone[epoch * each : (epoch + 1) * each][within * 4 : within * 4 + 4][index::dp]
    return found


def test_two_data_parallel_then_tensor_and_data_then_a_pipeline(pool: Pool, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        wanted = run((Trainer, TrainingArguments), str(tmp_path / "alone"), 4, STEPS, None)
    read = wanted["seen"]
    first_epoch, second = (
        [number for batch in part for number in batch] for part in (read[:23], read[23:])
    )
    assert sorted(first_epoch) == sorted(second) == list(range(COUNT)) and first_epoch != second
    resume, first = None, 0
    for number, (world, dp, config, last) in enumerate(HOPS):
        folder = tmp_path / f"hop{number}"
        ranks = pool.run(world, hop, config, str(folder), 4 // dp, last, resume)
        found = ranks[0]
        for rank, other in enumerate(ranks):
            order = order_of(read, dp, rank * dp // world, first, last)
            # a rank that has no batch in the last round of an epoch collates another's, which counts for nothing
            seen = [one for one in other["seen"] if one in order]
            assert seen == order and other["seen"][: len(order) // 2] == order[: len(order) // 2]
        for key in ("loss", "grad_norm", "learning_rate"):
            assert found[key] == pytest.approx(wanted[key][:last], rel=1e-6), key
            assert all(other[key] == found[key] for other in ranks), key
        resume, first = f"{folder}/checkpoint-{last}", last
    trainers.close(found, wanted)
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-9, atol=1e-9)
