"""The Hugging Face Trainer on Plait's layouts is Transformers' own Trainer in one process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

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
"""Processes, data-parallel ranks, and the file."""


@pytest.mark.parametrize("name", proof_after(4, LAYOUTS))
def test_a_layout_is_one_process(pool, tmp_path, name):
    """21 samples, of which the last step has too few for all ranks."""
    from transformers import AutoModelForCausalLM

    world, dp, config = LAYOUTS[name]
    wanted = trainers.native(dp)
    found = pool.run(world, trainers.on_plait, config, str(tmp_path), {})
    close(found[0], wanted)
    for other in found[1:]:
        assert (other["loss"], other["grad_norm"], other["metrics"]) == (
            found[0]["loss"],
            found[0]["grad_norm"],
            found[0]["metrics"],
        )
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(opened).__name__ == "LlamaForCausalLM" and opened.config.architectures == [
        "LlamaForCausalLM"
    ]
    torch.testing.assert_close(
        opened.state_dict()["lm_head.weight"],
        wanted["weights"]["lm_head.weight"],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.proof
@pytest.mark.parametrize("name", ["zero3", "tp2", "pp2"])
def test_in_float64(pool, tmp_path, name):
    """What the Trainer logs of a loss is float32 in both."""
    world, dp, config = LAYOUTS[name]
    settings = {"dtype": torch.float64}
    found = pool.run(world, trainers.on_plait, config, str(tmp_path), settings)[0]
    wanted = trainers.native(dp, **settings)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-7)
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-9, atol=1e-9)


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
    """With Transformers' balance loss; a rank that has no batch exchanges another's tokens."""
    made = trainers.experts_alone if "pp" in config["parallel"] else trainers.experts
    wanted = trainers.native(dp, made=made)
    world = dp * config["parallel"].get("pp", 1)
    close(pool.run(world, trainers.on_plait, config, str(tmp_path), {"made": made})[0], wanted)


def under_fsdp(rank, world, folder, settings):
    """The run, and what became of the arguments. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        resolved: list[Any] = []

        class Kept(Trainer):
            def begin(self):
                resolved.append(self._resolved)
                return super().begin()

        found = trainers.run(Kept, TrainingArguments, folder, **settings)
        data, offload = resolved[0].data_parallel, resolved[0].parameter_offload
        return found, (data.stage, resolved[0].recompute.mode, offload.device)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_checkpointing": True}},
            (3, "full", "none"),
        ),
        ({"fsdp": "shard_grad_op"}, (2, "none", "none")),
    ],
)
def test_fsdp_of_the_arguments(pool, tmp_path, settings, wanted):
    """In the words of Transformers, with and without a section."""
    for found, made in pool.run(2, under_fsdp, str(tmp_path), settings):
        close(found, trainers.native(2))
        assert made == wanted


def resumed(rank, world, folder):
    """Two epochs on two data-parallel ranks, with a checkpoint inside of the first, from which tensor parallelism goes on, and the same
    layout. Runs in a worker. Returns (the history of the first, of those that go on, the loss of the model that is loaded at the end,
    losses of all evaluations)."""
    from accelerate.state import AcceleratorState

    with trainers.launched(rank, world):

        def made(config, steps, **settings):
            AcceleratorState._reset_state(reset_partial_state=True)
            both = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, **settings}
            data = {"eval_dataset": trainers.samples(7)}
            return trainers.trainer_of(
                folder, config, data, gradient_accumulation_steps=steps, **both
            )

        best_is_worst = {
            "metric_for_best_model": "loss",
            "greater_is_better": True,
        }  # the first, so that it has to be loaded
        first = made(
            zero(1),
            2,
            load_best_model_at_end=True,
            eval_strategy="steps",
            eval_steps=2,
            **best_is_worst,
        )
        first.train()
        best = [row["eval_loss"] for row in first.state.log_history if "eval_loss" in row]
        again = first.evaluate()["eval_loss"]
        another = made(zero(0), 3)
        with pytest.raises(InputError, match=r"8 samples per step, but this run has 12"):
            another.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        another.engine.close()
        others = []
        for config, steps in (({"parallel": {"tp": 2}}, 4), (zero(1), 2)):
            second = made(config, steps, save_strategy="no")
            second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
            others.append(trainers.history(second))
        return trainers.history(first), others, again, best


def test_resume_on_another_layout(pool, tmp_path):
    """In the middle of an epoch; the best model of a run is loaded at its end."""
    wanted = trainers.native(2, num_train_epochs=2)
    for first, others, again, best in pool.run(2, resumed, str(tmp_path)):
        assert first["loss"] == pytest.approx(wanted["loss"], rel=1e-5) and len(first["loss"]) == 6
        for second in others:
            for key in ("loss", "grad_norm", "learning_rate"):
                assert second[key] == pytest.approx(wanted[key], rel=1e-5), (
                    key
                )  # those before are in the checkpoint's own log
        assert again == pytest.approx(best[0], rel=1e-6) and best[-1] < best[0]
    assert {path.name for path in (tmp_path / "checkpoint-2").iterdir()} >= {
        "plait",
        "model.safetensors",
        "config.json",
        "scheduler.pt",
    }


class Masking:
    """A collator that leaves out words at random, and remembers which."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, rows):
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        left = torch.rand(batch["input_ids"].shape) < 0.3
        self.seen.append(left.flatten().int().tolist())
        return {**batch, "input_ids": batch["input_ids"].masked_fill(left, 1)}


def masked(rank, world, config, folder):
    """What was left out, and the lengths in the order of `group_by_length`. Runs in a worker."""
    with trainers.launched(rank, world):
        collator = Masking()
        given = {
            "model": trainers.model(attention_dropout=0.1),
            "data_collator": collator,
            "eval_dataset": trainers.samples(7),
        }
        trainer = trainers.trainer_of(
            folder, config, given, train_sampling_strategy="group_by_length"
        )
        trainer.train()
        trainer.evaluate()
        assert (
            trainer.engine is not None
            and len(trainer.engine.generate([[5, 6, 7]], max_new_tokens=2)[0].token_ids) == 2
        )
        order = [
            int(index) for batch in trainer.get_train_dataloader().batch_sampler for index in batch
        ]
        return collator.seen, order


@pytest.mark.parametrize("name", proof_after(1, ["pp2", "tp2"]))
def test_ranks_that_share_a_batch_draw_the_same(pool, tmp_path, name):
    """Stages draw other numbers for dropout, and read the same batches in the same order."""
    (seen, order), other = pool.run(2, masked, LAYOUTS[name][2], str(tmp_path))
    assert (
        (seen, order) == other
        and len(seen) == 11 + 2
        and sorted(order) == list(range(trainers.SAMPLES))
    )


PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text(encoding="utf-8")


def page(rank, world, folder):
    """The code of docs/how-to/trainer.md. Runs in a worker."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with trainers.launched(rank, world):
            names: dict[str, Any] = {}
            (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
            exec(block, names)
            return [row["epoch"] for row in names["trainer"].state.log_history]
    finally:
        os.chdir(before)


def test_the_page(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    assert pool.run(2, page, str(tmp_path))[0][-1] == 1.0
    assert (tmp_path / "out" / "checkpoint-6" / "plait").is_dir()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
