"""The scenarios with DeepSpeed 0.19: ZeRO stage 3, and its tensor parallelism for training."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tools.pains.tasks import PLAIN_RUN, Run, Task, Trained, optimizer_of


def begin(
    task: Task, *, layout: str = "shard", saved: Path | None = None, full: bool = False
) -> Any:
    """The engine."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=10))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.micro,
        "gradient_accumulation_steps": task.accumulation * (2 if layout == "tp" else 1),
        "gradient_clipping": task.clip,
        "zero_optimization": {
            "stage": 3 if layout == "shard" else 1,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
    }
    if layout == "tp":
        config["tensor_parallel"] = {"autotp_size": 2}
    kept = (
        HfDeepSpeedConfig(config) if saved is not None and layout == "shard" and not full else None
    )  # builds under zero.Init
    made = None
    if saved is not None:
        made = lambda: AutoModelForCausalLM.from_pretrained(saved)  # noqa: E731
    if task.optimizer == "Muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": task.lr, "weight_decay": 0.0}}
    model = task.model(made)
    if layout == "tp":
        model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)
    if task.optimizer == "Muon":
        for name, parameter in model.named_parameters():
            parameter.use_muon = parameter.ndim == 2 and ".layers." in name
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=config,
        )
    else:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(task, model.parameters()), config=config
        )
    del kept
    return engine


def train(task: Task, folder: Path, run: Run = PLAIN_RUN) -> Trained:
    """See `plait_side.train`."""
    if run.layout in ("cp", "ep"):
        raise NotImplementedError("for models of Transformers: none on these devices")
    engine = begin(task, layout=run.layout, saved=run.saved, full=run.full)
    if run.resume:
        engine.load_checkpoint(str(folder))
    shares = run.layout == "tp"
    ranks, rank = (1, 0) if shares else (torch.distributed.get_world_size(), engine.global_rank)
    losses, norms = [], []
    engine.train()
    for index, step in enumerate(task.steps_of(rank, ranks)):
        if (run.resume and index < engine.global_steps) or (
            run.stop is not None and index >= run.stop
        ):
            continue
        total = torch.zeros(())
        for piece in step:
            loss = engine(**piece).loss
            engine.backward(loss)
            engine.step()
            total = total + loss.detach() / len(step)
        if not shares:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / (1 if shares else ranks))
        norms.append(float(engine.get_global_grad_norm()))
    if run.stop is not None:
        engine.save_checkpoint(str(folder))
    weights = _weights(engine)
    if run.adapters:
        whole = engine._zero3_consolidated_16bit_state_dict()
        if engine.global_rank == 0:
            engine.module.save_pretrained(folder, state_dict=whole)
        torch.distributed.barrier()
    return Trained(losses, norms, weights)


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    if not engine.zero_optimization_partition_weights():
        return {}
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found if engine.global_rank == 0 else {}


def generate(
    task: Task, prompts: list[list[int]], counts: list[int]
) -> tuple[Trained, list[list[int]]]:
    """See `plait_side.generate`."""
    engine = begin(task)
    rank = engine.global_rank
    for step in task.steps_of(rank):
        for piece in step:
            engine.backward(engine(**piece).loss)
            engine.step()
    engine.eval()
    with torch.no_grad():
        ids = engine.module.generate(
            torch.tensor([prompts[rank]]),
            max_new_tokens=counts[rank],
            min_new_tokens=counts[rank],
            do_sample=False,
        )
    torch.distributed.barrier()
    return Trained([], [], _weights(engine)), [ids[0, len(prompts[rank]) :].tolist()]


def load(task: Task, saved: Path) -> Any:
    """See `plait_side.load`."""
    return begin(task, saved=saved)


def hang(task: Task) -> None:
    """See `plait_side.hang`."""
    import time

    engine = begin(task)
    for index, step in enumerate(task.steps_of(engine.global_rank)):
        if index == 2 and engine.global_rank == 1:
            time.sleep(600)
        for piece in step:
            engine.backward(engine(**piece).loss)
            engine.step()


def first_logits(task: Task, saved: Path, *, full: bool) -> torch.Tensor:
    """See `plait_side.first_logits`."""
    engine = begin(task, saved=saved, full=full)
    engine.eval()
    with torch.no_grad():
        return engine(input_ids=torch.arange(1, 9)[None]).logits
