"""Runs of TRL's trainers, native in one process and on Plait's layouts in workers. A test says how its trainer is made."""

import tempfile
import warnings
from functools import cache
from typing import Protocol

from tests.parity import trainers


class Made(Protocol):
    """Of a test."""

    def __call__(self, wrap, folder, *, lora, **settings):
        """A trainer, whose class went through `wrap`."""


def run(trainer, folder, logged):
    """Train, evaluate, save. `logged`: metrics of every step that are returned too."""
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(f"{folder}/model")
    found = trainers.result(trainer, evaluated, f"{folder}/model")
    found["metrics"] = {"eval_loss": evaluated["eval_loss"], "eval_samples": trainers.SAMPLES}
    found["evaluated"] = {
        name: value
        for name, value in evaluated.items()
        if name.startswith(("eval_rewards", "eval_logps"))
    }
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found |= {name: [row[name] for row in rows if name in row] for name in logged}
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        found["reference"] = sum(
            _part_of(parameter).numel() for parameter in reference.parameters()
        )
    return found


def _part_of(parameter):
    """What this rank has of it."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@cache
def native(made, logged, dp, *, lora):
    """In one process, with as many micro-batches in a step as `dp` ranks have."""
    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        return run(
            made(lambda kind: kind, folder, lora=lora, gradient_accumulation_steps=2 * dp),
            folder,
            logged,
        )


def on_plait(rank, world, made, logged, config, folder, lora):
    """On a layout. Runs in a worker."""
    with trainers.launched(rank, world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from plait.hf import wrap

        return run(made(wrap, folder, lora=lora, deepspeed=config), folder, logged)
