"""The most memory that a rank needs during a whole training step, and when, before a device is booked.

One micro-batch goes through each of the rank's stages on fake tensors, moment by moment; the optimizer takes one step on fake shards. The
account of the layout (`parallel.ledger`, `parallel.peak`) puts these together with what moves parameters around and with the schedule.
What cannot be foretold yet is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from plait._torch import FakeStore, FakeTensorMode, storage_bytes, tree_leaves
from plait.cluster.mesh import Mesh, build_mesh
from plait.config.resolve import Resolved
from plait.engine.batch import Forward, default_forward
from plait.engine.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.engine.dryrun import explained, fake_copy, rows_are_sequences, token_batch
from plait.engine.forecast_recorder import BACKWARD, Recorder, watch, when_gradient_comes
from plait.engine.live import LiveStorages
from plait.engine.loss import Loss, causal_lm_loss
from plait.engine.optimizer import build_optimizer
from plait.engine.peak import make_states
from plait.engine.rehearsal import handed_on
from plait.engine.solve import recompute_of
from plait.errors import InputError
from plait.model.blocks import find_blocks
from plait.model.facts import ModelFacts, model_facts
from plait.model.plans import TensorPlan
from plait.parallel.ledger import Ledger, local_rows
from plait.parallel.moments import BESIDE, HEAD, LOSS, StageMoments, StepFacts
from plait.parallel.order import account_all, apply_all
from plait.parallel.peak import Peak, step_peak
from plait.parallel.pipeline import PipelineParts
from plait.parallel.pipeline_account import facts_of_rank, stage_counts
from plait.parallel.recompute import Recompute
from plait.parallel.schedule import Kind
from plait.parallel.split_backward import backward_inputs, backward_weights
from plait.parallel.stage import Stage
from plait.parallel.staged_zero import StagedZero
from plait.parallel.technique import Parts, notes_of
from plait.shards import shard_length
from plait.units import dtype_of


@dataclass(frozen=True)
class Forecast:
    """What is foretold of one rank."""

    ledger: Ledger
    """States and traffic."""
    peak: Peak


def why_not_foretold(resolved: Resolved) -> str | None:
    """The setting whose memory during a step is not in the account yet; None where everything is."""
    data = resolved.data_parallel
    reasons = (
        (resolved.compile.enabled, "compile.enabled = true: what a compiled block keeps is decided by the compiler"),
        (resolved.optimizer_offload.device != "none", "zero_optimization.offload_optimizer: the copies between host and device"),
        (resolved.parameter_offload.device != "none", "zero_optimization.offload_param: the shards that are read ahead"),
        (resolved.activation_offload.fraction > 0, "parallel.activation_offload: when a stored tensor has left the device"),
        (data.compresses or data.compression.weight_bits > 0, "compressed communication: its buffers"),
        (bool(data.second_copy), "zero_hpz_partition_size: the second shards"),
        (data.all_reduce != "by-machines" or data.links is not None, "the buffers of the chosen all-reduce"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def foretell(model: nn.Module, resolved: Resolved, *, rank: int, samples: int, length: int) -> Forecast:
    """The forecast for rank `rank` of `resolved`'s layout: steps of micro-batches [samples, length], `model` a causal language model,
    whole and unsharded, which stays as it is. Makes and ends a process group; raises InputError where one exists."""
    if dist.is_initialized():
        raise InputError("a prediction makes a process group of ranks that do not exist, and this process has one already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=resolved.layout.world_size)
    try:
        return foretell_on(build_mesh(resolved.layout), model, resolved, samples=samples, length=length)
    finally:
        dist.destroy_process_group()


def foretell_on(mesh: Mesh, model: nn.Module, resolved: Resolved, *, samples: int, length: int) -> Forecast:
    """The forecast for the rank that `mesh` is on."""
    reason = why_not_foretold(resolved)
    if reason is not None:
        raise InputError(f"the peak of a step is not predicted with {reason}")
    blocks = find_blocks(model, resolved.blocks or None)
    context = resolved.context(model=model, blocks=blocks)
    given = Parts(model=model, blocks=blocks, notes=notes_of(one.check(context) for one in (resolved.tensor_parallel, resolved.pipeline)))
    pipeline = given.noted(PipelineParts)
    whole = model_facts(model, blocks, tensor_plan=given.noted(TensorPlan))
    at, layout = mesh.coordinates, resolved.layout
    passes = 2 if resolved.loss_chunk_tokens else 1
    ledger = Ledger.of_rank(
        layout,
        at,
        accumulation=resolved.batch.accumulation,
        tokens=samples * length,
        loss_passes=passes,
        optimizer_states=resolved.optimizer.states,
    )
    own, schedule, pp_rank = whole, None, at["pp"]
    run = _DryStep(given, resolved, mesh, samples=samples, length=length)
    if pipeline is not None:
        schedule = pipeline.schedule
        counts = stage_counts(schedule, pp_rank, cut=pipeline.cut, facts=whole, boundary_bytes=run.boundary.nbytes, ledger=ledger)
        own = facts_of_rank(whole, pipeline.cut, schedule.stages_of(pp_rank))
        ledger = ledger.with_(stage=counts)
    ledger = account_all(resolved.techniques, ledger, own)
    states, temporaries = _optimizer(resolved, mesh, own, ledger)
    ledger = ledger.with_(memory={**ledger.memory, "optimizer": np.full_like(ledger.dp_shard, states)})
    facts = run.facts(optimizer_temporary_bytes=temporaries)
    peak = step_peak(facts, ledger=ledger, model=own, zero=resolved.data_parallel.stage, schedule=schedule, pp_rank=pp_rank)
    return Forecast(ledger, peak)


class _DryStep:
    """A fake copy of the rank's model, with everything applied but what shards it."""

    def __init__(self, given: Parts, resolved: Resolved, mesh: Mesh, *, samples: int, length: int) -> None:
        self.resolved, self.mesh = resolved, mesh
        precision = resolved.precision
        recompute: Recompute = recompute_of(resolved, given, mesh, loss_fn=None, forward=default_forward)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        dtype = dtype_of(precision.compute) if precision.compute else None
        with self.mode:
            fake = fake_copy(given.model, mesh.device, dtype)
            given = given.with_(model=fake, compute_dtype=dtype)
            self.parts = apply_all((resolved.tensor_parallel, resolved.pipeline, recompute), given, mesh)
            self.piece = {name: torch.empty_like(x, device=mesh.device) for name, x in token_batch(samples, length).items()}
            self.boundary = handed_on(fake, self.parts, self.piece) if resolved.layout.pp > 1 else torch.empty(0)
        self.loss: Loss = causal_lm_loss
        self.forward: Forward = default_forward
        if resolved.loss_chunk_tokens:
            self.loss = ChunkedCausalLMLoss(chunk_tokens=resolved.loss_chunk_tokens)
            self.forward = deferred(default_forward, fake)
        region = self.parts.tensor_region
        if region is not None:
            region.gather_logits = not (self.parts.loss_parallel and getattr(self.loss, "split_logits", False))

    def facts(self, *, optimizer_temporary_bytes: int) -> StepFacts:
        """Every stage of the rank."""
        pipeline = self.parts.noted(PipelineParts)
        stages: dict[int, Stage | None] = {0: None}
        if pipeline is not None:
            assert pipeline.staged is not None
            stages = dict(pipeline.staged.stages)
        with self.mode, explained(self.parts.model), rows_are_sequences():
            return StepFacts(
                stages={index: self._stage(index, stage) for index, stage in stages.items()},
                boundary_bytes=self.boundary.nbytes,
                batch_bytes=sum(x.nbytes for x in self.piece.values()) * self.resolved.batch.accumulation,
                buffer_bytes=storage_bytes(self.parts.model.buffers()),
                optimizer_temporary_bytes=optimizer_temporary_bytes,
                exchanges_reductions=self.mesh.device.type == "cpu",
            )

    def _stage(self, index: int, stage: Stage | None) -> StageMoments:
        pipeline = self.parts.noted(PipelineParts)
        if pipeline is None:
            return self._run(stage, splits=False)
        row = pipeline.schedule.ranks[self.mesh.coordinates["pp"]]
        kinds = {action.kind for action in row if action.stage == index}
        found = StageMoments(())
        if Kind.BACKWARD in kinds:
            found = self._run(stage, splits=False)
        if Kind.INPUT in kinds:
            halves = self._run(stage, splits=True)
            found = replace(halves, backward=found.backward)
        return found

    def _run(self, stage: Stage | None, *, splits: bool) -> StageMoments:
        """Forward and backward of one stage, as `parallel.runtime` runs them."""
        model = self.parts.model
        known = [*model.parameters(), *model.buffers(), *self.piece.values()]
        own = self.parts.blocks if stage is None else stage.blocks
        units = {name: self.parts.blocks.index(name) for name in own}
        unit_of = {
            parameter: next((unit for block, unit in units.items() if name.startswith(f"{block}.")), BESIDE)
            for name, parameter in model.named_parameters()
        }
        last = stage is None or stage.last
        recorder = Recorder(known=known, drops_gradients=not splits)
        remove = watch(model, units, recorder, last=last, unit_of=unit_of)
        try:
            with recorder:
                recorder.mark("forward", BESIDE)
                inputs = [] if stage is None or stage.first else [torch.empty_like(self.boundary).requires_grad_()]
                outputs = self._forward(stage, inputs, recorder)
                forward = recorder.take()
                recorder.unit = BACKWARD
                recorder.mark("backward", LOSS if last else HEAD)
                gradients = None if last else [torch.empty_like(tensor) for tensor in outputs]
                if not splits:
                    torch.autograd.backward(outputs, gradients)
                    return StageMoments(forward, backward=recorder.take())
                assert stage is not None
                second = backward_inputs(outputs, gradients, inputs, self._weights_of(stage))
                del gradients
                for tensor in inputs:
                    tensor.grad = None
                first = recorder.take()
                recorder.mark("weights", BESIDE)
                backward_weights(second)
                return StageMoments(forward, inputs=first, weights=recorder.take())
        finally:
            remove()
            for parameter in model.parameters():
                parameter.grad = None

    def _forward(self, stage: Stage | None, inputs: list[torch.Tensor], recorder: Recorder) -> list[torch.Tensor]:
        """What backward starts from."""
        pipeline = self.parts.noted(PipelineParts)
        if stage is None:
            output = self.forward(self.parts.model, self.piece)
        else:
            assert pipeline is not None and pipeline.staged is not None
            length = self.piece["input_ids"].shape[1]
            received = inputs[0] if inputs else None
            output = pipeline.staged.run(stage, lambda model: self.forward(model, self.piece), received, length=length)
            if not stage.last:
                return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        recorder.mark("forward", LOSS)
        when_gradient_comes(output, lambda: recorder.mark("backward", HEAD))
        return [self.loss(output, self.piece)[0]]

    def _weights_of(self, stage: Stage) -> Iterator[nn.Parameter]:
        pipeline = self.parts.noted(PipelineParts)
        assert pipeline is not None and pipeline.staged is not None
        return StagedZero(pipeline.staged, pipeline.schedule, zero=0, reducer=None).weights(stage.index)


def _optimizer(resolved: Resolved, mesh: Mesh, facts: ModelFacts, ledger: Ledger) -> tuple[int, int]:
    """(bytes of the optimizer's states, the most that a step holds beside parameters, gradients and states), by a step on fake shards."""
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    n, rank = int(ledger.dp_shard[0]), int(ledger.shard_rank[0])
    axis = next((name for name, size in (("dp_shard", n), ("tp", resolved.layout.tp)) if size > 1), None)
    small = resolved.optimizer.states != "own"
    with FakeTensorMode(allow_non_fake_inputs=True):
        named = []
        for parameter in facts.trainable:
            dim = ledger.tensor_dims.get(parameter.name)
            rows, row = (int(count[0]) for count in local_rows(parameter.shape, dim, ledger))
            held = shard_length(rows, n, rank)
            shape = (held, row) if len(parameter.shape) > 1 else (held,)
            local = torch.empty(shape, dtype=dtypes[parameter.itemsize], device=mesh.device)
            whole = local
            if axis is not None:
                size, stride = None, None
                if small:  # the whole shape decides what a block of states is
                    size = torch.Size((parameter.shape[0], prod(parameter.shape[1:]))[: local.ndim])
                    stride = (*size[1:], 1)
                whole = DTensor.from_local(local, mesh.sub(axis), [Shard(0)], run_check=False, shape=size, stride=stride)
            named.append((parameter.name, nn.Parameter(whole)))
        optimizer = build_optimizer(resolved.optimizer, named)
        make_states(optimizer)
        for _, own in named:
            own.grad = torch.empty_like(own)
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        live = LiveStorages(known=[*states, *(tensor for _, p in named for tensor in (p, p.grad) if tensor is not None)])
        with live:
            optimizer.step()
    return storage_bytes(states), live.peak
