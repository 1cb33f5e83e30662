"""The scenarios with Plait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import plait
from plait.engine.engine import Engine
from plait.engine.weights import full_weights
from tools.pains.tasks import PLAIN_RUN, Run, Task, Trained, optimizer_of


def begin(
    task: Task,
    *,
    layout: str = "shard",
    folder: Path | None = None,
    full: bool = False,
    waits: int = 600,
) -> Engine:
    """`layout`: "shard" for ZeRO stage 3, else the axis of `parallel` that has all ranks. `folder`: the model is loaded from there, by
    Transformers where it is loaded in `full`."""
    from transformers import AutoModelForCausalLM

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.micro,
        "gradient_accumulation_steps": task.accumulation * (2 if layout in ("tp", "cp") else 1),
        "gradient_clipping": task.clip,
        "faults": {"timeout_seconds": waits},
        **({"zero_optimization": {"stage": 3}} if layout == "shard" else {"parallel": {layout: 2}}),
    }
    if task.optimizer == "Muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": task.lr}}
    optimizer = (
        None if task.optimizer == "Muon" else lambda parameters: optimizer_of(task, parameters)
    )
    made = None
    if folder is not None:

        def made():
            return (
                AutoModelForCausalLM.from_pretrained(folder)
                if full
                else plait.from_pretrained(folder)
            )

    return plait.initialize(
        task.model(made), config, loss_fn=plait.causal_lm_loss, optimizer=optimizer
    )


def train(task: Task, folder: Path, run: Run = PLAIN_RUN) -> Trained:
    """What a run gives; checkpoints and adapters are in `folder`."""
    engine = begin(task, layout=run.layout, folder=run.saved, full=run.full)
    if run.resume:
        assert engine.load_checkpoint(str(folder)) is not None
    ranks, rank = (1, 0) if run.layout in ("tp", "cp") else (2, engine.dp_rank)
    losses, norms = [], []
    for index, step in enumerate(task.steps_of(rank, ranks)):
        if (run.resume and index < engine.global_steps) or (
            run.stop is not None and index >= run.stop
        ):
            continue
        result = engine.train_batch(step)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    if run.stop is not None:
        engine.save_checkpoint(str(folder))
    weights = full_weights(engine)
    if run.adapters:
        written = full_weights(engine, adapters=("default",))
        if engine.rank == 0:
            engine.model.save_pretrained(folder, state_dict=written)  # type: ignore[operator]
    engine.close()
    return Trained(losses, norms, weights)


def generate(
    task: Task, prompts: list[list[int]], counts: list[int]
) -> tuple[Trained, list[list[int]]]:
    """(the training, what the trained model adds to each prompt of this rank); all prompts are of one rank each."""
    engine = begin(task)
    losses = [float(engine.train_batch(step).loss) for step in task.steps_of(engine.dp_rank)]
    rank = engine.dp_rank
    found = engine.generate([prompts[rank]], max_new_tokens=max(counts), do_sample=False)[
        0
    ].token_ids[: counts[rank]]
    return Trained(losses, [], full_weights(engine)), [list(map(int, found))]


def load(task: Task, saved: Path) -> Any:
    """The model of a folder, ready to train; what is measured is the memory that this takes."""
    return begin(task, folder=saved)


def hang(task: Task) -> None:
    """A rank that sleeps in its third step."""
    import time

    engine = begin(task, waits=10)
    for index, step in enumerate(task.steps_of(engine.dp_rank)):
        if index == 2 and engine.rank == 1:
            time.sleep(600)
        engine.train_batch(step)


def first_logits(task: Task, saved: Path, *, full: bool) -> torch.Tensor:
    """Of the model of a folder, before any step."""
    engine = begin(task, folder=saved, full=full)
    logits = engine.predict({"input_ids": torch.arange(1, 9)[None]}).logits
    engine.close()
    return logits
