"""A run of the Trainer that stops inside of an epoch and resumes on another layout each time.

Its data order, losses, norms, rates, metrics and weights are those of one process that never
stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import zero


@dataclass(frozen=True)
class Segment:
    """The part of a run on one layout."""

    ranks: int
    dp: int
    config: dict[str, Any]
    last_step: int


TP2, PP2 = {"parallel": {"tp": 2}}, {"parallel": {"pp": 2}}
CHAINS: dict[str, tuple[int, int, tuple[Segment, ...]]] = {
    "zero3-tp2-zero3": (
        13,
        2,
        (Segment(2, 2, zero(3), 1), Segment(2, 1, TP2, 3), Segment(2, 2, zero(3), 4)),
    ),
    "dp2-tp2xdp2-pp2": (
        45,
        6,
        (Segment(2, 2, zero(1), 2), Segment(4, 2, {**TP2, **zero(2)}, 9), Segment(2, 1, PP2, 12)),
    ),
}
"""(samples, steps per epoch, segments of two epochs). A step has 8 samples, the last 5."""


def build():
    """Return a Qwen 2, whose biases of attention are in another parameter group."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model("qwen2", **trainers.SHAPE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


class RecordingCollator:
    """A collator that records the indices of the samples of each micro-batch."""

    def __init__(self, count):
        # The evaluation has SAMPLES samples, whatever the training has.
        rows = trainers.samples(max(count, trainers.SAMPLES))
        self.indices = {tuple(row["input_ids"].tolist()): i for i, row in enumerate(rows)}
        self.micro_batches: list[list[int]] = []
        assert len(self.indices) == len(rows)

    def __call__(self, rows):
        indices = [self.indices[tuple(row["input_ids"].tolist())] for row in rows]
        self.micro_batches.append(indices)
        return default_collate(rows)


def run(trainer_class, arguments_class, folder, *, count, last_step, resume=None, **settings):
    """Train two epochs until a step, and save there.

    Returns the results of `trainers.result`, the micro-batches and the sizes of parameter groups.
    """
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args, state, control, **_):
            is_last = state.global_step == last_step
            control.should_save = control.should_training_stop = is_last

    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 100, **settings}
    collator = RecordingCollator(count)
    trainer = trainer_class(
        model=build(),
        args=trainers.arguments(arguments_class, folder, **settings),
        data_collator=collator,
        train_dataset=trainers.samples(count),
        eval_dataset=trainers.samples(),
        compute_metrics=trainers.metrics,
        callbacks=[Stop()],
    )
    trainer.train(resume_from_checkpoint=resume)
    micro_batches = list(collator.micro_batches)
    group_sizes = [len(group["params"]) for group in trainer.optimizer.param_groups]
    metrics = trainer.evaluate()
    trainer.save_model(f"{folder}/model")
    result = trainers.result(trainer, metrics, f"{folder}/model")
    return {**result, "micro_batches": micro_batches, "group_sizes": group_sizes}


def run_segment(rank, world, folder, settings):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return run(Trainer, TrainingArguments, folder, **settings)


@pytest.mark.parametrize("name", proof_after(1, CHAINS))
def test_a_run_continues_on_other_layouts(pool, tmp_path, name):
    from transformers import Trainer, TrainingArguments

    count, epoch_steps, segments = CHAINS[name]
    with trainers.launched_alone():
        settings = {"count": count, "last_step": 2 * epoch_steps}
        folder = str(tmp_path / "alone")
        expected = run(
            Trainer, TrainingArguments, folder, gradient_accumulation_steps=4, **settings
        )
    # Micro-batches of one process by step. The last step of each epoch may have fewer than four.
    steps = []
    half = len(expected["micro_batches"]) // 2
    for epoch in (expected["micro_batches"][:half], expected["micro_batches"][half:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(count))
        steps += [epoch[start : start + 4] for start in range(0, half, 4)]
    assert steps[0] != steps[epoch_steps]

    resume = None
    first_step = 0
    for number, segment in enumerate(segments):
        folder = str(tmp_path / f"segment-{number}")
        settings = {
            "count": count,
            "last_step": segment.last_step,
            "resume": resume,
            "gradient_accumulation_steps": 4 // segment.dp,
            "deepspeed": segment.config,
        }
        ranks = pool.run(segment.ranks, run_segment, folder, settings)
        for rank, actual in enumerate(ranks):
            dp_rank = rank * segment.dp // segment.ranks
            order = []
            for step in steps[first_step : segment.last_step]:
                order += step[dp_rank :: segment.dp]
            # A rank without a batch in the last round of an epoch collates another rank's, which
            # counts for nothing.
            read = [indices for indices in actual["micro_batches"] if indices in order]
            assert read == order
            assert actual["micro_batches"][: len(order) // 2] == order[: len(order) // 2]
            # A pipeline stage has some of the parameters, but both groups.
            assert len(actual["group_sizes"]) == 2
            assert segment.config is PP2 or actual["group_sizes"] == expected["group_sizes"]
        for key in ("loss", "grad_norm", "learning_rate"):
            expected_values = expected[key][: segment.last_step]
            assert ranks[0][key] == pytest.approx(expected_values, rel=1e-6), key
            assert all(actual[key] == ranks[0][key] for actual in ranks), key
        resume = f"{folder}/checkpoint-{segment.last_step}"
        first_step = segment.last_step

    trainers.close(ranks[0], expected)
    for weight, tensor in expected["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][weight], tensor, rtol=1e-9, atol=1e-9)
