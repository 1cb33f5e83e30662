"""The Hugging Face Trainer on Plait's layouts is Transformers' own Trainer in one process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import InputError
from tests.parity import trainers
from tests.parity.trainers import close, zero
from tests.pool import Pool


@pytest.mark.parametrize(
    ("world", "dp", "config"),
    [
        pytest.param(2, 2, zero(0), id="dp2"),
        pytest.param(2, 2, zero(3), id="zero3"),
        pytest.param(2, 1, {"parallel": {"tp": 2}}, id="tp2"),
        pytest.param(2, 1, {"parallel": {"pp": 2}}, id="pp2"),
        *(
            pytest.param(2, 2, zero(stage), id=f"zero{stage}", marks=pytest.mark.proof)
            for stage in (1, 2)
        ),
        pytest.param(
            2,
            1,
            {"parallel": {"tp": 2, "sequence_parallel": True}},
            id="sp2",
            marks=pytest.mark.proof,
        ),
        pytest.param(4, 2, {"parallel": {"tp": 2}}, id="tp2-dp2", marks=pytest.mark.proof),
        pytest.param(4, 2, {"parallel": {"pp": 2}}, id="pp2-dp2", marks=pytest.mark.proof),
        pytest.param(
            4, 2, {"parallel": {"tp": 2}, **zero(3)}, id="tp2-zero3", marks=pytest.mark.proof
        ),
        pytest.param(
            4, 2, {"parallel": {"pp": 2}, **zero(3)}, id="pp2-zero3", marks=pytest.mark.proof
        ),
        pytest.param(4, 1, {"parallel": {"pp": 2, "tp": 2}}, id="pp2-tp2", marks=pytest.mark.proof),
        pytest.param(3, 3, zero(3), id="zero3-of-3", marks=pytest.mark.proof),
    ],
)
def test_a_layout_is_one_process(
    pool: Pool, tmp_path: Path, world: int, dp: int, config: dict[str, Any]
) -> None:
    """21 samples, of which the last step has too few for all ranks."""
    from transformers import AutoModelForCausalLM

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
@pytest.mark.parametrize(
    ("world", "dp", "config"),
    [(2, 2, zero(3)), (2, 1, {"parallel": {"tp": 2}}), (2, 1, {"parallel": {"pp": 2}})],
)
def test_in_float64(
    pool: Pool, tmp_path: Path, world: int, dp: int, config: dict[str, Any]
) -> None:
    """What the Trainer logs of a loss is float32 in both."""
    settings = {"dtype": torch.float64}
    found = pool.run(world, trainers.on_plait, config, str(tmp_path), settings)[0]
    wanted = trainers.native(dp, **settings)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-7)
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("world", "dp", "config"),
    [
        pytest.param(2, 2, {"parallel": {"ep": 2}, **zero(1)}, id="ep2-zero1"),
        *(
            pytest.param(
                2,
                2,
                {"parallel": {"ep": 2}, **zero(stage)},
                id=f"ep2-zero{stage}",
                marks=pytest.mark.proof,
            )
            for stage in (0, 2, 3)
        ),
        pytest.param(
            4, 4, {"parallel": {"ep": 2}, **zero(2)}, id="ep2-zero2-of-4", marks=pytest.mark.proof
        ),
        pytest.param(
            4, 2, {"parallel": {"ep": 2, "pp": 2}, **zero(1)}, id="ep2-pp2", marks=pytest.mark.proof
        ),
    ],
)
def test_experts_on_different_processes(
    pool: Pool, tmp_path: Path, world: int, dp: int, config: dict[str, Any]
) -> None:
    """With Transformers' balance loss; a rank that has no batch exchanges another's tokens."""
    made = trainers.experts_alone if "pp" in config["parallel"] else trainers.experts
    wanted = trainers.native(dp, made=made)
    close(pool.run(world, trainers.on_plait, config, str(tmp_path), {"made": made})[0], wanted)


def under_fsdp(
    rank: int, world: int, folder: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The run, and what became of the arguments. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        resolved: list[Any] = []

        class Kept(Trainer):
            def begin(self) -> Any:
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
def test_fsdp_of_the_arguments(
    pool: Pool, tmp_path: Path, settings: dict[str, Any], wanted: tuple[Any, ...]
) -> None:
    """In the words of Transformers, with and without a section."""
    for found, made in pool.run(2, under_fsdp, str(tmp_path), settings):
        close(found, trainers.native(2))
        assert made == wanted


def resumed(
    rank: int, world: int, folder: str
) -> tuple[dict[str, Any], list[dict[str, Any]], float, list[float]]:
    """Two epochs on two data-parallel ranks, with a checkpoint inside of the first, from which tensor parallelism goes on, and the same
    layout. Runs in a worker. Returns (the history of the first, of those that go on, the loss of the model that is loaded at the end,
    losses of all evaluations)."""
    from accelerate.state import AcceleratorState

    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        def made(config: Any, steps: int, **settings: Any) -> Any:
            AcceleratorState._reset_state(reset_partial_state=True)
            both = {
                "num_train_epochs": 2,
                "save_strategy": "steps",
                "save_steps": 2,
                "gradient_accumulation_steps": steps,
                **settings,
            }
            args = trainers.arguments(TrainingArguments, folder, deepspeed=config, **both)
            data = {"train_dataset": trainers.samples(), "eval_dataset": trainers.samples(7)}
            return Trainer(model=trainers.model(), args=args, **data)

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
        with pytest.raises(InputError, match=r"8 samples per step, and this run has 12"):
            another.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        another.engine.close()
        others = []
        for config, steps in (({"parallel": {"tp": 2}}, 4), (zero(1), 2)):
            second = made(config, steps, save_strategy="no")
            second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
            others.append(trainers.history(second))
        return trainers.history(first), others, again, best


def test_resume_on_another_layout(pool: Pool, tmp_path: Path) -> None:
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

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        left = torch.rand(batch["input_ids"].shape) < 0.3
        self.seen.append(left.flatten().int().tolist())
        return {**batch, "input_ids": batch["input_ids"].masked_fill(left, 1)}


def masked(
    rank: int, world: int, config: dict[str, Any], folder: str
) -> tuple[list[list[int]], list[int]]:
    """What was left out, and the lengths in the order of `group_by_length`. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        collator = Masking()
        args = trainers.arguments(
            TrainingArguments, folder, deepspeed=config, train_sampling_strategy="group_by_length"
        )
        data = [{**one, "number": index} for index, one in enumerate(trainers.samples())]
        model = trainers.model(attention_dropout=0.1)
        trainer = Trainer(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=data,
            eval_dataset=trainers.samples(7),
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


@pytest.mark.parametrize(
    "config", [{"parallel": {"pp": 2}}, {"parallel": {"tp": 2}}], ids=["pp2", "tp2"]
)
def test_ranks_that_share_a_batch_draw_the_same(
    pool: Pool, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Stages draw other numbers for dropout, and read the same batches in the same order."""
    (seen, order), other = pool.run(2, masked, config, str(tmp_path))
    assert (
        (seen, order) == other
        and len(seen) == 11 + 2
        and sorted(order) == list(range(trainers.SAMPLES))
    )


def written(rank: int, world: int, config: dict[str, Any], folder: str) -> str:
    """What the model says that writes its own folder. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        args = trainers.arguments(TrainingArguments, folder, deepspeed=config)
        trainer = Trainer(model=trainers.model(), args=args, train_dataset=trainers.samples(8))
        trainer.train()
        with pytest.raises(InputError) as raised:
            trainer.model.save_pretrained(f"{folder}/own")
        return str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        zero(3),
        {"parallel": {"tp": 2}},
        pytest.param({"parallel": {"pp": 2}}, marks=pytest.mark.proof),
    ],
    ids=["zero3", "tp2", "pp2"],
)
def test_a_part_of_the_weights_is_no_folder(
    pool: Pool, tmp_path: Path, config: dict[str, Any]
) -> None:
    """In a pipeline it would have been one stage's, without a word."""
    for said in pool.run(2, written, config, str(tmp_path)):
        assert "call trainer.save_model(folder) on every process" in said
    assert not list(tmp_path.rglob("*.safetensors"))


PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text(encoding="utf-8")


def page(rank: int, world: int, folder: str) -> list[float]:
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


def test_the_page(pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert pool.run(2, page, str(tmp_path))[0][-1] == 1.0
    assert (tmp_path / "out" / "checkpoint-6" / "plait").is_dir()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
