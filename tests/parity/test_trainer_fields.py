"""Fields of TrainingArguments change a run as they do in Transformers' Trainer.

The fields are those that docs/how-to/trainer.md calls honoured.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.hf.fields import FIELDS
from tests.parity import trainers
from tests.parity.trainers import zero

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_strategy": "steps", "save_steps": 1}
BEST = {**EVALUATED, **SAVED, "load_best_model_at_end": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
        {**BEST, "greater_is_better": False},
        {"metric_for_best_model": "samples"},
    ),
    "greater_is_better": ({**BEST, "metric_for_best_model": "loss"}, {"greater_is_better": True}),
    "seed": ({}, {"seed": 7}),
    "data_seed": ({}, {"data_seed": 7}),
    "train_sampling_strategy": ({}, {"train_sampling_strategy": "sequential"}),
    "label_names": ({}, {"label_names": ["labels", "attention_mask"]}),
}
"""(settings of both runs, settings of the changed run) by field."""
WITHOUT_A_CHANGE = {"eval_accumulation_steps"}
"""Fields that say only when numbers are moved to the host."""


def metrics(prediction):
    """Return metrics that depend on everything that the user's function receives."""
    labels = prediction.label_ids
    if isinstance(labels, tuple):
        return {"samples": float(len(labels[0])), "label_names": float(len(labels))}
    values = trainers.metrics(prediction)
    for name in ("inputs", "losses"):
        array = getattr(prediction, name, None)
        if array is not None:
            values[name] = float(np.asarray(array).astype(np.float64).sum())
    return values


def is_time(key):
    return "runtime" in key or "per_second" in key


def outcome(trainer_class, arguments_class, folder, **settings):
    """Return everything that a run leaves behind, except for times."""
    trainer = trainer_class(
        model=trainers.model(),
        args=trainers.arguments(arguments_class, folder, **settings),
        train_dataset=trainers.samples(),
        eval_dataset=trainers.samples(),
        compute_metrics=metrics,
    )
    trainer.train()
    evaluated = trainer.evaluate()

    logged = []
    for row in trainer.state.log_history:
        logged.append((row["step"], sorted(key for key in row if not is_time(key))))
    has_optimizer = {}
    for checkpoint in Path(folder).glob("checkpoint-*"):
        if (checkpoint / "trainer_state.json").exists():
            files = set(os.listdir(checkpoint))
            has_optimizer[checkpoint.name] = not files.isdisjoint({"plait", "optimizer.pt"})
    history = trainers.history(trainer)
    del history["epoch"]
    return {
        **history,
        "logged": logged,
        "has_optimizer": has_optimizer,
        "metrics": {k: v for k, v in evaluated.items() if not is_time(k) and k != "epoch"},
        "best": Path(trainer.state.best_model_checkpoint or "").name,
        "tokens": int(trainer.state.num_input_tokens_seen),
    }


NATIVE: dict[str, dict[str, Any]] = {}
"""Outcomes of `native` by settings, which several tests use."""


def native(settings):
    """Run Transformers' Trainer in one process, with the micro-batches of two ranks."""
    from transformers import Trainer, TrainingArguments

    key = repr(sorted(settings.items()))
    if key not in NATIVE:
        accumulation = 2 * settings.get("gradient_accumulation_steps", 2)
        settings = settings | {"gradient_accumulation_steps": accumulation}
        with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
            NATIVE[key] = outcome(Trainer, TrainingArguments, folder, **settings)
    return NATIVE[key]


def on_plait(rank, world, config, folder, settings):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return outcome(Trainer, TrainingArguments, folder, deepspeed=config, **settings)


def differences(actual, expected):
    """Return the keys whose values differ, numbers by more than 1e-5."""
    keys = []
    for key, value in actual.items():
        try:
            is_equal = value == pytest.approx(expected[key], rel=1e-5)
        except TypeError:
            # pytest.approx refuses nested values.
            is_equal = value == expected[key]
        if not is_equal:
            keys.append(key)
    return keys


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
    expected = native({**both, **change})
    assert bool(differences(expected, native(both))) != (field in WITHOUT_A_CHANGE)
    for actual in pool.run(2, on_plait, zero(1), str(tmp_path), {**both, **change}):
        assert differences(actual, expected) == [], (actual, expected)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("dp", "config"),
    [(2, zero(0)), (2, zero(3)), (1, {"parallel": {"tp": 2}}), (1, {"parallel": {"pp": 2}})],
    ids=["dp2", "zero3", "tp2", "pp2"],
)
def test_label_smoothing_on_every_layout(pool, tmp_path, dp, config):
    """Transformers decides by the model's class, which sharding changes, to shift the labels."""
    change = CASES["label_smoothing_factor"][1]
    accumulation = {} if dp == 2 else {"gradient_accumulation_steps": 1}
    actual = pool.run(2, on_plait, config, str(tmp_path), change)[0]
    assert differences(actual, native(change | accumulation)) == []


def test_a_batch_that_does_not_fill_a_round_is_dropped(pool, tmp_path):
    """`dataloader_drop_last` leaves 5 rounds of two batches of 2 samples out of 21 samples."""
    change = {"dataloader_drop_last": True, "gradient_accumulation_steps": 1}
    actual = pool.run(2, on_plait, zero(1), str(tmp_path), change)[0]
    assert len(actual["loss"]) == 5 and actual["tokens"] == 20 * trainers.LENGTH
