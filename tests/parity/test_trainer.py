"""The Hugging Face Trainer on Plait's layouts, against Transformers' Trainer in one process."""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from plait.errors import InputError
from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import close, zero

TP2, PP2, EP2 = {"tp": 2}, {"pp": 2}, {"ep": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2": (2, 2, zero(0)),
    "zero3": (2, 2, zero(3)),
    "tp2": (2, 1, {"parallel": TP2}),
    "pp2": (2, 1, {"parallel": PP2}),
    "zero1": (2, 2, zero(1)),
    "zero2": (2, 2, zero(2)),
    "sp2": (2, 1, {"parallel": {**TP2, "sequence_parallel": True}}),
    "tp2-dp2": (4, 2, {"parallel": TP2}),
    "pp2-dp2": (4, 2, {"parallel": PP2}),
    "tp2-zero3": (4, 2, {"parallel": TP2, **zero(3)}),
    "pp2-zero3": (4, 2, {"parallel": PP2, **zero(3)}),
    "pp2-tp2": (4, 1, {"parallel": {**PP2, **TP2}}),
    "zero3-of-3": (3, 3, zero(3)),
}
"""(ranks, data-parallel ranks, configuration)."""


@pytest.mark.parametrize("name", proof_after(4, LAYOUTS))
def test_a_layout_is_one_process(pool, tmp_path, name):
    """The last step of the 21 samples has too few for all ranks."""
    from transformers import AutoModelForCausalLM

    world, dp, config = LAYOUTS[name]
    expected = trainers.native(dp)
    first, *others = pool.run(world, trainers.on_plait, config, str(tmp_path), {})
    close(first, expected)
    for other in others:
        for key in ("loss", "grad_norm", "metrics"):
            assert other[key] == first[key], key

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.architectures == ["LlamaForCausalLM"]
    head = "lm_head.weight"
    torch.testing.assert_close(
        model.state_dict()[head], expected["weights"][head], rtol=1e-5, atol=1e-5
    )


@pytest.mark.proof
@pytest.mark.parametrize("name", ["zero3", "tp2", "pp2"])
def test_in_float64(pool, tmp_path, name):
    """The Trainer logs losses in float32, so that they are not compared."""
    world, dp, config = LAYOUTS[name]
    settings = {"dtype": torch.float64}
    actual = pool.run(world, trainers.on_plait, config, str(tmp_path), settings)[0]
    expected = trainers.native(dp, **settings)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-7)
    for weight, tensor in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][weight], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dp", "config"),
    proof_after(
        1,
        [
            *((2, {"parallel": EP2, **zero(stage)}) for stage in (1, 0, 2, 3)),
            (4, {"parallel": EP2, **zero(2)}),
            (2, {"parallel": {**EP2, **PP2}, **zero(1)}),
        ],
        name=lambda dp, config: f"{dp}-{config}",
    ),
)
def test_experts_on_different_processes(pool, tmp_path, dp, config):
    """A rank that has no batch exchanges another rank's tokens.

    The model has Transformers' balance loss, except in a pipeline.
    """
    build = trainers.experts_alone if "pp" in config["parallel"] else trainers.experts
    expected = trainers.native(dp, made=build)
    world = dp * config["parallel"].get("pp", 1)
    settings = {"made": build}
    actual = pool.run(world, trainers.on_plait, config, str(tmp_path), settings)[0]
    close(actual, expected)


def train_with_fsdp_arguments(rank, world, folder, settings):
    """Return the run, and what the arguments became. Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        resolved: list[Any] = []

        class RecordingTrainer(Trainer):
            def begin(self):
                # No public name has the configuration that follows from the arguments.
                resolved.append(self._resolved)
                return super().begin()

        run = trainers.run(RecordingTrainer, TrainingArguments, folder, **settings)
        configuration = resolved[0]
        stage = configuration.data_parallel.stage
        offload = configuration.parameter_offload.device
        return run, (stage, configuration.recompute.mode, offload)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_checkpointing": True}},
            (3, "full", "none"),
        ),
        ({"fsdp": "shard_grad_op"}, (2, "none", "none")),
    ],
    ids=["full_shard", "shard_grad_op"],
)
def test_fsdp_of_the_arguments(pool, tmp_path, settings, expected):
    for run, resolved in pool.run(2, train_with_fsdp_arguments, str(tmp_path), settings):
        close(run, trainers.native(2))
        assert resolved == expected


def train_and_resume(rank, world, folder):
    """Train two epochs with a checkpoint inside of the first, and resume it. Runs on every rank.

    Returns the history of the first run, the histories of two runs that resume it on other
    layouts, the losses of all evaluations, and the loss of the model that is loaded at the end.
    """
    from accelerate.state import AcceleratorState

    with trainers.launched(rank, world):

        def new_trainer(config, accumulation, **settings):
            AcceleratorState._reset_state(reset_partial_state=True)
            settings = {"num_train_epochs": 2, "save_steps": 2, **settings}
            return trainers.trainer_of(
                folder,
                config,
                {"eval_dataset": trainers.samples(7)},
                gradient_accumulation_steps=accumulation,
                **settings,
            )

        first = new_trainer(
            zero(1),
            2,
            save_strategy="steps",
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            # The first model counts as the best, so that it has to be loaded.
            greater_is_better=True,
        )
        first.train()
        losses = [row["eval_loss"] for row in first.state.log_history if "eval_loss" in row]
        loss_at_end = first.evaluate()["eval_loss"]

        checkpoint = f"{folder}/checkpoint-2"
        other_batch = new_trainer(zero(0), 3)
        with pytest.raises(InputError, match=r"8 samples per step, but this run has 12"):
            other_batch.train(resume_from_checkpoint=checkpoint)
        other_batch.engine.close()

        histories = []
        for config, accumulation in (({"parallel": TP2}, 4), (zero(1), 2)):
            trainer = new_trainer(config, accumulation)
            trainer.train(resume_from_checkpoint=checkpoint)
            histories.append(trainers.history(trainer))
        return trainers.history(first), histories, losses, loss_at_end


def test_resume_on_another_layout(pool, tmp_path):
    """A run resumes inside of an epoch. Its best model is loaded at its end."""
    expected = trainers.native(2, num_train_epochs=2)
    for first, histories, losses, loss_at_end in pool.run(2, train_and_resume, str(tmp_path)):
        assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert len(first["loss"]) == 6
        for history in histories:
            # The checkpoint contains the log of the steps before it.
            for key in ("loss", "grad_norm", "learning_rate"):
                assert history[key] == pytest.approx(expected[key], rel=1e-5), key
        assert loss_at_end == pytest.approx(losses[0], rel=1e-6) and losses[-1] < losses[0]
    files = set(os.listdir(tmp_path / "checkpoint-2"))
    assert files >= {"plait", "model.safetensors", "config.json", "scheduler.pt"}


def resume_where_more_is_dropped(rank, world, folder):
    """Resume with the same samples per step, but other steps per epoch. Runs on every rank."""
    from accelerate.state import AcceleratorState

    def new_trainer(samples, accumulation, **settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        return trainers.trainer_of(
            folder,
            zero(1),
            per_device_train_batch_size=samples,
            gradient_accumulation_steps=accumulation,
            dataloader_drop_last=True,
            **settings,
        )

    with trainers.launched(rank, world):
        # 5 rounds of 4 samples are read, and the third step has one of them.
        trainer = new_trainer(2, 2, num_train_epochs=1, save_strategy="epoch")
        trainer.train()
        assert trainer.state.global_step == 3

        # 2 rounds of 8 samples.
        checkpoint = f"{folder}/checkpoint-3"
        trainer = new_trainer(4, 1, num_train_epochs=2)
        with pytest.raises(InputError, match=r"3 steps per epoch, but this run has 2"):
            trainer.train(resume_from_checkpoint=checkpoint)
        # Both remedies of the message.
        for samples, accumulation, is_skipped, steps in ((4, 1, True, 4), (2, 2, False, 6)):
            trainer = new_trainer(
                samples, accumulation, num_train_epochs=2, ignore_data_skip=is_skipped
            )
            trainer.train(resume_from_checkpoint=checkpoint)
            assert trainer.state.global_step == steps


def test_a_position_among_other_dropped_samples_is_refused(pool, tmp_path):
    pool.run(2, resume_where_more_is_dropped, str(tmp_path))


def order_by_length(rank, world, config, accumulation, folder):
    """Return the order of 48 samples, grouped by length. Runs on every rank."""
    data = [{"input_ids": [1] * (1 + index * 7 % 48)} for index in range(48)]
    with trainers.launched(rank, world):
        trainer = trainers.trainer_of(
            folder,
            config,
            {"train_dataset": data},
            train_sampling_strategy="group_by_length",
            gradient_accumulation_steps=accumulation,
        )
        return list(trainer.get_train_dataloader().batch_sampler.sampler)


def test_the_order_by_length_is_the_same_on_every_layout(pool, tmp_path):
    """Otherwise a run that resumes on another layout reads samples twice, and others never."""
    orders = pool.run(2, order_by_length, zero(1), 2, str(tmp_path))
    orders += pool.run(2, order_by_length, {"parallel": TP2}, 4, str(tmp_path))
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(48))


class MaskingCollator:
    """A collator that masks tokens at random, and records which."""

    def __init__(self):
        self.masks: list[list[int]] = []

    def __call__(self, rows):
        batch = default_collate(rows)
        mask = torch.rand(batch["input_ids"].shape) < 0.3
        self.masks.append(mask.flatten().int().tolist())
        return {**batch, "input_ids": batch["input_ids"].masked_fill(mask, 1)}


def train_with_masks(rank, world, config, folder):
    """Return the masks, and the order of samples by length. Runs on every rank."""
    with trainers.launched(rank, world):
        collator = MaskingCollator()
        arguments = {
            "model": trainers.model(attention_dropout=0.1),
            "data_collator": collator,
            "eval_dataset": trainers.samples(7),
        }
        settings = {"train_sampling_strategy": "group_by_length"}
        trainer = trainers.trainer_of(folder, config, arguments, **settings)
        trainer.train()
        trainer.evaluate()
        assert trainer.engine is not None
        (sample,) = trainer.engine.generate([[5, 6, 7]], max_new_tokens=2)
        assert len(sample.token_ids) == 2
        batches = trainer.get_train_dataloader().batch_sampler
        return collator.masks, list(map(int, chain.from_iterable(batches)))


@pytest.mark.parametrize("name", proof_after(1, ["pp2", "tp2"]))
def test_ranks_that_share_a_batch_draw_the_same(pool, tmp_path, name):
    """Stages draw other numbers for dropout, but read the same batches in the same order."""
    first, second = pool.run(2, train_with_masks, LAYOUTS[name][2], str(tmp_path))
    assert first == second
    masks, order = first
    assert len(masks) == 11 + 2
    assert sorted(order) == list(range(trainers.SAMPLES))


PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text(encoding="utf-8")


def run_page(rank, world, folder):
    """Run the code of docs/how-to/trainer.md. Runs on every rank."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with trainers.launched(rank, world):
            names: dict[str, Any] = {}
            (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
            # Like a script of a user, whose processes start with different seeds.
            torch.manual_seed(rank)
            exec(block, names)
            return [row["epoch"] for row in names["trainer"].state.log_history]
    finally:
        os.chdir(before)


def test_the_page(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    assert pool.run(2, run_page, str(tmp_path))[0][-1] == 1.0
    assert (tmp_path / "out" / "checkpoint-6" / "plait").is_dir()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
