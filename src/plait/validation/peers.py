"""Trainers that `throughput` compares: Plait, and the same training step in torch or DeepSpeed.

All trainers compute in bfloat16 on float32 parameters, reduce in float32, clip the gradient norm to
1 and use the fused AdamW. The trainers of plain torch follow torch's documentation. Each trainer
returns its loss as a tensor on the device, so the host does not wait for the device.

With tensor parallelism or a pipeline, each pair of ranks holds one replica of the model, and the
pairs are data-parallel. Plait is then compared with a hand-written Llama and torch's own
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from plait.engine.build import initialize
from plait.losses.loss import causal_lm_loss
from plait.validation.catalogue import BF16
from plait.validation.context import Context, Workload, on_device, step_settings

REDUCED_IN_FP32: Mapping[str, Any] = {**BF16, "communication_data_type": "fp32"}
STAGE_3: Mapping[str, Any] = {"zero_optimization": {"stage": 3}}
LOSS_CHUNK_TOKENS = 2048
LEARNING_RATE = 1e-4
IGNORED_LABEL = -100
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TimedTrainer:
    """Training step of a model and its optimizer, and a function that frees both."""

    step: Callable[[Batch], torch.Tensor]
    """Runs one optimizer step and returns the loss, 0-dimensional, on the device."""
    close: Callable[[], None] = lambda: None
    """Ends what the trainer has started."""


TrainerFactory = Callable[[Context, Workload], TimedTrainer]


class Rotary(nn.Module):
    """Rotary position embedding of queries and keys."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [length, head_dim], in the dtype of `like`."""
        exponents = torch.arange(0, self.head_dim, 2, device=like.device, dtype=torch.float32)
        frequencies = self.theta ** (-exponents / self.head_dim)
        positions = torch.arange(length, device=like.device, dtype=torch.float32)
        # [length, head_dim]: both halves of a head rotate by the same angles.
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary position embedding to `x`, [batch, heads, tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """Llama layer with torch's fused RMSNorm and attention."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        hidden = workload.hidden
        width = workload.head_dim
        self.head_dim = width
        self.input_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.query = nn.Linear(hidden, workload.heads * width, bias=False)
        self.key = nn.Linear(hidden, workload.kv_heads * width, bias=False)
        self.value = nn.Linear(hidden, workload.kv_heads * width, bias=False)
        self.output = nn.Linear(workload.heads * width, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate = nn.Linear(hidden, workload.ffn, bias=False)
        self.up = nn.Linear(hidden, workload.ffn, bias=False)
        self.down = nn.Linear(workload.ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [batch, tokens, hidden], for an input of the same shape."""
        normed = self.input_norm(x)
        # [batch, heads, tokens, head_dim]; under tensor parallelism a rank has a part of the heads.
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attention = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        # [batch, heads, tokens, head_dim] -> [batch, tokens, hidden]
        x = x + self.output(attention.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Hand-written Llama that contains only what its training needs."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.embedding = nn.Embedding(workload.vocabulary, workload.hidden)
        self.rotary = Rotary(workload.head_dim, workload.fields["rope_theta"])
        self.layers = nn.ModuleList(Block(workload) for _ in range(workload.layers))
        self.norm = nn.RMSNorm(workload.hidden, eps=1e-5)
        self.head = nn.Linear(workload.hidden, workload.vocabulary, bias=False)
        # Norms keep their ones.
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits, [batch, tokens, vocabulary]."""
        x = self.embedding(input_ids)
        cos, sin = self.rotary(input_ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(torch.Tensor, self.head(self.norm(x)))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of next-token prediction."""
        return next_token_loss(self.logits(input_ids), labels)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of next-token prediction, in float32."""
    # Shifting the labels leaves the large tensor uncopied.
    targets = F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED_LABEL
    )


def plait_trainer(
    context: Context,
    workload: Workload,
    config: Mapping[str, Any],
    model: nn.Module | None = None,
) -> TimedTrainer:
    """Return a trainer with Plait's engine for `model`, by default a Transformers Llama."""
    resolved = step_settings({**REDUCED_IN_FP32, **config}, workload, world=context.world)
    model = model or on_device(workload, context.device)
    engine = initialize(model, resolved, loss_fn=causal_lm_loss, total_steps=1_000_000)
    return TimedTrainer(lambda batch: engine.train_batch(batch).loss, engine.close)


def fsdp2(
    context: Context, model: nn.Module, blocks: nn.ModuleList, *, compiled: bool
) -> TimedTrainer:
    """Return a trainer for a model that `fully_shard` shards block by block.

    The forward of the model must return the loss.
    """
    mesh = device_mesh(context, (context.world,), ("dp",))
    if compiled:
        for block in blocks:
            block.compile()
    _shard(model, blocks, mesh, reshard_blocks=True)
    return TimedTrainer(torch_step(model, _clip_together))


def _clip_together(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)


def torch_step(
    model: nn.Module, clip: Callable[[nn.Module], None]
) -> Callable[[Batch], torch.Tensor]:
    """Return a training step for a model whose forward returns the loss or an output with `loss`.

    Args:
        model: The model.
        clip: Clips the global gradient norm of the model to 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: Batch) -> torch.Tensor:
        output = model(**batch)
        loss: torch.Tensor = getattr(output, "loss", output)
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def device_mesh(context: Context, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a torch DeviceMesh of all ranks. Collective."""
    context.group()
    return init_device_mesh(context.device.type, shape, mesh_dim_names=names)


def transformers_fsdp2(
    context: Context, workload: Workload, *, compiled: bool = False
) -> TimedTrainer:
    """Return a trainer with FSDP2 and a Transformers Llama."""
    model = on_device(workload, context.device)
    return fsdp2(context, model, layers_of(model), compiled=compiled)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a Transformers Llama."""
    return cast(nn.ModuleList, model.get_submodule("model.layers"))


def liger_fsdp2(context: Context, workload: Workload) -> TimedTrainer:
    """Return a trainer with FSDP2 and a Transformers Llama with all of Liger's kernels."""
    model = on_device(workload, context.device)
    restore = install_liger_kernels(model, fused_linear_cross_entropy=True)
    trainer = fsdp2(context, model, layers_of(model), compiled=False)
    return replace(trainer, close=restore)


def liger_plait(context: Context, workload: Workload) -> TimedTrainer:
    """Return a trainer with Plait, its own chunked loss, and Liger's kernels for all else."""
    sharding = {"dp_shard": context.world, "loss_chunk_tokens": LOSS_CHUNK_TOKENS}
    model = on_device(workload, context.device)
    restore = install_liger_kernels(model, fused_linear_cross_entropy=False)
    trainer = plait_trainer(context, workload, {**STAGE_3, "parallel": sharding}, model)

    def close() -> None:
        trainer.close()
        restore()

    return replace(trainer, close=close)


def install_liger_kernels(
    model: nn.Module, *, fused_linear_cross_entropy: bool
) -> Callable[[], None]:
    """Install Liger's kernels in a Transformers Llama.

    Liger replaces classes in Transformers' module, which affects all later models of this process.

    Returns:
        Function that restores the classes of Transformers' module.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    # A copy, because Liger replaces entries of the module.
    originals = dict(vars(modeling_llama))
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=fused_linear_cross_entropy, model=model)
    return lambda: vars(modeling_llama).update(originals)


def ceiling(context: Context, workload: Workload, *, compiled: bool = False) -> TimedTrainer:
    """Return a trainer with FSDP2 and the hand-written Llama."""
    model = hand_written(context, workload)
    return fsdp2(context, model, model.layers, compiled=compiled)


def hand_written(context: Context, workload: Workload) -> Llama:
    """Return the hand-written Llama on the device."""
    torch.manual_seed(0)
    with torch.device(context.device):
        return Llama(workload)


def deepspeed_zero_3(context: Context, workload: Workload) -> TimedTrainer:
    """Return a trainer with DeepSpeed's engine at ZeRO stage 3 and a Transformers Llama."""
    import deepspeed

    context.group()
    config = {
        **REDUCED_IN_FP32,
        "train_micro_batch_size_per_gpu": workload.samples,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1_000_000,
    }
    model = on_device(workload, context.device)
    # DeepSpeed's own FusedAdam is compiled at its first use, which needs CUDA's compiler.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: Batch) -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return TimedTrainer(step, engine.destroy)


TRAINERS: Mapping[str, TrainerFactory] = {
    "plait": lambda context, workload: plait_trainer(
        context, workload, {**STAGE_3, "parallel": {"dp_shard": context.world}}
    ),
    "plait-compiled": lambda context, workload: plait_trainer(
        context,
        workload,
        {**STAGE_3, "parallel": {"dp_shard": context.world}, "compile": {"enabled": True}},
    ),
    "fsdp2": transformers_fsdp2,
    "fsdp2-compiled": lambda context, workload: transformers_fsdp2(
        context, workload, compiled=True
    ),
    "fsdp2-liger": liger_fsdp2,
    "plait-liger": liger_plait,
    "ceiling": ceiling,
    "ceiling-compiled": lambda context, workload: ceiling(context, workload, compiled=True),
    "deepspeed": deepspeed_zero_3,
}


SPLIT = 2
"""Number of ranks that a model is split over."""


def torch_tensor_parallel(context: Context, workload: Workload) -> TimedTrainer:
    """Return a trainer with the hand-written Llama, DTensor's tensor parallelism and FSDP2."""
    mesh = device_mesh(context, (context.world // SPLIT, SPLIT), ("dp", "tp"))
    model = hand_written(context, workload)
    block_plan = {
        # Column-wise products feed row-wise ones, so that a block all-reduces twice per forward.
        **{name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")},
        **{name: RowwiseParallel() for name in ("output", "down")},
    }
    for block in model.layers:
        parallelize_module(block, mesh["tp"], block_plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    _shard(model, model.layers, mesh["dp"])
    return TimedTrainer(torch_step(model, _clip_by_mesh))


def torch_pipeline(context: Context, workload: Workload) -> TimedTrainer:
    """Return a trainer with the hand-written Llama, torch's 1F1B pipeline and FSDP2."""
    mesh = device_mesh(context, (context.world // SPLIT, SPLIT), ("dp", "pp"))
    rank = mesh["pp"].get_local_rank()
    module = HandWrittenStage(hand_written(context, workload), rank, SPLIT)
    _shard(module, module.layers, mesh["dp"])
    stage = PipelineStage(module, rank, SPLIT, context.device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, workload.accumulation, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: Batch) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        _clip_by_mesh(module, mesh["pp"])
        optimizer.step()
        optimizer.zero_grad()
        # Only the last stage computes losses.
        if not losses:
            return torch.zeros((), device=context.device)
        return torch.stack([loss.detach() for loss in losses]).mean()

    return TimedTrainer(step)


class HandWrittenStage(nn.Module):
    """Pipeline stage of a hand-written Llama, with equal numbers of layers per stage."""

    def __init__(self, model: Llama, index: int, stages: int) -> None:
        super().__init__()
        # Rounded up, so that the last stage, which has the head, gets no more layers than others.
        per_stage = -(-len(model.layers) // stages)
        self.layers = model.layers[index * per_stage : (index + 1) * per_stage]
        self.rotary = model.rotary
        self.embedding = model.embedding if index == 0 else None
        self.norm = model.norm if index == stages - 1 else None
        self.head = model.head if index == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the stage, or the logits if the stage is the last one."""
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = self.rotary(x.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def _shard(
    model: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh, *, reshard_blocks: bool = False
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_blocks)
    # The root's parameters are used at both ends of a pass, so torch keeps them by default.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _clip_by_mesh(model: nn.Module, stages: DeviceMesh | None = None) -> None:
    """Clip the global gradient norm to 1.

    Tensor parallelism splits only some parameters, so parameters are on different meshes. torch
    cannot compute one norm over several meshes. The norm is therefore computed per mesh, and the
    squares are added.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    squares = []
    for group in by_mesh.values():
        norm = get_total_norm([p.grad for p in group if p.grad is not None], foreach=True)
        # The norm of sharded gradients is a DTensor with a pending reduction over its mesh.
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2)
    total = torch.stack(squares).sum()
    if stages is not None:
        # Every stage has the gradients of other parameters.
        dist.all_reduce(total, group=stages.get_group())
    for group in by_mesh.values():
        clip_grads_with_norm_(group, 1.0, total.sqrt(), foreach=True)


def _plait(degrees: Callable[[int], Mapping[str, int]]) -> TrainerFactory:
    """Return a function that creates a trainer with Plait and the given degrees of parallelism.

    `degrees` returns the degrees for a number of ranks.
    """

    def build(context: Context, workload: Workload) -> TimedTrainer:
        return plait_trainer(context, workload, {"parallel": dict(degrees(context.world))})

    return build


MODEL_PARALLEL_TRAINERS: Mapping[str, TrainerFactory] = {
    "plait-tp": _plait(lambda world: {"tp": SPLIT, "dp_replicate": world // SPLIT}),
    "torch-tp": torch_tensor_parallel,
    "plait-pp": _plait(lambda world: {"pp": SPLIT, "dp_replicate": world // SPLIT}),
    "torch-pp": torch_pipeline,
}
