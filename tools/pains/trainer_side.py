"""The scenarios with the Trainer of Transformers, and its own FSDP and tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.pains.tasks import PLAIN_RUN, RANKS, Run, Task, Trained, optimizer_of, whole_weights


def made(
    task: Task,
    folder: Path,
    *,
    layout: str,
    saved: Path | None,
    full: bool = False,
    **settings: Any,
) -> Any:
    """The Trainer."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    if layout == "shard":
        settings["fsdp"] = "full_shard"
        settings["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": not full,
        }
    elif layout in ("tp", "ep", "cp"):
        from accelerate import ParallelismConfig

        settings["parallelism_config"] = ParallelismConfig(
            **{"cp_size" if layout == "cp" else "tp_size": 2}
        )
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=task.micro,
        gradient_accumulation_steps=task.accumulation * (2 if layout in ("tp", "cp", "ep") else 1),
        max_steps=task.steps,
        max_grad_norm=task.clip,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        use_cpu=True,
        ddp_timeout=10,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **settings},
    )
    base = None
    if layout in ("tp", "ep"):
        from transformers.distributed import DistributedConfig

        split = (
            {"distributed_config": DistributedConfig(enable_expert_parallel=True)}
            if layout == "ep"
            else {"tp_plan": "auto"}
        )
        base = lambda: AutoModelForCausalLM.from_pretrained(saved, **split)  # noqa: E731
    elif saved is not None:
        base = lambda: AutoModelForCausalLM.from_pretrained(saved)  # noqa: E731
    model = task.model(base)
    kept: dict[str, Any] = {"model": model, "args": args, "train_dataset": task.samples()}
    return Trainer(**kept, optimizer_cls_and_kwargs=_optimizer(task))


def _optimizer(task: Task) -> Any:
    kind = type(optimizer_of(task, [torch.nn.Parameter(torch.zeros(2, 2))]))
    return kind, {"lr": task.lr} if task.optimizer == "SGD" else {
        "lr": task.lr,
        "weight_decay": 0.0,
    }


def train(task: Task, folder: Path, run: Run = PLAIN_RUN) -> Trained:
    """See `plait_side.train`."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= run.stop is not None and state.global_step >= run.stop

    saves = {"save_strategy": "steps", "save_steps": run.stop} if run.stop is not None else {}
    trainer = made(task, folder, layout=run.layout, saved=run.saved, full=run.full, **saves)
    trainer.add_callback(Stop())
    checkpoints = sorted(folder.glob("checkpoint-*")) if run.resume else []
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if run.resume else None)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    if run.resume:  # those before are in the checkpoint's own log
        rows = [row for row in rows if row["step"] > int(checkpoints[-1].name.rpartition("-")[2])]
    if run.adapters:
        trainer.save_model(str(folder))
        trainer.accelerator.wait_for_everyone()
    weights = (
        {}
        if run.layout == "ep"
        else whole_weights(
            trainer.accelerator.unwrap_model(trainer.model_wrapped), trainer.args.process_index
        )
    )
    return Trained(
        [row["loss"] for row in rows], [float(row["grad_norm"]) for row in rows], weights
    )


def generate(
    task: Task, prompts: list[list[int]], counts: list[int]
) -> tuple[Trained, list[list[int]]]:
    """See `plait_side.generate`."""
    trainer = made(task, Path("generate"), layout="shard", saved=None)
    trainer.train()
    rank = trainer.args.process_index % RANKS
    trainer.model_wrapped.eval()
    with torch.no_grad():
        ids = trainer.accelerator.unwrap_model(trainer.model_wrapped).generate(
            torch.tensor([prompts[rank]]),
            max_new_tokens=counts[rank],
            min_new_tokens=counts[rank],
            do_sample=False,
        )
    trainer.accelerator.wait_for_everyone()
    return Trained(
        [],
        [],
        whole_weights(
            trainer.accelerator.unwrap_model(trainer.model_wrapped), trainer.args.process_index
        ),
    ), [ids[0, len(prompts[rank]) :].tolist()]


def load(task: Task, saved: Path) -> Any:
    """See `plait_side.load`."""
    trainer = made(task.with_(steps=1), Path("load"), layout="shard", saved=saved)
    model = trainer.model
    trainer.create_optimizer()
    return trainer.accelerator.prepare(model, trainer.optimizer)


def hang(task: Task) -> None:
    """See `plait_side.hang`."""
    import time

    from transformers import TrainerCallback

    class Sleep(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and args.process_index == 1:
                time.sleep(600)

    trainer = made(task, Path("hang"), layout="shard", saved=None)
    trainer.add_callback(Sleep())
    trainer.train()


def first_logits(task: Task, saved: Path, *, full: bool) -> torch.Tensor:
    """See `plait_side.first_logits`."""
    trainer = made(task, Path("first"), layout="shard", saved=saved, full=full)
    trainer.create_optimizer()
    model, _ = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 9)[None]).logits
