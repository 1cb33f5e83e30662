"""Runs of TRL's trainers, natively in one process and on Plait's layouts.

A test passes the function that creates its trainer.
"""

import tempfile
import warnings
from functools import cache
from typing import Protocol

from torch.distributed.tensor import DTensor

from tests.parity import trainers


class Made(Protocol):
    """Function of a test that creates its trainer."""

    def __call__(self, wrap, folder, *, lora, **settings):
        """Return a trainer, whose class `wrap` has changed."""


def run(trainer, folder, logged):
    """Train, evaluate and save. `logged` are further metrics of every step that are returned."""
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(f"{folder}/model")
    result = trainers.result(trainer, evaluated, f"{folder}/model")
    result["metrics"] = {"eval_loss": evaluated["eval_loss"], "eval_samples": trainers.SAMPLES}
    result["evaluated"] = {}
    for name, value in evaluated.items():
        if name.startswith(("eval_rewards", "eval_logps")):
            result["evaluated"][name] = value
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for name in logged:
        result[name] = [row[name] for row in rows if name in row]

    # The number of elements of the reference model that this rank holds.
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        result["reference"] = 0
        for parameter in reference.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            result["reference"] += local.numel()
    return result


@cache
def native(create, logged, dp, *, lora):
    """Run in one process on the batches of `dp` ranks."""
    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        trainer = create(lambda kind: kind, folder, lora=lora, gradient_accumulation_steps=2 * dp)
        return run(trainer, folder, logged)


def on_plait(rank, world, create, logged, config, folder, lora):
    """Run on a layout. Runs on every rank."""
    with trainers.launched(rank, world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from plait.hf import wrap

        return run(create(wrap, folder, lora=lora, deepspeed=config), folder, logged)
