"""Fields of TrainingArguments that docs/how-to/trainer.md calls honoured: each changes a run, and as it does in Transformers' Trainer."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.hf.fields import FIELDS
from tests.parity import trainers
from tests.parity.trainers import zero

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_strategy": "steps", "save_steps": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # field: (settings of both runs, the settings that make the difference)
    "per_device_train_batch_size": ({}, {"per_device_train_batch_size": 1}),
    "num_train_epochs": ({}, {"num_train_epochs": 2}),
    "max_steps": ({}, {"max_steps": 2}),
    "learning_rate": ({}, {"learning_rate": 3e-3}),
    "lr_scheduler_type": ({}, {"lr_scheduler_type": "constant_with_warmup"}),
    "lr_scheduler_kwargs": (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
        {"lr_scheduler_kwargs": {"min_lr": 5e-3}},
    ),
    "warmup_steps": ({}, {"warmup_steps": 2}),
    "optim": ({}, {"optim": "sgd"}),
    "weight_decay": ({}, {"weight_decay": 0.9}),
    "adam_beta1": ({"num_train_epochs": 2}, {"adam_beta1": 0.5}),
    "adam_beta2": ({"num_train_epochs": 2}, {"adam_beta2": 0.5}),
    "adam_epsilon": ({}, {"adam_epsilon": 1e-2}),
    "gradient_accumulation_steps": ({}, {"gradient_accumulation_steps": 3}),
    "max_grad_norm": ({"optim": "sgd"}, {"max_grad_norm": 0.05}),
    "label_smoothing_factor": ({}, {"label_smoothing_factor": 0.2}),
    "logging_strategy": ({}, {"logging_strategy": "epoch"}),
    "logging_steps": ({}, {"logging_steps": 2}),
    "logging_first_step": ({"logging_steps": 3}, {"logging_first_step": True}),
    "include_num_input_tokens_seen": ({}, {"include_num_input_tokens_seen": "non_padding"}),
    "eval_strategy": ({}, {"eval_strategy": "epoch"}),
    "eval_steps": (EVALUATED, {"eval_steps": 2}),
    "eval_delay": (EVALUATED, {"eval_delay": 2}),
    "eval_on_start": (EVALUATED, {"eval_on_start": True}),
    "prediction_loss_only": ({}, {"prediction_loss_only": True}),
    "include_for_metrics": ({}, {"include_for_metrics": ["inputs", "loss"]}),
    "eval_accumulation_steps": ({}, {"eval_accumulation_steps": 1}),
    "save_strategy": ({}, {"save_strategy": "epoch"}),
    "save_steps": (SAVED, {"save_steps": 2}),
    "save_only_model": (SAVED, {"save_only_model": True}),
    "save_total_limit": (SAVED, {"save_total_limit": 1}),
    "load_best_model_at_end": (
        {**EVALUATED, **SAVED, "metric_for_best_model": "loss", "greater_is_better": True},
        {"load_best_model_at_end": True},
    ),
    "metric_for_best_model": (
        {**EVALUATED, **SAVED, "load_best_model_at_end": True, "greater_is_better": False},
        {"metric_for_best_model": "samples"},
    ),
    "greater_is_better": (
        {**EVALUATED, **SAVED, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
        {"greater_is_better": True},
    ),
    "seed": ({}, {"seed": 7}),
    "data_seed": ({}, {"data_seed": 7}),
    "train_sampling_strategy": ({}, {"train_sampling_strategy": "sequential"}),
    "label_names": ({}, {"label_names": ["labels", "attention_mask"]}),
}
WITHOUT_A_CHANGE = {"eval_accumulation_steps"}
"""It says when numbers are moved to the host, and nothing of them."""


def metrics(prediction):
    """What the function of the user's is given."""
    labels = prediction.label_ids
    given = {name: getattr(prediction, name, None) for name in ("inputs", "losses")}
    if isinstance(labels, tuple):
        return {"samples": float(len(labels[0])), "label_names": float(len(labels))}
    found = trainers.metrics(prediction)
    return found | {
        name: float(np.asarray(value).astype(np.float64).sum())
        for name, value in given.items()
        if value is not None
    }


def outcome(trainer_kind, arguments_kind, folder, **settings):
    """All that a run of three steps leaves behind, but for its times."""
    trainer = trainer_kind(
        model=trainers.model(),
        args=trainers.arguments(arguments_kind, folder, **settings),
        train_dataset=trainers.samples(),
        eval_dataset=trainers.samples(),
        compute_metrics=metrics,
    )
    trainer.train()
    after = trainer.evaluate()
    rows = [
        (
            row["step"],
            sorted(key for key in row if "runtime" not in key and "per_second" not in key),
        )
        for row in trainer.state.log_history
    ]
    saved = {
        path.parent.name: path for path in Path(folder).glob("checkpoint-*/trainer_state.json")
    }
    optimizers = {
        name: (path.parent / "plait").exists() or (path.parent / "optimizer.pt").exists()
        for name, path in saved.items()
    }
    numbers = {
        key: value
        for key, value in after.items()
        if "runtime" not in key and "per_second" not in key and key != "epoch"
    }
    logged = {key: trainers.history(trainer)[key] for key in ("loss", "grad_norm", "learning_rate")}
    best = Path(trainer.state.best_model_checkpoint or "").name
    tokens = int(trainer.state.num_input_tokens_seen)
    return {
        "rows": rows,
        "saved": optimizers,
        "evaluated": numbers,
        **logged,
        "best": best,
        "tokens": tokens,
    }


@cache
def _alone(items):
    from transformers import Trainer, TrainingArguments

    settings = {name: eval(text) for name, text in items}  # of this file's own
    steps = 2 * settings.pop("gradient_accumulation_steps", 2)
    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        return outcome(
            Trainer, TrainingArguments, folder, gradient_accumulation_steps=steps, **settings
        )


def alone(settings):
    """One process with Transformers' Trainer."""
    return _alone(tuple(sorted((name, repr(value)) for name, value in settings.items())))


def on_plait(rank, world, config, folder, settings):
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return outcome(Trainer, TrainingArguments, folder, deepspeed=config, **settings)


def differs(one, other):
    """What is not the same in both, numbers to 1e-5."""
    return [key for key in one if not _same(one[key], other[key])]


def _same(one, other):
    try:
        return bool(one == pytest.approx(other, rel=1e-5))
    except TypeError:
        return bool(one == other)


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(name, marks=() if name == "label_smoothing_factor" else pytest.mark.proof)
        for name in CASES
    ],
)
def test_a_field_changes_what_it_changes_in_transformers(pool, tmp_path, field):
    both, change = CASES[field]
    assert FIELDS[field].effect != "noted"
    wanted, without = alone({**both, **change}), alone(both)
    assert bool(differs(wanted, without)) != (field in WITHOUT_A_CHANGE)
    found = pool.run(2, on_plait, zero(1), str(tmp_path), {**both, **change})
    for rank in found:
        assert differs(rank, wanted) == [], (rank, wanted)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("dp", "config"),
    [(2, zero(0)), (2, zero(3)), (1, {"parallel": {"tp": 2}}), (1, {"parallel": {"pp": 2}})],
    ids=["dp2", "zero3", "tp2", "pp2"],
)
@pytest.mark.parametrize("field", ["label_smoothing_factor"])
def test_on_every_layout(pool, tmp_path, field, dp, config):
    """Transformers tells by the class of a model, which sharding changes, that a label is the next token."""
    change = CASES[field][1]
    wanted = alone(change) if dp == 2 else alone({**change, "gradient_accumulation_steps": 1})
    assert differs(pool.run(2, on_plait, config, str(tmp_path), change)[0], wanted) == []


def test_a_batch_that_does_not_fill_a_round_is_dropped(pool, tmp_path):
    """`dataloader_drop_last` with batches of 2 on two ranks: 21 samples are 5 rounds of 4."""
    change = {"dataloader_drop_last": True, "gradient_accumulation_steps": 1}
    found = pool.run(2, on_plait, zero(1), str(tmp_path), change)[0]
    assert len(found["loss"]) == 5 and found["tokens"] == 20 * trainers.LENGTH
