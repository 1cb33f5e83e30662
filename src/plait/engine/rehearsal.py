"""One rank of a layout of any size, alone and without data: the model is built, split and stepped once on fake tensors.

Everything but the values is real: the same code makes the shards, the stages, the collectives and the optimizer states, on a process group
whose other ranks do not exist. So a layout of thousands of ranks is tried on a laptop, in seconds to minutes. What a step decides by values
(the norm, whether it overflowed) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from plait._torch import FakeStore, FakeTensorMode, delivered_at_once, storage_bytes
from plait.config.resolve import Resolved
from plait.engine.batch import default_forward, micro_batches
from plait.engine.build import split
from plait.engine.loss import causal_lm_loss
from plait.engine.optimizer import build_optimizer
from plait.engine.peak import StepPeak, make_states, step_tensors
from plait.errors import InputError, ModelError
from plait.parallel import materialise
from plait.parallel.data import before_backward, reduce_by_sum
from plait.parallel.pipeline import PipelineRank, build_pipeline
from plait.parallel.technique import Parts


@dataclass(frozen=True)
class Rehearsal:
    """What a rank held, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    blocks: tuple[str, ...]
    """The blocks of the model that the rank owns."""
    peak_bytes: int
    """The most at once, during a step that finds its optimizer states."""


def rehearse(model: nn.Module, resolved: Resolved, *, rank: int, samples: int, length: int) -> Rehearsal:
    """Build rank `rank` of `resolved`'s layout from `model` (a causal language model on meta, changed in place) and run one step of
    micro-batches [samples, length]. Makes and ends a process group; raises InputError where one exists."""
    if dist.is_initialized():
        raise InputError("a rehearsal makes a process group of ranks that do not exist, and this process has one already")
    if not materialise.is_meta(model):
        raise InputError("a rehearsal takes a model that was built under torch.device('meta')")
    quiet = resolved.data_parallel.model_copy(update={"unused_parameters": False})  # which parameters were used is a value
    resolved = resolved.model_copy(update={"data_parallel": quiet})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=resolved.layout.world_size)
    try:
        mesh, parts = split(model, resolved)
        pipeline = build_pipeline(parts, mesh, track_unused=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialise.allocate(model, mesh.device)
            if parts.reducer is not None:
                parts.reducer.attach()
            reduce_by_sum(parts)
            return _step(model, parts, pipeline, resolved, samples, length)
    finally:
        dist.destroy_process_group()


def _step(model: nn.Module, parts: Parts, pipeline: PipelineRank | None, resolved: Resolved, samples: int, length: int) -> Rehearsal:
    optimizer = build_optimizer(resolved.optimizer, list(model.named_parameters()))
    count = resolved.batch.accumulation
    ids = torch.zeros(samples * count, length, dtype=torch.int64, device=next(model.parameters()).device)
    pieces = micro_batches({"input_ids": ids, "labels": ids.clone()}, count=count, size=samples)
    region = parts.tensor_region
    if region is not None:
        region.gather_logits = not parts.loss_parallel
    make_states(optimizer)
    live = StepPeak(step_tensors(model, optimizer, parts.reducer, pieces))
    with live, delivered_at_once():
        gradients = _one_step(model, parts, pipeline, optimizer, pieces)
    states = storage_bytes(value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))
    return Rehearsal(storage_bytes(model.parameters()), gradients, states, parts.blocks, live.peak)


def _one_step(
    model: nn.Module, parts: Parts, pipeline: PipelineRank | None, optimizer: torch.optim.Optimizer, pieces: list[dict[str, torch.Tensor]]
) -> int:
    """Returns the bytes of gradients before the update."""
    if pipeline is not None:
        foretell_messages(model, parts, pipeline, pieces[0])
        pipeline.runtime.train(pieces, forward=default_forward, loss=lambda output, piece: causal_lm_loss(output, piece)[0])
    else:
        for index, piece in enumerate(pieces):
            before_backward(parts, last=index == len(pieces) - 1)
            causal_lm_loss(default_forward(model, piece), piece)[0].backward()
    if parts.reducer is not None:
        parts.reducer.finish()
    if pipeline is not None:
        pipeline.reduce_shared()
    gradients = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    return gradients


def foretell_messages(model: nn.Module, parts: Parts, pipeline: PipelineRank, piece: dict[str, torch.Tensor]) -> None:
    """Tell a rank that runs alone what every stage hands on for micro-batches like `piece`."""
    hidden = handed_on(model, parts, piece)
    for stage in range(pipeline.runtime.schedule.stages - 1):
        pipeline.runtime.foretell(stage, piece, hidden)


def handed_on(model: nn.Module, parts: Parts, piece: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a stage hands on: hidden states [samples, length, hidden], of which sequence parallelism leaves a rank its part of the length.
    Raises ModelError for a model that does not tell their width."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    if width is None:
        raise ModelError(f"{type(model).__name__} has no config.hidden_size, so what passes between its stages is not known beforehand")
    samples, length = piece["input_ids"].shape
    region = parts.tensor_region
    own = length
    if region is not None:
        region.length = length
        if region.sequence_parallel:
            own = -(-length // region.group.size())
    return torch.empty(samples, own, width, dtype=parts.compute_dtype or next(model.parameters()).dtype)
