"""Model parallelism in plain torch, written by hand for this one model.

Engines use the fused AdamW and clip in one foreach pass. The norm and the loss of a pipeline cross
ranks in one all-reduce. `step_counts` counts the same functions on a simulated GPU.
"""

from collections.abc import Callable, Iterable, Sequence
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
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.steps.baselines import Step
from benchmarks.steps.workload import Workload, build_model, optimizer_arguments


def adamw(groups: Sequence[list[nn.Parameter]], workload: Workload) -> torch.optim.Optimizer:
    parameters = [{"params": group} for group in groups]
    return torch.optim.AdamW(parameters, fused=True, **optimizer_arguments(workload))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of gradients of one kind, of which DTensors are summed over their mesh."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def update(
    optimizer: torch.optim.Optimizer, clip: float, groups: Sequence[list[nn.Parameter]]
) -> Tensor:
    """Clip the gradients, do a step, and return the norm before clipping.

    A foreach operator takes tensors of one mesh, so each mesh has its own group.
    """
    norms = [gradient_norm(group) for group in groups]
    norm = norms[0]
    if len(norms) > 1:
        norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        clip_grads_with_norm_(group, clip, norm, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return norm


class LlamaStage(nn.Module):
    """Consecutive blocks of a Llama. The first stage has the embedding, and the last the head."""

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


def pipeline_step(
    workload: Workload, device: torch.device
) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    """Build torch's 1F1B schedule over two stages. A step returns the loss and the norm."""
    rank = dist.get_rank()
    blocks = (range(workload.first_stage), range(workload.first_stage, workload.layers))[rank]
    module = LlamaStage(build_model(workload), blocks=blocks, layers=workload.layers).to(device)
    stage = PipelineStage(module, rank, 2, device)
    schedule = Schedule1F1B(stage, workload.micro_batches, loss_fn=next_token_loss)
    parameters = list(module.parameters())
    optimizer = adamw([parameters], workload)

    def step(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        square = gradient_norm(parameters) ** 2
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        totals = torch.stack([square, loss.detach()])
        dist.all_reduce(totals)
        norm = totals[0].sqrt()
        clip_grads_with_norm_(parameters, workload.clip, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return totals[1], norm

    return step


def one_f_one_b(workload: Workload) -> Step:
    dist.init_process_group("gloo")
    step_on_tensors = pipeline_step(workload, torch.device("cpu"))

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        loss, norm = step_on_tensors(batch)
        return loss.item(), norm.item()

    return step


def tensor_plan(layers: int, *, sequence: bool = False) -> dict[str, Any]:
    """Return the plan for a Llama of Transformers. Logits stay split over the vocabulary."""
    tokens = Shard(1) if sequence else Replicate()
    row = RowwiseParallel(output_layouts=tokens)
    block: dict[str, Any] = {
        # Without these two, every column-split layer would all-reduce the gradient of its input.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
        "self_attn.o_proj": row,
        "mlp.down_proj": row,
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        block[name] = ColwiseParallel()
    block |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "lm_head": ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        norms = ("input_layernorm", "post_attention_layernorm")
        block |= dict.fromkeys(norms, SequenceParallel(use_local_output=True))
        plan["model.norm"] = SequenceParallel(use_local_output=True)
    for layer in range(layers):
        plan |= {f"model.layers.{layer}.{name}": style for name, style in block.items()}
    return plan


def two_dimensional(workload: Workload) -> Step:
    """Build tensor parallelism in pairs of ranks, and `fully_shard` (ZeRO 2) across the pairs."""
    dist.init_process_group("gloo")
    pairs = (workload.ranks // workload.ranks_per_slice, workload.ranks_per_slice)
    mesh = init_device_mesh("cpu", pairs, mesh_dim_names=("dp", "tp"))
    model = build_model(workload)
    parallelize_module(model, mesh["tp"], tensor_plan(workload.layers))
    for module in (*model.get_submodule("model.layers").children(), model):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    # Norm weights are split over dp only.
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    by_mesh = list(groups.values())
    optimizer = adamw(by_mesh, workload)

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        with loss_parallel():
            loss = next_token_loss(model(batch["input_ids"]).logits, batch["labels"])
            loss.backward()
        norm = update(optimizer, workload.clip, by_mesh)
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        return loss.item(), norm.item()

    return step
