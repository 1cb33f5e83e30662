"""Runs of the Hugging Face Trainer with one tiny model and one data set.

The reference runs Transformers' own Trainer in one process.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

VOCABULARY = 64
SAMPLES = 21
LENGTH = 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def samples(count=SAMPLES):
    """Return samples of different lengths, with padding and labels that are not counted."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for index in range(count):
        length = LENGTH - index % 5
        padding = (0, LENGTH - length)
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: index % 4] = -100
        result.append(
            {
                "input_ids": pad(ids, padding),
                "attention_mask": pad(torch.ones_like(ids), padding),
                "labels": pad(labels, padding, value=-100),
            }
        )
    return result


def model(dtype=torch.float32, **fields):
    """Return a Llama, with the same weights every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **{**SHAPE, **fields})
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def experts(dtype=torch.float32):
    """Return a Qwen 3 with experts and Transformers' balance loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=8,
        output_router_logits=True,
    )
    config.keys_to_ignore_at_inference = ["past_key_values", "router_logits", "aux_loss"]
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def experts_alone(dtype=torch.float32):
    """Return the model with experts, without the loss that needs the routers of all stages."""
    model = experts(dtype)
    model.config.output_router_logits = False
    return model


def metrics(prediction):
    """Return the number of samples, and numbers that depend on each of them and on their order."""
    labels = prediction.label_ids
    counted = labels != -100
    weights = 1.0 + np.arange(len(labels))[:, None]
    predicted = prediction.predictions.argmax(-1)
    right = (predicted[:, :-1] == labels[:, 1:]) & counted[:, 1:]
    return {
        "samples": float(len(labels)),
        "right": float(right.mean()),
        "order": float((weights * labels * counted).sum()),
    }


@contextmanager
def launched(rank, world):
    """Set the variables of a launcher, which Accelerate looks for."""
    before = dict(os.environ)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    try:
        with launched_alone():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def launched_alone():
    """Run as one process without a launcher, and forget Accelerate's state before and after."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()


def arguments(kind, folder, **settings):
    """Return the arguments of a short run that logs everything."""
    fixed: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        # Five batches, so that the last round has a batch for one rank only.
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "all",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "log_level": "error",
        "log_level_replica": "error",
    }
    return kind(**{**fixed, **settings})


def history(trainer):
    """Return what was logged in every step, by quantity."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    return {key: [float(row[key]) for row in rows] for key in keys}


def result(trainer, evaluated, folder):
    """Return the numbers of a run and the weights that it saved."""
    from safetensors.torch import load_file

    weights = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(path)
    names = ("eval_loss", "eval_samples", "eval_right", "eval_order")
    return {
        **history(trainer),
        "tokens": trainer.state.num_input_tokens_seen,
        "metrics": {name: evaluated[name] for name in names if name in evaluated},
        "weights": weights,
        "steps": trainer.state.global_step,
    }


def run(trainer_kind, arguments_kind, folder, *, dtype=torch.float32, made=model, **settings):
    """Train, evaluate, and save the model that `made(dtype)` returns."""
    trainer = trainer_kind(
        model=made(dtype),
        args=arguments(arguments_kind, folder, **settings),
        train_dataset=samples(),
        eval_dataset=samples(),
        compute_metrics=metrics,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(f"{folder}/model")
    return result(trainer, evaluated, f"{folder}/model")


@cache
def native(dp=1, dtype=torch.float32, **settings):
    """Run Transformers' Trainer in one process on the batches of `dp` ranks."""
    from transformers import Trainer, TrainingArguments

    settings = {"gradient_accumulation_steps": 2 * dp, **settings}
    with tempfile.TemporaryDirectory() as folder, launched_alone():
        return run(Trainer, TrainingArguments, folder, dtype=dtype, **settings)


def on_plait(rank, world, config, folder, settings):
    """Run Plait's Trainer on a layout. Runs on every rank."""
    with launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return run(Trainer, TrainingArguments, folder, deepspeed=config, **settings)


def trainer_of(folder, config, given=None, *, kind=None, **settings):
    """Return Plait's Trainer, or its subclass `kind`, for a short run.

    `given` are arguments in place of the tiny model and the samples.
    """
    from plait.hf import Trainer, TrainingArguments

    args = arguments(TrainingArguments, folder, deepspeed=config, **settings)
    fields = {"model": model(), "args": args, "train_dataset": samples(), **(given or {})}
    return (kind or Trainer)(**fields)


def zero(stage):
    """Return a configuration with a ZeRO stage."""
    return {"zero_optimization": {"stage": stage}}


def close(actual, expected, *, rtol=1e-5):
    """Compare losses, norms, learning rates, metrics and saved weights."""
    for key in ("loss", "grad_norm", "learning_rate"):
        assert actual[key] == pytest.approx(expected[key], rel=rtol), key
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=rtol)
    assert actual["metrics"]["eval_samples"] == SAMPLES
    assert actual["tokens"] == expected["tokens"]
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        assert actual["weights"][name].dtype == tensor.dtype
        torch.testing.assert_close(
            actual["weights"][name],
            tensor,
            rtol=rtol,
            atol=rtol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
