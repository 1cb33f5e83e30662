"""Pipeline parallelism: consecutive blocks of a model on different ranks.

Micro-batches pass through the blocks in the order of a schedule (`schedules.schedule`).
`pipeline.stage` removes the blocks and parameters of other ranks from the model, in place, and
`pipeline.runtime` executes the schedule. This module has the settings. It also sums the gradients
of tied parameters over the stages that share them, and prefetches offloaded activations.

Note [ZeRO stages of a pipeline]
    The rules of `accounting.ledger.after_block_backward` hold per pipeline stage, with the stage's
    micro-batches as the accumulation steps. torch's flags are set on each unit before each
    backward, because the stages of one rank end their steps at different times. If a backward is
    split into two halves, gradients are reduced after the second half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.passes import begin_sharded, reduce_now
from plait._torch.units import sharded_modules
from plait.cluster.mesh import Groups, Mesh
from plait.comm.messages import Messenger
from plait.errors import ConfigError, Problem
from plait.model.dataflow import Skeleton
from plait.model.facts import ModelFacts, model_facts
from plait.model.stages import block_list, cut_model
from plait.parallel.accounting.ledger import (
    AfterBackward,
    Ledger,
    after_block_backward,
    after_root_backward,
)
from plait.parallel.activations.activation_store import ActivationStore
from plait.parallel.data.reducer import Reducer, sum_gradients
from plait.parallel.hooks import FailureScope, StepHook
from plait.parallel.parameter_layout import Reduction
from plait.parallel.parts import Parts, Plans
from plait.parallel.pipeline.cut_check import CutCheck
from plait.parallel.pipeline.estimates import balance_stages, forward_costs
from plait.parallel.pipeline.runtime import Runtime
from plait.parallel.pipeline.stage import PipelinePlan, Stage, StagedModel, stage_model
from plait.parallel.schedules.schedule import SCHEDULES, Action, Kind, Schedule, make_schedule
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.data_parallel import DataParallel, set_unit_flags


class Pipeline(Technique):
    """Settings of pipeline parallelism over the pp axis, whose degree the layout defines."""

    schedule: str = "1f1b"
    """Name of the order of forwards and backwards, a key of `SCHEDULES`."""
    stages_per_rank: int | None = None
    """Number of stages per rank, or None for the default of the schedule."""
    blocks_per_stage: tuple[int, ...] | None = None
    """Number of blocks of each stage, or None to balance the costs of the stages."""

    def check(self, context: TechniqueContext) -> Plans:
        """Return the plan of the pipeline. See `plan`."""
        return Plans(pipeline=self.plan(context))

    def plan(self, context: TechniqueContext) -> PipelinePlan | None:
        """Return the schedule and the blocks of each stage, or None if pp is 1.

        Raises:
            ConfigError: The schedule does not support the model or another setting.
            ModelError: The model cannot be divided into stages.
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
        if schedule.splits_backward:
            self._refuse_split_backward(context)
        block_list(model, blocks)
        bounds = self._bounds(model, blocks, schedule)
        skeleton = Skeleton.of(model, blocks)
        stage_cut = cut_model(model, blocks, bounds, skeleton=skeleton)
        return PipelinePlan(schedule, stage_cut, skeleton)

    def _refuse_split_backward(self, context: TechniqueContext) -> None:
        """Raise ConfigError if a technique does not support a split backward."""
        if context.technique(DataParallel).stage == 3:
            unsplit = [name for name, spec in SCHEDULES.items() if not spec.splits_backward]
            rule = (
                "it computes the gradients of weights later than those of inputs, for which ZeRO"
                " stage 3 would have to gather all freed parameters a third time"
            )
            raise ConfigError(
                Problem(
                    "parallel.pipeline.schedule",
                    self.schedule,
                    rule,
                    f"use ZeRO stage 2, or one of {', '.join(unsplit)}",
                )
            )
        if context.layout.ep > 1:
            rule = (
                "it computes a backward in two parts, which is not supported for the exchange of"
                f" tokens between experts (parallel.ep = {context.layout.ep})"
            )
            raise ConfigError(
                Problem(
                    "parallel.pipeline.schedule",
                    self.schedule,
                    rule,
                    'use "1f1b" or "gpipe", or parallel.ep = 1',
                )
            )

    def _bounds(
        self, model: nn.Module, blocks: tuple[str, ...], schedule: Schedule
    ) -> tuple[int, ...]:
        """Return the index of each stage's first block, followed by the number of blocks."""
        stages = schedule.stages
        counts = self.blocks_per_stage
        if stages > len(blocks):
            rule = (
                f"the schedule has {stages} stages with at least one block each, and the model"
                f" has {len(blocks)} blocks"
            )
            remedy = 'use "1f1b", which has one stage per rank'
            if self.stages_per_rank is not None and self.stages_per_rank > 1:
                remedy += ", leave parallel.pipeline.stages_per_rank out"
            if counts is not None:
                remedy += ", leave parallel.pipeline.blocks_per_stage out"
            if schedule.pp > len(blocks):
                remedy += f", and parallel.pp = {len(blocks)} or less"
            raise ConfigError(Problem("parallel.pipeline.schedule", self.schedule, rule, remedy))
        if counts is None:
            costs = forward_costs(model_facts(model, blocks))
            counts = balance_stages(costs.blocks, stages, first=costs.first, last=costs.last)
        elif len(counts) != stages or sum(counts) != len(blocks) or min(counts) < 1:
            rule = (
                f"{self.schedule} has {stages} stages, so {stages} numbers of 1 or more are"
                f" required, whose sum is {len(blocks)}, the number of the model's blocks"
            )
            raise ConfigError(
                Problem(
                    "parallel.pipeline.blocks_per_stage",
                    list(counts),
                    rule,
                    "leave it out to balance the stages",
                )
            )

        return (0, *accumulate(counts))

    def groups(self, context: TechniqueContext) -> Groups:
        """Return the process groups that sum the gradients of tied parameters."""
        plan = context.plans.pipeline
        if plan is None:
            return Groups()
        return Groups(stages=tuple(plan.tied().values()))

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Remove the blocks and parameters of other ranks from the model, in place."""
        plan = parts.plans.pipeline
        if plan is None:
            return parts
        rank = mesh.coordinates["pp"]
        if parts.router_statistics is not None:
            # Router statistics replace the balance loss of the model's own forward.
            plan.skeleton.model.config.output_router_logits = False  # type: ignore[union-attr]
        staged = stage_model(
            parts.model,
            plan.cut,
            plan.schedule.stages_of(rank),
            region=parts.region,
            device=mesh.device,
        )
        blocks = tuple(name for stage in staged.stages.values() for name in stage.blocks)
        plans = replace(parts.plans, pipeline=replace(plan, staged=staged))
        return replace(parts, blocks=blocks, plans=plans)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook through which the engine runs the pipeline on this rank."""
        plan = parts.plans.pipeline
        if plan is None:
            return []
        staged = plan.staged
        schedule = plan.schedule
        forward_group = mesh.group("pp")
        assert staged is not None
        assert forward_group is not None
        assert mesh.reverse_pp is not None

        zero = StagedZero(staged, schedule, zero=parts.zero_stage, reducer=parts.reducer)
        messenger = Messenger(
            [(forward_group, mesh.reverse_pp), *mesh.extra_pp], device=mesh.device
        )
        check = CutCheck(plan.skeleton, plan.cut, parts.model)
        runtime = Runtime(schedule, staged, messenger, check=check, observers=[zero])
        runtime.statistics = parts.router_statistics
        offloaded = parts.offloaded_activations
        if offloaded is not None:
            offloaded_blocks = parts.blocks[: offloaded.blocks]
            runtime.observers.append(
                StagePrefetcher(offloaded.store, staged.stages, offloaded_blocks)
            )

        parameters: dict[str, nn.Parameter] = {}
        for name, parameter in parts.model.named_parameters(remove_duplicate=False):
            parameters.setdefault(plan.cut.first_names.get(name, name), parameter)
        shared: dict[nn.Parameter, dist.ProcessGroup] = {}
        counted: set[nn.Parameter] = set()
        for name, ranks in plan.tied().items():
            group = mesh.stages[ranks]
            if group is not None and name in parameters and parameters[name].requires_grad:
                shared[parameters[name]] = group
                # The first of the stages adds the gradient to the norm.
                if not Reduction(stages=tuple(ranks)).is_first_stage(mesh.coordinates):
                    counted.add(parameters[name])
        hook = PipelineRank(
            runtime=runtime,
            zero=zero,
            shared=shared,
            counted_by_other_stage=frozenset(counted),
            track_unused=parts.tracks_unused,
            output_rank=schedule.stage_ranks[-1],
        )
        return [hook]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add the messages between stages and the sums of tied gradients.

        Args:
            ledger: Ledger of one rank, whose messages and tied parameters are in `ledger.stage`.
            facts: Facts of the blocks and parameters on that rank.
        """
        stage = ledger.stage
        if stage is None:
            return ledger
        ledger = ledger.add_traffic("send", stage.sends * stage.boundary_bytes)
        return ledger.add_traffic("all_reduce", stage.shared_bytes)


@dataclass
class PipelineRank(StepHook):
    """Hook through which the engine runs this rank of a pipeline.

    Attributes:
        runtime: Runtime that executes the schedule.
        zero: Observer that applies the ZeRO stages.
        shared: Process group of each tied parameter that several pipeline ranks hold.
        counted_by_other_stage: Tied parameters whose gradients another rank adds to the gradient
            norm.
        track_unused: Whether a step may leave tied parameters unused.
        output_rank: The pp rank that holds the last stage.
    """

    runtime: Runtime
    zero: StagedZero
    shared: Mapping[nn.Parameter, dist.ProcessGroup]
    counted_by_other_stage: frozenset[nn.Parameter]
    track_unused: bool
    output_rank: int

    @property
    def holds_output(self) -> bool:
        """True if this rank holds the last stage."""
        return self.runtime.messenger.rank == self.output_rank

    def on_error(self, lost: FailureScope) -> None:
        """Clear the state of a step that failed on all ranks."""
        self.zero.forget()
        self.runtime.messenger.forget()

    def finish_reduction(self) -> None:
        """Sum the gradients of tied parameters over the stages that hold them. Collective.

        Call it after all other reductions.
        """
        for parameter, group in self.shared.items():
            sum_gradients([parameter], group, users=group if self.track_unused else None)


# Computations after which a micro-batch's gradients on a stage are complete.
_COMPLETING_KINDS = (Kind.BACKWARD, Kind.WEIGHT)
# Flags with which gradients accumulate and parameters stay gathered.
_NOTHING_AFTER_BACKWARD = AfterBackward(False, False, False)


class StagedZero:
    """`Runtime` observer that sets when units reduce gradients and free parameters.

    Units are the modules that `fully_shard` gathers and reduces as one. See Note [ZeRO stages of a
    pipeline].

    Args:
        staged: Stages of this rank.
        schedule: Schedule of the pipeline.
        zero: ZeRO stage.
        reducer: Reducer of replicated parameters, if there is one.
    """

    def __init__(
        self, staged: StagedModel, schedule: Schedule, *, zero: int, reducer: Reducer | None
    ) -> None:
        self.staged = staged
        self.schedule = schedule
        self.zero = zero
        self.reducer = reducer
        model = staged.model
        self._blocks: set[Any] = set()
        stage_of_module: dict[Any, int] = {}
        for index, stage in staged.stages.items():
            for name in stage.blocks:
                block = model.get_submodule(name)
                self._blocks.add(block)
                stage_of_module.update(dict.fromkeys(block.modules(), index))
        # Blocks, and modules inside them that are sharded separately.
        self._units = [unit for unit in sharded_modules(model) if unit in stage_of_module]
        self._stage_of = {unit: stage_of_module[unit] for unit in self._units}
        self._root: FSDPModule | None = None
        if isinstance(model, FSDPModule):
            self._root = model
        # The root unit has the parameters outside the blocks: those before the blocks on the
        # first stage, those after them on the last, rarely more on others.
        self._root_stages = staged.cut.outside_stages() & set(staged.stages)
        # Backwards that each stage still has to run in this step.
        self._remaining: Counter[int] = Counter()
        self._first_action = next(
            row[0] for row in schedule.ranks if row and row[0].stage in staged.stages
        )
        self._initialised = False
        for index, unit in enumerate(self._units):
            # The first unit of a stage must not prefetch the unit that ran before it, because that
            # is the end of another micro-batch.
            if index == 0 or self._stage_of[self._units[index - 1]] != self._stage_of[unit]:
                unit.set_modules_to_backward_prefetch([unit])

    def forget(self) -> None:
        """Clear the state of a step that failed."""
        self._remaining.clear()

    def __call__(self, action: Action, done: bool) -> None:
        """Handle the start (`done` is False) or the end (`done` is True) of a computation."""
        if not self._initialised:
            # At this point all blocks of the rank are in the model, with their weights.
            self._initialised = True
            begin_sharded(self.staged.model)
        if action == self._first_action and not done:
            # An error may have ended the previous step.
            self._remaining.clear()
        if action.kind is Kind.FORWARD:
            return
        if not done:
            self._before_backward(action)
        elif action.kind in _COMPLETING_KINDS:
            self._after_backward(action.stage)

    def _before_backward(self, action: Action) -> None:
        if not self._remaining:
            # This is the first backward of a step.
            self._remaining.update(dict.fromkeys(self.staged.stages, self.schedule.microbatches))
        if self.reducer is not None:
            is_last = sum(self._remaining.values()) == 1
            self.reducer.synchronise = action.kind is Kind.BACKWARD and is_last
        self._set_flags(action.stage, reduce=not self.schedule.splits_backward)

    def _after_backward(self, stage: int) -> None:
        if self.schedule.splits_backward and self._root is not None:
            self._set_flags(stage, reduce=True)
            units = self._units_of(stage)
            if stage in self._root_stages:
                units.append(self._root)
            reduce_now(self._root, units)
        self._remaining[stage] -= 1
        # Addition removes the stages that have none left.
        self._remaining += Counter()

    def _units_of(self, stage: int) -> list[FSDPModule]:
        return [unit for unit in self._units if self._stage_of[unit] == stage]

    def _set_flags(self, stage: int, *, reduce: bool) -> None:
        """Set what `fully_shard` does with each unit at the end of a backward of `stage`."""
        after = _NOTHING_AFTER_BACKWARD
        for unit in self._units:
            if reduce:
                after = after_block_backward(
                    self.zero, self._remaining, ran=stage, block_stage=self._stage_of[unit]
                )
            set_unit_flags(unit, after)
        if self._root is None:
            return

        # By default the root would prefetch what ran last in a forward, which may be another stage.
        blocks = [unit for unit in self._units_of(stage) if unit in self._blocks]
        self._root.set_modules_to_backward_prefetch(blocks[-1:])
        if reduce:
            after = after_root_backward(
                self.zero, self._remaining, ran=stage, users=self._root_stages
            )
        set_unit_flags(self._root, after)


class StagePrefetcher:
    """`Runtime` observer that prefetches the offloaded activations of a stage.

    The prefetch for the last blocks of a stage starts when their backward is the next computation
    of the rank, so that the prefetch overlaps with the wait for the gradient. Each pair of
    micro-batch and stage has separate tensors in the store.
    """

    def __init__(
        self, store: ActivationStore, stages: Mapping[int, Stage], offloaded: Collection[str]
    ) -> None:
        self._store = store
        # Other stages start their prefetch when the backward of their last offloaded block begins
        # (`recompute`).
        self._ending_offloaded = {
            index for index, stage in stages.items() if stage.blocks[-1] in offloaded
        }
        # Functions that start a prefetch, by stage and micro-batch.
        self._prefetches: dict[tuple[int, int], Callable[[], None]] = {}

    def __call__(self, action: Action, done: bool) -> None:
        """Handle the start (`done` is False) or the end (`done` is True) of a computation."""
        key = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            if not done:
                self._store.begin()
            elif torch.is_grad_enabled() and action.stage in self._ending_offloaded:
                self._prefetches[key] = self._store.prefetcher()
        elif not done and action.kind is not Kind.WEIGHT and key in self._prefetches:
            self._prefetches.pop(key)()
