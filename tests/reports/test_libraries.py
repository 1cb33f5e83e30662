"""Reports about Accelerate, Transformers and PEFT, compared with those libraries in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.model.plans import make_plan
from plait.parallel.context.families import refuse_unknown_model
from tests.covers import cover
from tests.parity.trainers import zero
from tests.reports import libraries

pytest.importorskip("accelerate")
TOLERANCE = 1e-7


@dataclass(frozen=True)
class LoopCase:
    """A public report about Accelerate: the loader, micro-batches per step, epochs, arguments."""

    report: str
    loader: str = "samples"
    accumulation: int = 2
    epochs: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 2, 3)
    loop: str = "plain"
    refused: str = ""


LOOP_CASES = [
    LoopCase("accelerate-3877", accumulation=3),
    LoopCase("accelerate-679", "batch sampler", refused="give it a batch_size", stages=(3,)),
    LoopCase("accelerate-882", "stream", refused="give it a batch_size", stages=(3,)),
    LoopCase(
        "accelerate-1624",
        accumulation=4,
        epochs=2,
        arguments={"plugin": {"sync_with_dataloader": False}},
    ),
    LoopCase("accelerate-3017", accumulation=3, loop="evaluation"),
    LoopCase(
        "accelerate-1847", arguments={"plugin": {"sync_with_dataloader": False}}, loop="parts"
    ),
    LoopCase("accelerate-1839", accumulation=4, epochs=2),
    LoopCase(
        "accelerate-961",
        arguments={"data": {"dispatch_batches": True}},
        refused="dispatch_batches",
        stages=(3,),
    ),
]


@dataclass(frozen=True)
class TrainerCase:
    """A public report about the Trainer: the model, settings, and what differs in one process."""

    report: str
    settings: dict[str, Any]
    model: str = "llama"
    alone: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = ("zero2", "zero3", "pp2", "tp2")


TRAINER_CASES = [
    TrainerCase("transformers-33455", {"num_train_epochs": 3, "gradient_accumulation_steps": 4}),
    TrainerCase(
        "transformers-38837",
        {"num_train_epochs": 2, "gradient_accumulation_steps": 4},
        "without items",
    ),
    TrainerCase("transformers-22082", {"num_train_epochs": 2, "gradient_accumulation_steps": 8}),
    TrainerCase("transformers-36297", {"num_train_epochs": 1.7, "gradient_accumulation_steps": 2}),
    TrainerCase(
        "transformers-35942",
        {
            "num_train_epochs": 3,
            "lr_scheduler_type": "cosine_with_restarts",
            "lr_scheduler_kwargs": {"num_cycles": 2},
        },
    ),
    TrainerCase(
        "trl-2175",
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        alone={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        layouts=("zero2", "zero3"),
    ),
    TrainerCase(
        "LTX-2-263",
        {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1},
    ),
    TrainerCase(
        "transformers-29078",
        {
            "num_train_epochs": 3,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_right",
            "learning_rate": 3e-2,
        },
        "adapters",
    ),
    TrainerCase("peft-3306", {"learning_rate": 3e-2}, "trained biases"),
    TrainerCase("peft-206", {"learning_rate": 3e-2, "prediction_loss_only": True}, "prompts"),
    TrainerCase("peft-869", {"learning_rate": 3e-2}, "prefixes", layouts=("zero2", "zero3", "pp2")),
    TrainerCase("peft-432", {"learning_rate": 3e-2}, "adalora", layouts=("zero2",)),
    TrainerCase("peft-1564", {"learning_rate": 3e-2}, "vera", layouts=("zero2", "zero3", "pp2")),
]
CONFIGS: dict[str, tuple[int, Any]] = {
    "zero2": (2, zero(2)),
    "zero3": (2, zero(3)),
    "pp2": (1, {"parallel": {"pp": 2}}),
    "tp2": (1, {"parallel": {"tp": 2}}),
}
"""Data-parallel ranks, and the configuration of two processes."""


def loop_runs():
    """Every case at each of its ZeRO stages. Most are marked proof."""
    rows = [(case, stage) for case in LOOP_CASES for stage in case.stages]
    return cover(
        rows,
        features=lambda case, stage: (stage == 3, bool(case.refused)),
        name=lambda case, stage: f"{case.report}-zero{stage}",
    )


def trainer_runs():
    """Every case on each of its layouts. Most are marked proof."""
    rows = [(case, layout) for case in TRAINER_CASES for layout in case.layouts]
    return cover(
        rows,
        features=lambda case, layout: (layout in ("zero3", "pp2"),),
        strength=1,
        name=lambda case, layout: f"{case.report}-{layout}",
    )


@pytest.mark.parametrize(("case", "stage"), loop_runs())
def test_report_of_accelerate(pool, case, stage):
    """Updates, samples and weights are those of Accelerate in one process."""
    arguments = (case.loop, case.loader, case.accumulation, case.epochs, case.arguments)
    actual = pool.run(2, libraries.on_plaits_accelerator, *arguments, zero(stage), timeout=90)
    if case.refused:
        assert all(isinstance(a, str) and case.refused in a for a in actual), actual
        return
    expected = libraries.on_accelerate(2, *arguments)
    assert isinstance(actual[0], dict), actual[0]
    assert actual[0]["updates"] == expected["updates"]
    assert actual[0]["seen"] == expected["seen"]
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(actual[0]["weights"][name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.proof
def test_report_accelerate_2316(pool):
    """Samples that do not fill a round are seen once."""
    arguments = ("plain", "odd", 2, 1, {}, zero(3))
    for actual in pool.run(2, libraries.on_plaits_accelerator, *arguments, timeout=90):
        assert actual["seen"] == list(range(21))


@pytest.mark.proof
def test_report_accelerate_3256(pool):
    """An optimizer whose model is not prepared is refused."""
    for message in pool.run(2, libraries.optimizer_prepared_alone, timeout=90):
        assert "prepare both in one call" in message


def test_report_accelerate_3797(pool):
    """A schedule that follows a metric counts each value once, whatever the number of ranks."""
    expected = libraries.rates_on_accelerate()
    assert min(expected) < max(expected)
    for actual in pool.run(2, libraries.rates_on_plait, timeout=90):
        assert actual == expected


def test_report_peft_432_zero3(pool, tmp_path):
    """The penalty on weights that are shards after the forward is refused."""
    pytest.importorskip("peft")
    arguments = (str(tmp_path), "adalora", {"deepspeed": zero(3)})
    for message in pool.run(2, libraries.message_of_plaits_trainer, *arguments, timeout=120):
        assert "type ADALORA" in message
        assert "use ZeRO stage 2" in message


def test_report_peft_869_where_ranks_have_parts():
    """Learned keys and values are refused if ranks have parts of the heads or of a sequence."""
    pytest.importorskip("peft")
    model = libraries.MODELS["prefixes"]()
    with pytest.raises(ModelError, match="parallel.tp: .* PREFIX_TUNING"):
        make_plan(model, tp=2, blocks=find_blocks(model))
    with pytest.raises(ModelError, match="parallel.cp: .* PREFIX_TUNING"):
        refuse_unknown_model(model, cp=2, kind="ring", tp=1, device_type="cpu")


def test_report_accelerate_4289(pool, tmp_path):
    """Loading leaves the loss scale and its counter as they were saved."""
    for expected, actual in pool.run(2, libraries.scale_after_loading, str(tmp_path), timeout=90):
        assert actual == expected
        assert len(set(expected)) > 1


@pytest.mark.parametrize(("case", "layout"), trainer_runs())
def test_report_of_the_trainer(pool, tmp_path, case, layout):
    """Losses, norms, rates, epochs, checkpoints and saved weights are those of Transformers."""
    if case.model not in ("llama", "without items"):
        pytest.importorskip("peft")
    dp, config = CONFIGS[layout]
    settings = {**case.settings, "deepspeed": config}
    steps = case.settings.get("gradient_accumulation_steps", 2)
    alone = {**case.settings, "gradient_accumulation_steps": steps * dp, **case.alone}
    arguments = (str(tmp_path), case.model, settings)
    actual = pool.run(2, libraries.on_plaits_trainer, *arguments, timeout=120)[0]
    expected = libraries.on_transformers(case.model, alone)
    assert actual["steps"] == expected["steps"]
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)  # logged in float32
    for key in ("grad_norm", "learning_rate"):
        assert actual[key] == pytest.approx(expected[key], rel=TOLERANCE), key
    assert actual["epoch"][-1] == pytest.approx(expected["epoch"][-1])
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=TOLERANCE)
    assert actual["checkpoints"] == expected["checkpoints"]
    assert sorted(actual["weights"]) == sorted(expected["weights"])
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], tensor, rtol=TOLERANCE, atol=TOLERANCE)
