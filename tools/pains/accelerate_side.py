"""The scenarios with Accelerate: FSDP2 as its documentation shows, and its ParallelismConfig for tensor parallelism."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tools.pains.tasks import PLAIN_RUN, Run, Task, Trained, optimizer_of, whole_weights


def _accelerator(task: Task, layout: str, *, efficient: bool = True) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import (
        FullyShardedDataParallelPlugin,
        InitProcessGroupKwargs,
        ParallelismConfig,
    )

    AcceleratorState._reset_state(reset_partial_state=False)
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
        del os.environ[name]
    settings: dict[str, Any] = {}
    if layout == "shard":
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=efficient,
            state_dict_type="SHARDED_STATE_DICT",
        )
    elif layout in ("tp", "ep", "cp"):
        settings["parallelism_config"] = ParallelismConfig(
            **{"cp_size" if layout == "cp" else "tp_size": 2}
        )
    waits = InitProcessGroupKwargs(timeout=timedelta(seconds=10))
    return Accelerator(
        cpu=True, gradient_accumulation_steps=task.accumulation, kwargs_handlers=[waits], **settings
    )


def begin(
    task: Task, *, layout: str, saved: Path | None, efficient: bool = True
) -> tuple[Any, Any, Any]:
    """(accelerator, model, optimizer)."""
    from transformers import AutoModelForCausalLM

    accelerator = _accelerator(task, layout, efficient=efficient)
    made = None
    if layout in ("tp", "ep"):
        from transformers.distributed import DistributedConfig

        split: dict[str, Any] = {
            "tp_plan": "auto",
            "device_mesh": accelerator.torch_device_mesh["tp"],
        }
        if layout == "ep":
            split = {"distributed_config": DistributedConfig(enable_expert_parallel=True)}
        made = lambda: AutoModelForCausalLM.from_pretrained(saved, **split)  # noqa: E731
    elif saved is not None:
        made = lambda: AutoModelForCausalLM.from_pretrained(saved)  # noqa: E731
    model = task.model(made)
    optimizer = optimizer_of(task, model.parameters())
    return accelerator, *accelerator.prepare(model, optimizer)


def train(task: Task, folder: Path, run: Run = PLAIN_RUN) -> Trained:
    """See `plait_side.train`."""
    shares = run.layout in ("tp", "cp", "ep")
    accelerator, model, optimizer = begin(
        task, layout=run.layout, saved=run.saved, efficient=not run.full
    )
    first = 0
    if run.resume:
        accelerator.load_state(str(folder))
        first = int((folder / "step").read_text())
    ranks, rank = (1, 0) if shares else (2, accelerator.process_index)
    losses, norms = [], []
    model.train()
    for index, step in enumerate(task.steps_of(rank, ranks)):
        if index < first or (run.stop is not None and index >= run.stop):
            continue
        total = torch.zeros(())
        for number, piece in enumerate(step):
            last = number == len(step) - 1
            loss = model(**piece).loss
            total = total + loss.detach() / len(step)
            if last or shares:
                (loss / len(step)).backward()
            else:
                with accelerator.no_sync(model):
                    (loss / len(step)).backward()
        norm = accelerator.clip_grad_norm_(model.parameters(), task.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total if shares else accelerator.reduce(total, "mean")))
        norms.append(float(norm))
    if run.stop is not None:
        accelerator.save_state(str(folder))
        (folder / "step").write_text(str(run.stop))
        accelerator.wait_for_everyone()
    if run.adapters:
        weights = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            folder, is_main_process=accelerator.is_main_process, state_dict=weights
        )
        accelerator.wait_for_everyone()
    return Trained(
        losses, norms, whole_weights(accelerator.unwrap_model(model), accelerator.process_index)
    )


def generate(
    task: Task, prompts: list[list[int]], counts: list[int]
) -> tuple[Trained, list[list[int]]]:
    """See `plait_side.generate`."""
    accelerator, model, optimizer = begin(task, layout="shard", saved=None)
    rank = accelerator.process_index
    losses = []
    for step in task.steps_of(rank):
        for piece in step:
            with accelerator.accumulate(model):
                loss = model(**piece).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), task.clip)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        ids = accelerator.unwrap_model(model).generate(
            torch.tensor([prompts[rank]]),
            max_new_tokens=counts[rank],
            min_new_tokens=counts[rank],
            do_sample=False,
        )
    accelerator.wait_for_everyone()
    weights = whole_weights(accelerator.unwrap_model(model), accelerator.process_index)
    return Trained(losses, [], weights), [ids[0, len(prompts[rank]) :].tolist()]


def load(task: Task, saved: Path) -> Any:
    """See `plait_side.load`."""
    return begin(task, layout="shard", saved=saved)


def hang(task: Task) -> None:
    """See `plait_side.hang`."""
    import time

    accelerator, model, optimizer = begin(task, layout="shard", saved=None)
    for index, step in enumerate(task.steps_of(accelerator.process_index)):
        if index == 2 and accelerator.process_index == 1:
            time.sleep(600)
        for piece in step:
            accelerator.backward(model(**piece).loss)
        optimizer.step()
        optimizer.zero_grad()


def first_logits(task: Task, saved: Path, *, full: bool) -> torch.Tensor:
    """See `plait_side.first_logits`."""
    _, model, _ = begin(task, layout="shard", saved=saved, efficient=not full)
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 9)[None]).logits
