"""Detects silent mistakes of your own training loop, when an optimizer that holds the model's
parameters is about to step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait._torch.units import has_unreduced
from plait.errors import InputError
from plait.parallel.data.data_parallel import free_gathered
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepHook


class StepWatch(StepHook):
    """Checks every step of every torch optimizer of this process, until the model is deleted or
    passed to another engine.
    """

    def __init__(
        self,
        model: nn.Module,
        before: list[nn.Parameter],
        reducer: Reducer | None,
        *,
        why_called: str | None = None,
    ) -> None:
        """`before`: the parameters that the model had before it was sharded. `why_called`: why a
        step has to be `ParallelModel.step`, if it has.
        """
        self._reducer = reducer
        self._why_called = why_called
        self.inside = False
        """Whether `ParallelModel.step` is running."""
        self._model = weakref.ref(model)
        now = {id(parameter) for parameter in model.parameters()}
        self._now = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self._replaced = {
            id(parameter): weakref.ref(parameter)
            for parameter in before
            if id(parameter) not in now
        }
        self._frozen = {
            id(p): name
            for name, p in model.named_parameters()
            if not p.requires_grad and reducer is not None
        }
        self._is_mine: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        # The hook itself stays: a model may be collected while torch iterates over its hooks.
        for known in (self._now, self._replaced):
            weakref.finalize(model, known.clear).atexit = False

    def release(self) -> None:
        """Look no more."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        model = self._model()
        if model is None:
            return
        if optimizer not in self._is_mine:
            self._is_mine[optimizer] = self._look(optimizer)
        if not self._is_mine[optimizer]:
            return
        if self._why_called is not None and not self.inside:
            raise InputError(
                f"{self._why_called}: call sharded.step(optimizer) instead of optimizer.step()"
            )
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = {
            id(parameter): parameter
            for parameter in held
            if parameter.grad is not None and not self._knows(parameter)
        }
        if foreign and any(id(parameter) in foreign for parameter in model.parameters()):
            raise InputError(
                f"this {type(optimizer).__name__} holds {len(foreign)} parameters that were put"
                " into the model after plait.parallelize, so their gradients are this rank's"
                " alone; change the model before"
            )
        thawed = [
            self._frozen[id(p)]
            for p in held
            if p.grad is not None and id(p) in self._frozen and self._knows(p)
        ]
        if thawed:
            raise InputError(
                f"{thawed[0]} ({len(thawed)} parameters in all) was frozen when plait.parallelize"
                " was called and has a gradient now, which is this rank's alone; call"
                " requires_grad_(True) before plait.parallelize, and requires_grad_(False) after"
                " it for as long as the parameter is not trained"
            )
        if (self._reducer is not None and self._reducer.unfinished) or has_unreduced(model):
            raise InputError(
                "optimizer.step() after backwards inside accumulate() only, whose gradients are"
                " this rank's alone; the forward and backward of a step's last micro-batch go"
                " outside"
            )
        # a forward between the last backward and this would keep the old values, or be read
        # while they change
        free_gathered(model)

    def _look(self, optimizer: Optimizer) -> bool:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in held:
            known = self._replaced.get(id(parameter))
            if known is not None and known() is parameter:
                raise InputError(
                    f"this {type(optimizer).__name__} was built before plait.parallelize, which put"
                    " shards in place of its parameters: it would train nothing; build the"
                    " optimizer afterwards, over model.parameters()"
                )
        model = self._model()
        new = {id(parameter) for parameter in model.parameters()} if model is not None else set()
        return any(self._knows(parameter) or id(parameter) in new for parameter in held)

    def _knows(self, parameter: torch.Tensor) -> bool:
        known = self._now.get(id(parameter))
        return known is not None and known() is parameter
