"""What is trained in the scenarios, and what plain PyTorch makes of it in one process: a step's loss is the mean over its targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

RANKS, LENGTH, VOCABULARY = 2, 12, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Trained:
    """What a run gives: numbers of every step, and weights in full in the first process."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """Micro-batch m has the samples from m x `micro` on; the i-th of rank r is micro-batch i x ranks + r."""

    shape: dict[str, Any] = field(default_factory=dict)
    kind: str = "llama"
    lora: bool = False
    ragged: bool = False
    documents: bool = False
    """A row has two documents, whose positions begin anew."""
    matrices_only: bool = False
    """Only the matrices of the blocks are trained."""
    optimizer: str = "SGD"
    """By default the one whose weights follow the gradients themselves."""
    lr: float = 0.3
    clip: float = 0.5
    micro: int = 2
    accumulation: int = 2
    steps: int = 4

    def with_(self, **fields: Any) -> Task:
        """Changed."""
        return replace(self, **fields)

    def model(self, made: Callable[[], nn.Module] | None = None) -> nn.Module:
        """The same weights every time; `made`: the base model, where it was loaded."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        base = (
            made()
            if made is not None
            else AutoModelForCausalLM.from_config(
                AutoConfig.for_model(self.kind, **{**SHAPE, **self.shape})
            )
        )
        if self.matrices_only:
            for name, parameter in base.named_parameters():
                parameter.requires_grad_(parameter.ndim == 2 and ".layers." in name)
        return adapted(base) if self.lora else base

    def samples(self) -> list[dict[str, torch.Tensor]]:
        """All that the steps read."""
        draw = torch.Generator().manual_seed(5)
        found = []
        for index in range(self.steps * self.accumulation * self.micro * RANKS):
            ids = torch.randint(
                1, self.shape.get("vocab_size", VOCABULARY), (LENGTH,), generator=draw
            )
            labels = ids.clone()
            if self.ragged:
                labels[: 1 + 3 * index % (LENGTH - 2)] = -100
            found.append({"input_ids": ids, "labels": labels})
            if self.documents:
                cut = 3 + index % 5
                found[-1]["position_ids"] = torch.cat(
                    [torch.arange(cut), torch.arange(LENGTH - cut)]
                )
                labels[cut] = -100
        return found

    def steps_of(self, rank: int, ranks: int = RANKS) -> list[list[dict[str, torch.Tensor]]]:
        """For every step the micro-batches of a rank."""
        samples = self.samples()
        pieces = [
            {
                name: torch.stack([row[name] for row in samples[at : at + self.micro]])
                for name in samples[0]
            }
            for at in range(0, len(samples), self.micro)
        ]
        mine, count = pieces[rank::ranks], self.accumulation * RANKS // ranks
        return [mine[at : at + count] for at in range(0, len(mine), count)]


def adapted(base: nn.Module) -> nn.Module:
    """With LoRA of PEFT, whose B is not zero, so that every gradient counts."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    torch.manual_seed(11)
    found = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name and not hasattr(parameter, "device_mesh"):
                parameter.normal_(std=0.05, generator=draw)
    return found


@dataclass(frozen=True)
class Run:
    """How a task is trained: all its steps, or a part of them."""

    layout: str = "shard"
    """"shard": weights, gradients and states are shared out; else the axis that has all ranks."""
    saved: Path | None = None
    """A folder of weights to begin with."""
    full: bool = False
    """Whether every process loads them whole."""
    stop: int | None = None
    """The steps before it, with a checkpoint at the end."""
    resume: bool = False
    """The steps behind that checkpoint."""
    adapters: bool = False
    """Adapters are saved at the end."""


PLAIN_RUN = Run()


def optimizer_of(task: Task, parameters: Any) -> torch.optim.Optimizer:
    """That of the scenario."""
    kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Muon": torch.optim.Muon}[
        task.optimizer
    ]
    settings = {"lr": task.lr} if task.optimizer == "SGD" else {"lr": task.lr, "weight_decay": 0.0}
    return kind([p for p in parameters if p.requires_grad], **settings)


def whole_weights(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Of a model whose parameters are tensors or DTensors; empty but on rank 0."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = whole.detach().clone()
    return {} if rank else found


def one_process(task: Task) -> Trained:
    """Plain PyTorch on all micro-batches of all ranks."""
    model = task.model().train()
    optimizer = optimizer_of(task, model.parameters())
    losses, norms = [], []
    for step in task.steps_of(0, 1):
        targets = sum(int((piece["labels"][:, 1:] != -100).sum()) for piece in step)
        total = 0.0
        for piece in step:
            given = {name: value for name, value in piece.items() if name != "labels"}
            logits = model(**given).logits[:, :-1].flatten(0, 1)
            loss = (
                nn.functional.cross_entropy(
                    logits, piece["labels"][:, 1:].flatten(), reduction="sum"
                )
                / targets
            )
            loss.backward()
            total += float(loss.detach())
        trained = [p for p in model.parameters() if p.requires_grad]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, task.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Trained(
        losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}
    )


def largest_error(found: Trained, wanted: Trained) -> float:
    """The largest relative difference of losses and norms, and of the weights relative to what the run changed."""
    pairs = [
        *zip(found.losses, wanted.losses, strict=True),
        *zip(found.norms, wanted.norms, strict=True),
    ]
    error = max((abs(one - other) / max(abs(other), 1e-12) for one, other in pairs), default=0.0)
    for name, tensor in wanted.weights.items():
        if name in found.weights:
            scale = float(tensor.abs().max()) or 1.0
            error = max(error, float((found.weights[name].float() - tensor).abs().max()) / scale)
    missing = wanted.weights.keys() - found.weights.keys()
    if found.weights and missing:
        raise AssertionError(f"weights without {sorted(missing)[:2]}, {len(missing)} in all")
    return error
