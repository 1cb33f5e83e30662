"""Pipeline parallelism: consecutive blocks on different ranks, micro-batches flowing through them
by a schedule.

The schedule is a table (`schedules.schedule`), the cut is data (`model.stages`), `stage.py` takes
from the model in place what other ranks own, `runtime.py` executes the table, `pipeline_zero.py`
keeps the meaning of the ZeRO stages. Here is what can be set, and what a rank of a pipeline needs
besides: the gradients of tied parameters, which several stages hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.cluster import accelerator
from plait.cluster.mesh import Groups, Mesh
from plait.comm.messages import Messenger
from plait.errors import ConfigError, Problem
from plait.model.dataflow import Skeleton
from plait.model.facts import ModelFacts, model_facts
from plait.model.stages import StageCut, block_list, cut_model
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations.saved_tensors import OffloadedActivations
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.data.reducer import Reducer
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import Lost, StepHook
from plait.parallel.pipeline.balance import cut, forward_costs
from plait.parallel.pipeline.cut_check import CutCheck
from plait.parallel.pipeline.pipeline_zero import StagedZero
from plait.parallel.pipeline.runtime import Runtime
from plait.parallel.pipeline.stage import StagedModel, stage_model
from plait.parallel.pipeline.staged_store import StagedStore
from plait.parallel.reduction import Reduction
from plait.parallel.schedules.schedule import SCHEDULES, Schedule, make_schedule
from plait.parallel.technique import Context, Parts, Technique
from plait.parallel.tensor.styles import Region


class Pipeline(Technique):
    """How the pp axis is used; its degree is the layout's."""

    schedule: str = "1f1b"
    """Order of forwards and backwards: gpipe, 1f1b, interleaved-1f1b, looped-bfs,
    interleaved-zero-bubble, zbv, dualpipev.
    """
    stages_per_rank: int | None = None
    """Stages of each rank; None takes the schedule's own number."""
    blocks_per_stage: tuple[int, ...] | None = None
    """How many blocks each stage gets; None balances their cost."""

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Take from the model, in place, what other stages own."""
        plan = parts.noted(PipelineParts)
        if plan is None:
            return parts
        schedule = plan.schedule
        found = plan.cut
        rank = mesh.coordinates["pp"]
        # which have the place of the model's own balance loss
        if parts.noted(RouterStatistics) is not None:
            plan.skeleton.model.config.output_router_logits = False  # type: ignore[union-attr]
        staged = stage_model(
            parts.model,
            found,
            schedule.stages_of(rank),
            region=parts.noted(Region),
            device=mesh.device,
        )
        own = tuple(name for stage in staged.stages.values() for name in stage.blocks)
        return parts.with_(blocks=own).with_notes(replace(plan, staged=staged))

    def check(self, context: Context) -> PipelineParts | None:
        """The table and the cut; None for one rank. Raises ConfigError or ModelError where the
        schedule or the model does not allow it.
        """
        pp = context.layout.pp
        model = context.model
        blocks = context.blocks
        if pp == 1 or model is None:
            return None
        schedule = make_schedule(
            self.schedule,
            pp=pp,
            microbatches=context.accumulation,
            stages_per_rank=self.stages_per_rank,
        )
        if schedule.splits_backward and context.chosen(DataParallel).stage == 3:
            whole = ", ".join(
                name
                for name in SCHEDULES
                if name in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
            )
            rule = (
                "it defers the gradients of weights, for which freed parameters would have to be"
                " gathered a third time and all at once"
            )
            raise ConfigError(
                Problem(
                    "parallel.pipeline.schedule",
                    self.schedule,
                    f"with ZeRO stage 3: {rule}",
                    f"use ZeRO stage 2, or one of {whole}",
                )
            )
        if schedule.splits_backward and context.layout.ep > 1:
            rule = (
                f"with parallel.ep = {context.layout.ep}: it computes a backward in two parts, and"
                " tokens are exchanged in one"
            )
            raise ConfigError(
                Problem(
                    "parallel.pipeline.schedule",
                    self.schedule,
                    rule,
                    'use "1f1b" or "gpipe", or parallel.ep = 1',
                )
            )
        block_list(model, blocks)
        bounds = self._bounds(model, blocks, schedule.stages)
        skeleton = Skeleton.of(model, blocks)
        return PipelineParts(
            schedule, cut_model(model, blocks, bounds, skeleton=skeleton), skeleton
        )

    def _bounds(self, model: nn.Module, blocks: tuple[str, ...], stages: int) -> tuple[int, ...]:
        counts = self.blocks_per_stage
        if counts is None:
            if stages > len(blocks):
                rule = (
                    f"{self.schedule} makes {stages} stages, each needs a block, and the model has"
                    f" {len(blocks)}"
                )
                raise ConfigError(
                    Problem(
                        "parallel.pipeline.schedule",
                        self.schedule,
                        rule,
                        "lower parallel.pp or stages_per_rank",
                    )
                )
            costs = forward_costs(model_facts(model, blocks))
            counts = cut(costs.blocks, stages, first=costs.first, last=costs.last)
        elif len(counts) != stages or sum(counts) != len(blocks) or min(counts) < 1:
            rule = (
                f"{self.schedule} has {stages} stages, and their blocks, at least 1 each, add up to"
                f" the model's {len(blocks)}"
            )
            raise ConfigError(
                Problem(
                    "parallel.pipeline.blocks_per_stage",
                    list(counts),
                    rule,
                    "leave it out to balance the stages",
                )
            )
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        return tuple(bounds)

    def groups(self, context: Context) -> Groups:
        """The ranks that sum the gradients of tied parameters."""
        plan = context.notes.get(PipelineParts)
        return (
            Groups(stages=tuple(plan.tied().values()))
            if isinstance(plan, PipelineParts)
            else Groups()
        )

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """The runtime of this rank."""
        plan = parts.noted(PipelineParts)
        return [] if plan is None else [_rank_of(plan, parts, mesh)]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Messages between stages, and the sum of shared gradients; `ledger.stage` and `facts` are
        of one rank (`account`).
        """
        if ledger.stage is None:
            return ledger
        stage = ledger.stage
        return ledger.add_traffic("send", stage.sends * stage.boundary_bytes).add_traffic(
            "all_reduce", stage.shared_bytes
        )


@dataclass(frozen=True)
class PipelineParts:
    """A pipeline of a model: what `check` has found, and this rank's part of it."""

    schedule: Schedule
    cut: StageCut
    skeleton: Skeleton
    """The uncut model without its weights, to check batches with."""
    staged: StagedModel | None = None
    """This rank's stages; None until they are taken from the model."""

    def tied(self) -> dict[str, frozenset[int]]:
        """The first name of every parameter that several ranks of the pipeline hold, to those
        ranks; in one order on all of them.
        """
        ranks = {
            name: frozenset(self.schedule.stage_ranks[stage] for stage in stages)
            for name, stages in self.cut.shared().items()
        }
        first = self.cut.first_names
        return {
            name: found
            for name, found in ranks.items()
            if len(found) > 1 and first.get(name, name) == name
        }


@dataclass
class PipelineRank(StepHook):
    """What the engine calls on a rank of a pipeline."""

    runtime: Runtime
    zero: StagedZero
    shared: Mapping[nn.Parameter, dist.ProcessGroup]
    """Parameters that several ranks of the pipeline hold, and those ranks."""
    counted: frozenset[nn.Parameter]
    """Those of them that another rank counts in the norm."""
    track_unused: bool
    """Whether a step may leave shared parameters unused."""
    output_rank: int
    """The rank of the pipeline that holds the last stage."""

    @property
    def holds_output(self) -> bool:
        """Whether the last stage is here."""
        return self.runtime.messenger.rank == self.output_rank

    def on_error(self, lost: Lost) -> None:
        """Clear what a step that failed on all ranks has left."""
        self.zero.forget()
        self.runtime.messenger.forget()

    def finish_reduction(self) -> None:
        """Sum the gradients of shared parameters over the stages that hold them. After all other
        reductions. Collective.
        """
        for parameter, group in self.shared.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mine = parameter.grad is not None
            used = accelerator.tensor_of([mine], dtype=torch.uint8, device=gradient.device)
            dist.all_reduce(local_tensor(gradient), group=group)
            if self.track_unused:
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
            # looking at it waits
            parameter.grad = gradient if mine or not self.track_unused or bool(used) else None


def _rank_of(plan: PipelineParts, parts: Parts, mesh: Mesh) -> PipelineRank:
    staged = plan.staged
    schedule = plan.schedule
    found = plan.cut
    upwards = mesh.group("pp")
    data = parts.noted(DataParallel)
    assert (
        staged is not None
        and upwards is not None
        and mesh.reverse_pp is not None
        and data is not None
    )
    zero = StagedZero(staged, schedule, zero=data.stage, reducer=parts.noted(Reducer))
    messenger = Messenger([(upwards, mesh.reverse_pp), *mesh.more_pp], device=mesh.device)
    check = CutCheck(plan.skeleton, found, parts.model)
    runtime = Runtime(schedule, staged, messenger, check=check, observers=[zero])
    runtime.statistics = parts.noted(RouterStatistics)
    offloaded = parts.noted(OffloadedActivations)
    if offloaded is not None:
        runtime.observers.append(
            StagedStore(offloaded.store, staged.stages, parts.blocks[: offloaded.blocks])
        )
    shared: dict[nn.Parameter, dist.ProcessGroup] = {}
    counted: set[nn.Parameter] = set()
    own: dict[str, nn.Parameter] = {}
    for name, parameter in parts.model.named_parameters(remove_duplicate=False):
        own.setdefault(found.first_names.get(name, name), parameter)
    for name, ranks in plan.tied().items():
        group = mesh.stages[ranks]
        if group is not None and name in own and own[name].requires_grad:
            shared[own[name]] = group
            if not Reduction(stages=tuple(ranks)).is_first_stage(mesh.coordinates):
                counted.add(own[name])
    return PipelineRank(
        runtime, zero, shared, frozenset(counted), data.unused_parameters, schedule.stage_ranks[-1]
    )
