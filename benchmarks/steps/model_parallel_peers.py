"""Model parallelism in plain torch, written by hand for this one model.

Both engines use the fused AdamW and clip in one foreach pass. The norm and the loss cross ranks in
one all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.steps.baselines import Step
from benchmarks.steps.workload import Workload, build_model, optimizer_arguments


class LlamaStage(nn.Module):
    """Consecutive blocks of a Llama, with the embedding before its first and the head after its last."""

    def __init__(self, model: nn.Module, *, blocks: range, layers: int) -> None:
        super().__init__()
        inner: Any = model.get_submodule("model")
        self.embed_tokens = inner.embed_tokens if blocks.start == 0 else None
        self.layers = nn.ModuleList(inner.layers[index] for index in blocks)
        self.rotary_emb = inner.rotary_emb
        self.norm = inner.norm if blocks.stop == layers else None
        self.lm_head = model.get_submodule("lm_head") if blocks.stop == layers else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            hidden = self.embed_tokens(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embeddings = self.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=None, position_embeddings=embeddings, position_ids=positions
            )
        if self.norm is None or self.lm_head is None:
            return hidden
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [batch, seq, vocab] and labels [batch, seq] int64.

    Shifting the labels, and not the logits, avoids a copy of the logits.
    """
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def one_f_one_b(workload: Workload) -> Step:
    """Build torch's 1F1B schedule over two stages."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    blocks = (range(workload.first_stage), range(workload.first_stage, workload.layers))[rank]
    module = LlamaStage(build_model(workload), blocks=blocks, layers=workload.layers)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, workload.micro_batches, loss_fn=next_token_loss)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **optimizer_arguments(workload))

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        totals = torch.stack([norm**2, loss])
        dist.all_reduce(totals)
        norm = totals[0].sqrt()
        clip_grads_with_norm_(parameters, workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return totals[1].item(), norm.item()

    return step


TP_PLAN = {
    # Without these two, every column-split layer would all-reduce the gradient of its input.
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
    "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def two_dimensional(workload: Workload) -> Step:
    """Build tensor parallelism in pairs of ranks, and `fully_shard` (ZeRO 2) across the pairs."""
    dist.init_process_group("gloo")
    pairs = (workload.ranks // workload.ranks_per_slice, workload.ranks_per_slice)
    mesh = init_device_mesh("cpu", pairs, mesh_dim_names=("dp", "tp"))
    model = build_model(workload)
    blocks = list(model.get_submodule("model.layers").children())
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], ends)
    for block in blocks:
        parallelize_module(block, mesh["tp"], TP_PLAN)
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    # Norm weights are split over dp only. A foreach or fused operator takes tensors of one mesh.
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    parameter_groups = [{"params": members} for members in groups.values()]
    arguments = optimizer_arguments(workload)
    optimizer = torch.optim.AdamW(parameter_groups, fused=True, **arguments)

    def total_norm() -> Tensor:
        norms = []
        for members in groups.values():
            norm = get_total_norm([p.grad for p in members if p.grad is not None], foreach=True)
            assert isinstance(norm, DTensor)
            norms.append(norm.full_tensor())
        return torch.linalg.vector_norm(torch.stack(norms))

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        with loss_parallel():
            loss = next_token_loss(model(batch["input_ids"]).logits, batch["labels"])
            loss.backward()
        norm = total_norm()
        for members in groups.values():
            clip_grads_with_norm_(members, workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return value.item(), norm.item()

    return step
