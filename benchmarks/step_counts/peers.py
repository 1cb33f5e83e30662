"""The layouts in plain torch: fused AdamW, foreach clipping, and no wait in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.step_counts.layouts import Layout
from benchmarks.steps.model_parallel_peers import TP_PLAN, LlamaStage, next_token_loss
from benchmarks.steps.workload import build_model, optimizer_arguments
from plait._torch.units import parameter_groups

Step = Callable[[dict[str, Tensor]], object]
"""One optimizer step on the samples of a rank. Tensors that it returns are not read."""


@dataclass(frozen=True)
class Sharding:
    """Sharding units and precision of Plait, which plain torch uses too."""

    units: dict[str, bool]
    """Names of the modules that are units, children first, and whether they free their parameters
    after a forward."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def replicated(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    """Build DistributedDataParallel."""
    model = DistributedDataParallel(
        build_model(layout.workload).to(device),
        device_ids=[device.index],
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    return _data_parallel_step(model, layout, device)


def sharded(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    """Build `fully_shard` over one or two mesh dimensions."""
    model = build_model(layout.workload).to(device)
    if "dp_replicate" in layout.parallel:
        mesh = init_device_mesh(
            "cuda", (2, layout.ranks // 2), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh("cuda", (layout.ranks,))
    policy = MixedPrecisionPolicy(
        param_dtype=sharding.param_dtype, reduce_dtype=sharding.reduce_dtype
    )
    for name, frees in sharding.units.items():
        fully_shard(
            model.get_submodule(name), mesh=mesh, reshard_after_forward=frees, mp_policy=policy
        )
    return _data_parallel_step(model, layout, device)


def _data_parallel_step(model: nn.Module, layout: Layout, device: torch.device) -> Step:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **optimizer_arguments(layout.workload))

    def step(batch: dict[str, Tensor]) -> object:
        losses = []
        size = layout.workload.micro_batch
        for index in range(layout.accumulation):
            part = {name: rows.narrow(0, index * size, size) for name, rows in batch.items()}
            inputs = _on_device(part, device)
            loss = model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss
            if layout.accumulation > 1:
                loss = loss / layout.accumulation
            loss.backward()
            losses.append(loss.detach())

        norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        clip_grads_with_norm_(parameters, layout.workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        # The loss that is logged is that of all ranks.
        total = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        dist.all_reduce(total)
        return total / dist.get_world_size(), norm

    return step


def _plan(layers: int, *, sequence: bool) -> dict[str, Any]:
    """Return the plan for a Llama of Transformers. Logits stay split over the vocabulary."""
    tokens = Shard(1) if sequence else Replicate()
    row = RowwiseParallel(output_layouts=tokens)
    block: dict[str, Any] = {
        **TP_PLAN,
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
        "self_attn.o_proj": row,
        "mlp.down_proj": row,
    }
    if sequence:
        norms = ("input_layernorm", "post_attention_layernorm")
        block |= dict.fromkeys(norms, SequenceParallel(use_local_output=True))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "lm_head": ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=True)
    for layer in range(layers):
        plan |= {f"model.layers.{layer}.{name}": style for name, style in block.items()}
    return plan


def tensor_parallel(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    """Build DTensor tensor parallelism with `parallelize_module`."""
    model = build_model(layout.workload).to(device)
    mesh = init_device_mesh("cuda", (layout.ranks,))
    sequence = bool(layout.parallel.get("sequence_parallel"))
    parallelize_module(model, mesh, _plan(model.config.num_hidden_layers, sequence=sequence))
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    # A foreach or fused operator takes DTensors or plain tensors, and not both.
    groups = [group for group in (split, plain) if group]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups], fused=True, **optimizer_arguments(layout.workload)
    )

    def total_norm() -> Tensor:
        norms = []
        for group in groups:
            norm = get_total_norm([p.grad for p in group if p.grad is not None], foreach=True)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]

    def step(batch: dict[str, Tensor]) -> object:
        inputs = _on_device(batch, device)
        # Transformers would count positions in the local part of the sequence.
        positions = torch.arange(inputs["input_ids"].shape[1], device=device)[None]
        with loss_parallel():
            logits = model(input_ids=inputs["input_ids"], position_ids=positions).logits
            loss = next_token_loss(logits, inputs["labels"])
            loss.backward()
        norm = total_norm()
        for group in groups:
            clip_grads_with_norm_(group, layout.workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def pipeline(layout: Layout, sharding: Sharding, device: torch.device) -> Step:
    """Build torch's 1F1B schedule over two stages."""
    rank = dist.get_rank()
    layers = layout.workload.layers
    first = layout.workload.first_stage
    blocks = (range(first), range(first, layers))[rank]
    module = LlamaStage(build_model(layout.workload), blocks=blocks, layers=layers).to(device)
    stage = PipelineStage(module, rank, 2, device)
    schedule = Schedule1F1B(stage, layout.accumulation, loss_fn=next_token_loss)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **optimizer_arguments(layout.workload))

    def step(batch: dict[str, Tensor]) -> object:
        inputs = _on_device(batch, device)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs["input_ids"], return_outputs=False)
        else:
            schedule.step(target=inputs["labels"], losses=losses, return_outputs=False)
        square = (
            get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True) ** 2
        )
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        # The norm and the logged loss are those of all stages.
        totals = torch.stack([square, loss.detach()])
        dist.all_reduce(totals)
        norm = totals[0].sqrt()
        clip_grads_with_norm_(parameters, layout.workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return totals[1], norm

    return step


def _on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {
        name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()
    }


def units_of(model: nn.Module) -> dict[str, bool]:
    """Return the names of the sharding units, children first, and whether each frees parameters."""
    found = [
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    return {
        name: any(group.post_forward_mesh_info for group in parameter_groups(module))
        for name, module in reversed(found)
    }
