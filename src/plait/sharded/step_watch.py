"""Checks of a user's own training loop when an optimizer is about to step.

With `plait.parallelize` the loop calls the optimizer itself. Some mistakes would train silently
wrong weights: an optimizer that was built before sharding, a parameter that was added or unfrozen
later, a step in the middle of gradient accumulation.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait._torch.units import has_unreduced
from plait.errors import InputError
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepHook
from plait.parallel.techniques.data_parallel import free_gathered


class StepWatch(StepHook):
    """Checks every step of every torch optimizer in this process that holds the model's parameters.

    It ends when the model is deleted or passed to another engine.

    Args:
        model: The sharded model.
        before: Parameters of the model before it was sharded.
        reducer: Reducer of the model's gradients, if there is one.
        why_called: The reason why a step has to be `ParallelModel.step`, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        before: list[nn.Parameter],
        reducer: Reducer | None,
        *,
        why_called: str | None = None,
    ) -> None:
        self._reducer = reducer
        self._why_called = why_called
        self.in_handle_step = False
        """True while `ParallelModel.step` runs."""
        self._model = weakref.ref(model)

        # Keyed by id, because parameters compare element by element. An id may be reused after a
        # parameter is deleted; the weak reference tells whether it is still the same one.
        self._current = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self._replaced = {
            id(parameter): weakref.ref(parameter)
            for parameter in before
            if id(parameter) not in self._current
        }
        self._frozen: dict[int, str] = {}
        if reducer is not None:
            self._frozen = {
                id(p): name for name, p in model.named_parameters() if not p.requires_grad
            }

        self._is_relevant: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        # The hook itself stays: a model may be collected while torch iterates over its hooks.
        for references in (self._current, self._replaced):
            weakref.finalize(model, references.clear).atexit = False

    def release(self) -> None:
        """Stop checking."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        model = self._model()
        if model is None:
            return
        if optimizer not in self._is_relevant:
            self._is_relevant[optimizer] = self._holds_parameters_of(model, optimizer)
        if not self._is_relevant[optimizer]:
            return

        if self._why_called is not None and not self.in_handle_step:
            raise InputError(
                f"{self._why_called}: call sharded.step(optimizer) instead of optimizer.step()"
            )

        updated = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._refuse_added_parameters(model, optimizer, updated)
        self._refuse_unfrozen_parameters(updated)
        if (self._reducer is not None and self._reducer.unfinished) or has_unreduced(model):
            raise InputError(
                "optimizer.step() was called after backwards inside accumulate() only, which does"
                " not reduce gradients; run the forward and backward of a step's last micro-batch"
                " outside of it"
            )

        # A forward between the last backward and this step would otherwise keep the old values, or
        # read parameters while they change.
        free_gathered(model)

    def _refuse_added_parameters(
        self, model: nn.Module, optimizer: Optimizer, updated: list[torch.Tensor]
    ) -> None:
        added = {id(p) for p in updated if not self._is_current(p)}
        if added and any(id(parameter) in added for parameter in model.parameters()):
            raise InputError(
                f"this {type(optimizer).__name__} has {len(added)} parameters that were put"
                " into the model after plait.parallelize, so their gradients are not reduced;"
                " change the model before that call"
            )

    def _refuse_unfrozen_parameters(self, updated: list[torch.Tensor]) -> None:
        unfrozen = [
            self._frozen[id(p)] for p in updated if id(p) in self._frozen and self._is_current(p)
        ]
        if unfrozen:
            raise InputError(
                f"{unfrozen[0]} ({len(unfrozen)} parameters in all) was frozen when"
                " plait.parallelize was called and has a gradient now, which is not reduced;"
                " call requires_grad_(True) before plait.parallelize, and requires_grad_(False)"
                " after it for as long as the parameter is not trained"
            )

    def _holds_parameters_of(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Return True if an optimizer holds parameters of the model.

        Raises:
            InputError: It holds parameters that sharding has replaced.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            reference = self._replaced.get(id(parameter))
            if reference is not None and reference() is parameter:
                raise InputError(
                    f"this {type(optimizer).__name__} was built before plait.parallelize, which put"
                    " shards in place of its parameters: it would train nothing; build the"
                    " optimizer afterwards, over model.parameters()"
                )
        ids = {id(parameter) for parameter in model.parameters()}
        return any(self._is_current(p) or id(p) in ids for p in parameters)

    def _is_current(self, parameter: torch.Tensor) -> bool:
        """Return True if the model had the parameter when the watch began."""
        reference = self._current.get(id(parameter))
        return reference is not None and reference() is parameter
