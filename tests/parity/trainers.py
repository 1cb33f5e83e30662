"""Runs of the Hugging Face Trainer, native in one process and on Plait's layouts in workers, of one tiny model and one data set."""

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

VOCABULARY, SAMPLES, LENGTH = 64, 21, 12
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
    """Of different lengths, with padding and labels that are not counted."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for index in range(count):
        length = LENGTH - index % 5
        ids = torch.randint(1, VOCABULARY, (length,), generator=draw)
        labels = ids.clone()
        labels[: index % 4] = -100
        fill = LENGTH - length
        found.append(
            {
                "input_ids": torch.cat([ids, torch.zeros(fill, dtype=torch.int64)]),
                "attention_mask": torch.cat(
                    [torch.ones_like(ids), torch.zeros(fill, dtype=torch.int64)]
                ),
                "labels": torch.cat([labels, torch.full((fill,), -100)]),
            }
        )
    return found


def model(dtype=torch.float32, **fields):
    """A Llama, the same one every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **{**SHAPE, **fields}), dtype=dtype
    )


def experts(dtype=torch.float32):
    """A Qwen 3 with experts and Transformers' balance loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "output_router_logits": True,
    }
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_moe", **SHAPE, **fields), dtype=dtype
    )
    made.config.keys_to_ignore_at_inference = ["past_key_values", "router_logits", "aux_loss"]
    return made


def experts_alone(dtype=torch.float32):
    """Without the balance loss, which needs the routers of all stages."""
    made = experts(dtype)
    made.config.output_router_logits = False
    return made


def metrics(prediction):
    """How many samples there are, and numbers that follow from each of them and from their order."""
    labels, logits = prediction.label_ids, prediction.predictions
    kept = labels != -100
    weights = 1.0 + np.arange(len(labels))[:, None]
    right = (logits.argmax(-1)[:, :-1] == labels[:, 1:]) & kept[:, 1:]
    return {
        "samples": float(len(labels)),
        "right": float(right.mean()),
        "order": float((weights * labels * kept).sum()),
    }


@contextmanager
def launched(rank, world):
    """The variables of a launcher, which Accelerate looks for."""
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
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def arguments(kind, folder, **settings):
    """Of a short run that logs everything."""
    fixed: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 5,  # five batches, of which the last round has one
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
    """What was logged in every step."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        key: [float(row[key]) for row in rows]
        for key in ("loss", "grad_norm", "learning_rate", "epoch")
    }


def result(trainer, evaluated, folder):
    """Plain numbers of a run, and the saved weights."""
    from safetensors.torch import load_file

    saved = {
        name: tensor
        for path in sorted(Path(folder).glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    kept = {
        key: value
        for key, value in evaluated.items()
        if key in ("eval_loss", "eval_samples", "eval_right", "eval_order")
    }
    tokens = trainer.state.num_input_tokens_seen
    return {
        **history(trainer),
        "tokens": tokens,
        "metrics": kept,
        "weights": saved,
        "steps": trainer.state.global_step,
    }


def run(trainer_kind, arguments_kind, folder, *, dtype=torch.float32, made=model, **settings):
    """Train, evaluate, save. `made(dtype)`: the model."""
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
    """One process with Transformers' Trainer, which has as many micro-batches in a step as `dp` ranks have."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder, launched_alone():
        steps = (
            2 * dp
            if "gradient_accumulation_steps" not in settings
            else settings.pop("gradient_accumulation_steps")
        )
        return run(
            Trainer,
            TrainingArguments,
            folder,
            dtype=dtype,
            gradient_accumulation_steps=steps,
            **settings,
        )


@contextmanager
def launched_alone():
    """As one process without a launcher."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def on_plait(rank, world, config, folder, settings):
    """The same on a layout. Runs in a worker."""
    with launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return run(Trainer, TrainingArguments, folder, deepspeed=config, **settings)


def trainer_of(folder, config, given=None, *, kind=None, **settings):
    """Plait's Trainer, or its subclass `kind`, of a short run. `given`: of its arguments, in place of the tiny model and the samples."""
    from plait.hf import Trainer, TrainingArguments

    args = arguments(TrainingArguments, folder, deepspeed=config, **settings)
    both = {"model": model(), "args": args, "train_dataset": samples(), **(given or {})}
    return (kind or Trainer)(**both)


def zero(stage):
    """A file with a ZeRO stage."""
    return {"zero_optimization": {"stage": stage}}


def close(found, wanted, *, rtol=1e-5):
    """Losses, norms, rates, metrics and saved weights."""
    for key in ("loss", "grad_norm", "learning_rate"):
        assert found[key] == pytest.approx(wanted[key], rel=rtol), key
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=rtol)
    assert found["metrics"]["eval_samples"] == SAMPLES and found["tokens"] == wanted["tokens"]
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        assert found["weights"][name].dtype == tensor.dtype
        torch.testing.assert_close(
            found["weights"][name],
            tensor,
            rtol=rtol,
            atol=rtol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
