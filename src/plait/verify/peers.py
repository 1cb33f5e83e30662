"""Traces of other engines on the same model, data and settings: DeepSpeed and accelerate's DDP.

These engines average means of micro-batches, so a micro-batch with few targets would weigh as much
as one with many. Each engine therefore gets a correctly weighted loss: the sum of the micro-batch
over the global weight, times the number of ranks and micro-batches that the engine divides by. The
comparison covers everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.cluster.accelerator import backend
from plait.cluster.topology import place
from plait.optim.gradient_norm import clip_factor
from plait.optim.optimizer import build_optimizer
from plait.parallel.micro_batches import to_device
from plait.verify.model_under_test import Built, give_weights
from plait.verify.parity import Trace, from_all_ranks, spread_over_ranks, whole
from plait.verify.plan import Pass, VerificationPlan

_SET_HERE = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
    }
    | {
        "fp16",
        "bf16",
        "amp",
        "steps_per_print",
        "wall_clock_breakdown",
        "flops_profiler",
        "comms_logger",
        "dump_state",
    }
    | {
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "monitor_config",
        "autotuning",
        "elasticity",
        "data_types",
    }
)
"""Keys of a DeepSpeed file that the comparison sets or does not need."""


def traces(plan: VerificationPlan) -> dict[Pass, Trace]:
    """Train every pass with the plan's engine, and return full traces on every rank. Collective."""
    try:
        return {name: _trace(plan, name) for name in plan.passes}
    finally:
        # Engines do not destroy the process group that they create. If gloo's threads still run at
        # the end of the interpreter, the process aborts.
        if dist.is_initialized():
            dist.destroy_process_group()


def _trace(plan: VerificationPlan, name: Pass) -> Trace:
    _, dtype = plan.settings(name)
    built = plan.build(dtype, rank=place().rank)
    give_weights(built.model, blocks=plan.tested.blocks, seed=plan.resolved.seed)
    with plan.lifting(name, built.model):
        return (_deepspeed if plan.engine == "deepspeed" else _accelerate)(plan, built)


class _RunningTrace:
    """Results of a training that is running."""

    def __init__(self, initial: Mapping[str, torch.Tensor]) -> None:
        self.initial = dict(initial)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, torch.Tensor | None]] = []

    def trace(self, final: Mapping[str, torch.Tensor]) -> Trace:
        return Trace(
            tuple(self.losses),
            tuple(self.norms),
            tuple(self.gradients),
            from_all_ranks(final),
            initial=self.initial,
            scales=(1.0,) * len(self.losses),
            spread=tuple(spread_over_ranks("parameter", final)),
        )


def _own_micro_batches(plan: VerificationPlan, step: Sequence[Any]) -> list[Any]:
    count = plan.resolved.batch.accumulation
    index = plan.resolved.layout.dp_index(place().rank)
    return list(step[index * count : (index + 1) * count])


def _weight(built: Built, step: Iterable[Any]) -> float:
    """Return the weight of the full step. Every rank knows it because it has all data."""
    return max(
        float(sum(built.loss.weight(micro_batch) for micro_batch in step)),
        torch.finfo(torch.float64).tiny,
    )


def _sum_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def _norm(gradients: Iterable[torch.Tensor | None]) -> float:
    return float(
        torch.nn.utils.get_total_norm([grad.double() for grad in gradients if grad is not None])
    )


def _clipped(
    gradients: Mapping[str, torch.Tensor | None], norm: float, largest: float
) -> dict[str, torch.Tensor | None]:
    """Return clipped gradients, for an engine that shows gradients before it clips."""
    factor = (
        float(clip_factor(torch.tensor(norm, dtype=torch.float64), largest)) if largest > 0 else 1.0
    )
    return {name: None if grad is None else grad * factor for name, grad in gradients.items()}


def deepspeed_config(plan: VerificationPlan) -> dict[str, Any]:
    """Return the DeepSpeed file of the comparison.

    It is the user's DeepSpeed file, or one of the same meaning, with the small batch, in float32
    and with a constant learning rate.
    """
    resolved = plan.resolved
    kept = {
        key: value
        for key, value in _without_auto(plan.deepspeed or {}).items()
        if key not in _SET_HERE
    }
    params = dict(resolved.optimizer.params)
    if resolved.optimizer.type in ("Adam", "AdamW") and plan.device == "cpu":
        # DeepSpeed's own optimizer would be compiled for minutes. With `torch_adam` the default
        # weight decay would be that of torch.
        params = {"weight_decay": 0.0, **params, "torch_adam": True}
    return {
        "zero_optimization": {"stage": resolved.data_parallel.stage},
        **kept,
        "train_micro_batch_size_per_gpu": resolved.batch.micro_batch_size,
        "gradient_accumulation_steps": resolved.batch.accumulation,
        "gradient_clipping": resolved.gradient_clipping,
        "optimizer": {"type": resolved.optimizer.type, "params": params},
        "steps_per_print": 1_000_000_000,
    }


def _without_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without values "auto", for which DeepSpeed has defaults."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value != "auto"
    }


def _deepspeed(plan: VerificationPlan, built: Built) -> Trace:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed(dist_backend=backend(torch.device(plan.device), host_tensors=False))
    parameters = [p for p in built.model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=built.model, model_parameters=parameters, config=deepspeed_config(plan)
    )
    running = _RunningTrace(_deepspeed_parameters(engine))
    count = plan.resolved.batch.accumulation
    for step in plan.data(built):
        weight = _weight(built, step)
        loss = 0.0
        gradients: dict[str, torch.Tensor | None] = {}
        micro_batches = _own_micro_batches(plan, step)
        for index, micro_batch in enumerate(to_device(tuple(micro_batches), engine.device)):
            total, _ = built.loss(built.forward(engine, micro_batch), micro_batch)
            loss += float(total.detach())
            engine.backward(total * (plan.resolved.layout.dp * count / weight))
            if index == count - 1:
                for name, parameter in engine.module.named_parameters():
                    grad = safe_get_full_grad(parameter) if parameter.requires_grad else None
                    gradients[name] = None if grad is None else whole(grad)
            engine.step()
        running.losses.append(_sum_over_ranks(loss, engine.device) / weight)
        norm = engine.get_global_grad_norm()  # None at stage 0 in float32
        running.norms.append(_norm(gradients.values()) if norm is None else float(norm))
        running.gradients.append(
            _clipped(gradients, running.norms[-1], plan.resolved.gradient_clipping)
        )
    return running.trace(_deepspeed_parameters(engine))


def _deepspeed_parameters(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    named = list(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters([parameter for _, parameter in named]):
        return {name: whole(parameter) for name, parameter in named}


def _accelerate(plan: VerificationPlan, built: Built) -> Trace:
    from accelerate import Accelerator

    count = plan.resolved.batch.accumulation
    clipping = plan.resolved.gradient_clipping
    accelerator = Accelerator(
        cpu=plan.device == "cpu", gradient_accumulation_steps=count, mixed_precision="no"
    )
    optimizer = build_optimizer(plan.resolved.optimizer, list(built.model.named_parameters()))
    model, optimizer = accelerator.prepare(built.model, optimizer)
    inner: nn.Module = accelerator.unwrap_model(model)
    running = _RunningTrace({name: whole(p) for name, p in inner.named_parameters()})
    for step in plan.data(built):
        weight = _weight(built, step)
        loss = 0.0
        norm = float("nan")
        for micro_batch in to_device(tuple(_own_micro_batches(plan, step)), accelerator.device):
            with accelerator.accumulate(model):
                total, _ = built.loss(built.forward(model, micro_batch), micro_batch)
                loss += float(total.detach())
                accelerator.backward(total * (plan.resolved.layout.dp * count / weight))
                if accelerator.sync_gradients:
                    norm = float(
                        accelerator.clip_grad_norm_(
                            model.parameters(), clipping if clipping > 0 else float("inf")
                        )
                    )
                    gradients = {
                        name: None if p.grad is None else whole(p.grad)
                        for name, p in inner.named_parameters()
                    }
                    running.gradients.append(gradients)
                optimizer.step()
                optimizer.zero_grad()
        running.losses.append(_sum_over_ranks(loss, accelerator.device) / weight)
        running.norms.append(norm)
    return running.trace({name: whole(p) for name, p in inner.named_parameters()})
