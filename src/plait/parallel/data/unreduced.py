"""Gradients of micro-batches that are not reduced yet, and calls that drop them.

Note [Dropping unreduced gradients]
    In a single process `zero_grad()` between two micro-batches drops the gradients of the step so
    far. A sharded model has them in two sets of parameters, and `zero_grad` sees one:

    * `optimizer.zero_grad` finds shards, whose `grad` is None where gradients are reduced in the
      last backward only (ZeRO 1, and hybrid sharding).
    * `model.zero_grad` finds the gathered parameters after a forward, and at ZeRO 1 and 2 also
      between the micro-batches of a step. Their `grad` is None if it was reduced.

    What is not seen would enter the next step. After every micro-batch but the last, one parameter
    of each unit therefore gets a gradient of zeros in each set (`StandIn`). If the caller has
    dropped one of them, the unit's gradients are dropped before the next forward, backward or
    update. A stand-in is removed before a backward, which would add to it.

    One parameter stands for its unit. If two optimizers share a unit and only one of them drops its
    gradients, all unreduced gradients of the unit are dropped or none.
"""

from __future__ import annotations

import torch
from torch import nn

from plait._torch.passes import around_backward
from plait._torch.stand_ins import StandIn
from plait._torch.units import all_parameter_groups
from plait.errors import InputError
from plait.parallel.data.unused import UnusedTracker
from plait.parallel.hooks import StepHook


class UnreducedGradients(StepHook):
    """Drops unreduced gradients where the caller drops gradients.

    See Note [Dropping unreduced gradients].

    Args:
        model: The sharded root.
        tracker: Tracker of the parameters that the step has used, which must be attached already.
    """

    def __init__(self, model: nn.Module, tracker: UnusedTracker | None) -> None:
        self._tracker = tracker
        self._stand_ins = [StandIn(group) for group in all_parameter_groups(model)]
        self._is_last = True
        model.register_forward_pre_hook(lambda *_: self.check(), prepend=True)
        model.register_forward_hook(lambda *_: self._place_gathered())
        # The first function to begin and the last to end a backward. The tracker must not see a
        # stand-in.
        around_backward(model, begin=self._remove, end=self._place)

    def before_microbatch(self, last: bool) -> None:
        """Place stand-ins after every micro-batch but the last of a step."""
        self._is_last = last

    def drop_gradients(self) -> None:
        """Forget the stand-ins, whose gradients are dropped."""
        for stand_in in self._stand_ins:
            stand_in.forget()

    def _place(self) -> None:
        if self._is_last:
            return
        for stand_in in self._stand_ins:
            stand_in.place()

    def _place_gathered(self) -> None:
        if not torch.is_grad_enabled():
            return
        for stand_in in self._stand_ins:
            if stand_in.is_placed:
                stand_in.place_gathered()
            elif stand_in.group.is_unsharded:
                stand_in.place()

    def _remove(self) -> None:
        self.check()
        for stand_in in self._stand_ins:
            if stand_in.is_placed:
                stand_in.remove()

    def check(self) -> None:
        """Drop the unreduced gradients of the units whose gradients the caller has dropped.

        Raises:
            InputError: A gradient was changed that is not reduced yet.
        """
        for stand_in in self._stand_ins:
            if not stand_in.is_placed:
                continue
            change = stand_in.change()
            if change == "written":
                self.has_refused = True
                raise InputError(
                    "a gradient was changed between the micro-batches of a step, whose gradients"
                    " are not reduced yet; change gradients (clip_grad_norm_, for example) after"
                    " the backward of the step's last micro-batch, or drop them with"
                    " optimizer.zero_grad()"
                )
            if change != "none":
                stand_in.drop()
            if change == "dropped" and self._tracker is not None:
                self._tracker.forget(stand_in.shards)
