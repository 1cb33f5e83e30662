"""One run of the Trainer that is stopped inside of an epoch, and goes on each time on another layout and number of processes: its data
order, losses, norms, rates, metrics and weights are those of one process that was never stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import zero

Hop = tuple[int, int, dict[str, Any], int]
"""Processes, data-parallel ranks, file, and the step after which it is stopped."""
TP2, PP2 = {"parallel": {"tp": 2}}, {"parallel": {"pp": 2}}
CHAINS: dict[str, tuple[int, int, tuple[Hop, ...]]] = {
    "zero3-tp2-zero3": (13, 2, ((2, 2, zero(3), 1), (2, 1, TP2, 3), (2, 2, zero(3), 4))),
    "dp2-tp2xdp2-pp2": (
        45,
        6,
        ((2, 2, zero(1), 2), (4, 2, {**TP2, **zero(2)}, 9), (2, 1, PP2, 12)),
    ),
}
"""Samples, of which 8 are a step and 5 the last one of an epoch; steps of one of the two epochs; hops."""


def model():
    """A Qwen 2, whose projections of attention have biases: parameters in two groups of the optimizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen2", **trainers.SHAPE), dtype=torch.float64
    )


class Noting:
    """A collator that remembers which samples every micro-batch has."""

    def __init__(self, count):
        rows = trainers.samples(max(count, trainers.SAMPLES))  # the evaluation has these
        self.numbers = {tuple(row["input_ids"].tolist()): at for at, row in enumerate(rows)}
        self.seen: list[list[int]] = []
        assert len(self.numbers) == len(rows)

    def __call__(self, rows):
        self.seen.append([self.numbers[tuple(row["input_ids"].tolist())] for row in rows])
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def run(
    kinds, folder, count, steps, last, resume, **settings
):  # fmt: skip
    """Train until step `last`, with `steps` micro-batches of 2 in a step. Adds the samples of every micro-batch ("seen") and how many
    parameters are in each group."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args, state, control, **_):
            control.should_save = control.should_training_stop = state.global_step == last

    trainer, arguments = kinds
    both = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 100, **settings}
    collator = Noting(count)
    made = trainer(
        model=model(),
        args=trainers.arguments(arguments, folder, gradient_accumulation_steps=steps, **both),
        data_collator=collator,
        train_dataset=trainers.samples(count),
        eval_dataset=trainers.samples(),
        compute_metrics=trainers.metrics,
        callbacks=[Stop()],
    )
    made.train(resume_from_checkpoint=resume)
    seen = list(collator.seen)
    groups = [len(group["params"]) for group in made.optimizer.param_groups]
    evaluated = made.evaluate()
    made.save_model(f"{folder}/model")
    return {**trainers.result(made, evaluated, f"{folder}/model"), "seen": seen, "groups": groups}


def hop(rank, world, config, *given):
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return run((Trainer, TrainingArguments), *given, deepspeed=config)


def order_of(alone, epoch_steps, dp, index, steps):
    """The micro-batches that a data-parallel rank has to read in these steps, by what one process read in all."""
    found = []
    each = len(alone) // 2
    for step in steps:
        epoch, within = divmod(step, epoch_steps)
        found += alone[epoch * each : (epoch + 1) * each][within * 4 : within * 4 + 4][index::dp]
    return found


@pytest.mark.parametrize("name", proof_after(1, CHAINS))
def test_a_run_goes_on_on_other_layouts(pool, tmp_path, name):
    from transformers import Trainer, TrainingArguments

    count, epoch_steps, hops = CHAINS[name]
    with trainers.launched_alone():
        kinds = Trainer, TrainingArguments
        wanted = run(kinds, str(tmp_path / "alone"), count, 4, 2 * epoch_steps, None)
    read = wanted["seen"]
    each = len(read) // 2
    first_epoch, second = ([n for one in part for n in one] for part in (read[:each], read[each:]))
    assert sorted(first_epoch) == sorted(second) == list(range(count)) and first_epoch != second
    resume, first = None, 0
    for number, (world, dp, config, last) in enumerate(hops):
        folder = tmp_path / f"hop{number}"
        ranks = pool.run(world, hop, config, str(folder), count, 4 // dp, last, resume)
        found = ranks[0]
        for rank, other in enumerate(ranks):
            order = order_of(read, epoch_steps, dp, rank * dp // world, range(first, last))
            # A rank that has no batch in the last round of an epoch collates another's, which counts for nothing.
            seen = [one for one in other["seen"] if one in order]
            assert seen == order and other["seen"][: len(order) // 2] == order[: len(order) // 2]
            # A pipeline stage has some of the parameters, but both groups.
            assert len(other["groups"]) == 2
            assert config is PP2 or other["groups"] == wanted["groups"]
        for key in ("loss", "grad_norm", "learning_rate"):
            assert found[key] == pytest.approx(wanted[key][:last], rel=1e-6), key
            assert all(other[key] == found[key] for other in ranks), key
        resume, first = f"{folder}/checkpoint-{last}", last
    trainers.close(found, wanted)
    for key, tensor in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][key], tensor, rtol=1e-9, atol=1e-9)
