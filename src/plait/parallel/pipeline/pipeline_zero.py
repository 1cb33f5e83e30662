"""What the ZeRO stages mean under a pipeline: which gradients are reduced, and which parameters are
freed, after each computation.

The meanings of `data.py` hold per pipeline stage, with the stage's micro-batches as the
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
from plait.parallel.accounting.zero_rule import AfterBackward, of_block, of_root
from plait.parallel.data.reducer import Reducer
from plait.parallel.pipeline.stage import StagedModel
from plait.parallel.schedules.actions import Action, Kind
from plait.parallel.schedules.schedule import Schedule

_ENDS = (Kind.BACKWARD, Kind.WEIGHT)
"""After these a micro-batch's gradients on a stage are complete."""


class StagedZero:
    """An observer of a `Runtime` (see there)."""

    def __init__(
        self, staged: StagedModel, schedule: Schedule, *, zero: int, reducer: Reducer | None
    ) -> None:
        self.staged = staged
        self.schedule = schedule
        self.zero = zero
        self.reducer = reducer
        model = staged.model
        named = [
            (index, model.get_submodule(name))
            for index, stage in staged.stages.items()
            for name in stage.blocks
        ]
        self._blocks: set[Any] = {block for _, block in named}
        inside: dict[Any, int] = {
            module: index for index, block in named for module in block.modules()
        }
        self._units = [unit for unit in sharded_modules(model) if unit in inside]
        """Blocks, and what is sharded apart inside of them."""
        self._stage_of = {unit: inside[unit] for unit in self._units}
        self._root = model if isinstance(model, FSDPModule) else None
        # The root unit holds what is outside of the blocks: the front on the first stage, the back
        # on the last, rarely more on others.
        self._root_stages = staged.cut.outside_stages() & set(staged.stages)
        self._left: Counter[int] = Counter()
        self._first = next(
            row[0] for row in schedule.ranks if row and row[0].stage in staged.stages
        )
        self._begun = False
        for index, unit in enumerate(self._units):
            # The first unit of a stage must not gather ahead what ran before it: that is the end of
            # another micro-batch.
            if index == 0 or self._stage_of[self._units[index - 1]] != self._stage_of[unit]:
                unit.set_modules_to_backward_prefetch([unit])

    def forget(self) -> None:
        """The step that ran has failed."""
        self._left.clear()

    def __call__(self, action: Action, done: bool) -> None:
        """Before (`done` False) and after every computation."""
        if not self._begun:  # with all blocks of the rank in the model, and with their weights
            self._begun = True
            begin_sharded(self.staged.model)
        if action == self._first and not done:
            self._left.clear()  # of a step that an error ended
        if action.kind is Kind.FORWARD:
            return
        if not done:
            if not self._left:  # the first backward of a step
                self._left.update(dict.fromkeys(self.staged.stages, self.schedule.microbatches))
            if self.reducer is not None:
                self.reducer.synchronise = (
                    action.kind is Kind.BACKWARD and sum(self._left.values()) == 1
                )
            self._set(action.stage, reduce=not self.schedule.splits_backward)
            return
        if action.kind in _ENDS:
            if self.schedule.splits_backward and self._root is not None:
                self._set(action.stage, reduce=True)
                reduce_now(
                    self._root,
                    [
                        *self._of(action.stage),
                        *([self._root] if action.stage in self._root_stages else []),
                    ],
                )
            self._left[action.stage] -= 1
            self._left += Counter()  # forget stages that have none left

    def _of(self, stage: int) -> list[FSDPModule]:
        return [unit for unit in self._units if self._stage_of[unit] == stage]

    def _set(self, stage: int, *, reduce: bool) -> None:
        """Flags for the end of a backward of `stage`."""
        later = AfterBackward(False, False, False)
        for unit in self._units:
            _flags(
                unit,
                (
                    of_block(self.zero, self._left, ran=stage, own=self._stage_of[unit])
                    if reduce
                    else later
                ),
            )
        if self._root is not None:
            # By itself the root would gather ahead what ran last in a forward, which may be another
            # stage.
            self._root.set_modules_to_backward_prefetch(
                [unit for unit in self._of(stage) if unit in self._blocks][-1:]
            )
            _flags(
                self._root,
                (
                    of_root(self.zero, self._left, ran=stage, users=self._root_stages)
                    if reduce
                    else later
                ),
            )


def _flags(unit: FSDPModule, then: AfterBackward) -> None:
    unit.set_requires_gradient_sync(then.reduce, recurse=False)
    unit.set_requires_all_reduce(then.last, recurse=False)
    unit.set_reshard_after_backward(then.free, recurse=False)
