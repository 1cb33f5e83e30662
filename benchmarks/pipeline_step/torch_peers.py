"""Raw torch, written by hand for this one model: a pipeline of two stages, and two-dimensional parallelism.

Everyone uses the fused AdamW and one foreach pass for clipping. What has to cross ranks besides (the norm, and with it the loss) crosses
in one all-reduce.
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

from benchmarks.pipeline_step.workload import Workload
from benchmarks.training_step.baselines import Step
from benchmarks.training_step.workload import adamw_arguments, build_model


class LlamaStage(nn.Module):
    """Some consecutive blocks of a Llama, the embedding before the first of them, the norm and the head after the last."""

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
        return (
            hidden if self.norm is None or self.lm_head is None else self.lm_head(self.norm(hidden))
        )


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy; `logits` [batch, seq, vocab], `labels` [batch, seq] int64. Shifting the labels leaves the logits uncopied."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def one_f_one_b(workload: Workload) -> Step:
    """torch's 1F1B runtime over two stages."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    blocks = (range(workload.first_stage), range(workload.first_stage, workload.layers))[rank]
    module = LlamaStage(build_model(workload), blocks=blocks, layers=workload.layers)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, workload.micro_batches, loss_fn=next_token_loss)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, **adamw_arguments(workload))

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        square = (
            get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True) ** 2
        )
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        totals = torch.stack([square, loss])
        dist.all_reduce(totals)
        norm = totals[0].sqrt()
        if workload.clip > 0:
            clip_grads_with_norm_(parameters, workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return totals[1].item(), norm.item()

    return step


TP_PLAN = {
    # Without these two, every column-split layer would all-reduce the gradient of the input they share on its own.
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
    """Tensor parallelism inside pairs of ranks and `fully_shard` with parameters kept (ZeRO 2) across pairs; logits stay split."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (workload.slices, workload.ranks // workload.slices), mesh_dim_names=("dp", "tp")
    )
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
    # Split over both axes, and norms, which are split over dp only: torch takes the norm of one mesh at a time, and updates so too.
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": members} for members in groups.values()], **adamw_arguments(workload)
    )

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
        if workload.clip > 0:
            for members in groups.values():
                clip_grads_with_norm_(members, workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return value.item(), norm.item()

    return step
