"""ZeRO stages of a pipeline: reductions and freed parameters after each computation.

The rules of `accounting.zero_rule` hold per pipeline stage, with the stage's micro-batches as the
accumulation steps. torch's flags are set on each unit before each backward, because the stages of
one rank end their steps at different times. A backward in two halves reduces when its second half
has run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.fsdp import FSDPModule

from plait._torch.passes import begin_sharded, reduce_now
from plait._torch.units import sharded_modules
from plait.parallel.accounting.zero_rule import (
    AfterBackward,
    after_block_backward,
    after_root_backward,
)
from plait.parallel.data.reducer import Reducer
from plait.parallel.pipeline.stage import StagedModel
from plait.parallel.schedules.actions import Action, Kind
from plait.parallel.schedules.schedule import Schedule

# Computations after which a micro-batch's gradients on a stage are complete.
_COMPLETING_KINDS = (Kind.BACKWARD, Kind.WEIGHT)

# Flags with which gradients accumulate and parameters stay gathered.
_NOTHING_AFTER_BACKWARD = AfterBackward(False, False, False)


class StagedZero:
    """Observer of a `Runtime` that sets when units reduce gradients and free parameters.

    Units are the modules that `fully_shard` gathers and reduces as one.

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
        # Blocks, and modules inside of them that are sharded separately.
        self._stage_of: dict[FSDPModule, int] = {}
        for unit in sharded_modules(model):
            if unit in stage_of_module:
                self._stage_of[unit] = stage_of_module[unit]
        self._units = list(self._stage_of)
        self._root = model if isinstance(model, FSDPModule) else None
        # The root unit has the parameters outside of the blocks: those before the blocks on the
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
        """Handle the begin (`done` False) or the end of a computation."""
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
        """Set torch's flags for the end of a backward of `stage`."""
        after = _NOTHING_AFTER_BACKWARD
        for unit in self._units:
            if reduce:
                after = after_block_backward(
                    self.zero, self._remaining, ran=stage, own=self._stage_of[unit]
                )
            _set_unit_flags(unit, after)
        if self._root is None:
            return

        # By default the root would prefetch what ran last in a forward, which may be another stage.
        blocks = [unit for unit in self._units_of(stage) if unit in self._blocks]
        self._root.set_modules_to_backward_prefetch(blocks[-1:])
        if reduce:
            after = after_root_backward(
                self.zero, self._remaining, ran=stage, users=self._root_stages
            )
        _set_unit_flags(self._root, after)


def _set_unit_flags(unit: FSDPModule, after: AfterBackward) -> None:
    unit.set_requires_gradient_sync(after.reduce, recurse=False)
    unit.set_requires_all_reduce(after.last, recurse=False)
    unit.set_reshard_after_backward(after.free, recurse=False)
