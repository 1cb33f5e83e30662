"""Guards of a training loop, which clean up after failed steps and refuse wrong calls.

`Guard` watches the calls of one sharded model. `RunningForwards` counts the forwards of a model
that are running. `UnchangedParameters` warns about parameters that training does not change.

Note [Clearing a failed step]
    A failure is cleared when the sharded model is used again (`Guard.recover`), not when it
    happens. When it happens, other ranks may be at another point of the step, and the exception
    must reach the user at once. Clearing is collective, so only a failure of all ranks can be
    cleared.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.tensors import local_tensor
from plait._torch.units import drop_gradients, has_unreduced, sharded_modules
from plait.cluster.accelerator import HostCopy
from plait.cluster.layout import SAMPLE_AXES
from plait.cluster.mesh import Mesh
from plait.comm.failures import failed_collective
from plait.comm.hang import BACKWARD
from plait.comm.watch import WATCH
from plait.errors import InputError, warn
from plait.names import listed_names
from plait.parallel.hooks import FailureScope, StepHook, UncopiedHook
from plait.parallel.parts import Parts
from plait.sharded.alike import bits_of
from plait.sharded.misuse import MIXED_TENSORS


class Guard(StepHook):
    """Detection of misuse of one sharded model, which belongs to an engine or a `ParallelModel`.

    Args:
        parts: The model after all techniques were applied.
        variable: Name of the user's variable, for messages.

    Attributes:
        replaced: Whether the sharded model was closed, or another owner has the model.
        known: Parameters that the model has had since it was sharded, by id.
        backwards: Number of backwards in the step so far.
        in_backward: Whether a backward is running.
        reduced: Whether the gradients of the step so far are already sums over all ranks.
        units: Modules that are gathered and reduced as one.
    """

    def __init__(self, parts: Parts, variable: str = "engine") -> None:
        self.replaced = False
        self._parts = parts
        self._variable = variable
        self._forward_handle: Any = None
        self._lost: FailureScope | None = None
        self.known = {id(p): p for p in parts.model.parameters()}
        self._frozen = {
            name: p for name, p in parts.model.named_parameters() if not p.requires_grad
        }
        self._reducer = parts.reducer
        self.units = sharded_modules(parts.model)
        self.backwards = 0
        self.in_backward = False
        self.reduced = False
        if parts.zero_stage or parts.region is not None:
            _GUARDS.add(self)
            _explain_uncaught_errors()

    def release(self) -> None:
        """Refuse further use: the sharded model was closed, or another owner has the model."""
        self.replaced = True
        _GUARDS.discard(self)
        if self._forward_handle is not None:
            self._forward_handle.remove()

    def recover_in_forwards(self) -> None:
        """Also recover from a failed backward, at the start of the next forward of the model.

        In the user's own training loop no call of Plait follows a `loss.backward()` that
        raises.
        """

        def recover_if_failed(*_: object) -> None:
            if self.backward_has_failed:
                self.recover()

        # It precedes the hook in which torch begins a forward.
        self._forward_handle = self._parts.model.register_forward_pre_hook(
            UncopiedHook(recover_if_failed), prepend=True
        )

    @property
    def backward_has_failed(self) -> bool:
        """True if an exception has ended a `loss.backward()` of the user's own training loop."""
        return any(failed() for failed in self._parts.hooks.backward_failed)

    @contextmanager
    def running(self, lost: FailureScope) -> Iterator[None]:
        """Record a failure of the code that runs the model inside the context.

        Args:
            lost: What is lost if the code raises.

        Raises:
            InputError: The code computed with shards and full tensors together.
            PlaitError: A collective of the code failed.
        """
        try:
            yield
        except BaseException as error:
            # A lost step includes a lost forward.
            if self._lost != "step":
                self._lost = lost
            self.refuse_mixed_tensors(error)
            failure = failed_collective(
                error, "a collective of the forward, the backward or the update"
            )
            if failure is not None:
                raise failure from error
            raise

    def refuse_mixed_tensors(self, error: BaseException) -> None:
        """Raise InputError if `error` is torch's error about mixing shards and full tensors."""
        if _is_of_mixed_tensors(error):
            raise InputError(_mixed_tensors_message(error, self._parts)) from error

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return the context in which every backward of the sharded model runs."""
        self.backwards += 1
        self.reduced = False
        WATCH.phase(BACKWARD)
        with self.running("step"), self._parts.hooks.backward():
            self.in_backward = True
            try:
                yield
            finally:
                self.in_backward = False

    def recover(self) -> bool:
        """Clear the state after a failure. Collective if all ranks failed.

        Every call of the sharded model does this first. See Note [Clearing a failed step].

        Returns:
            Whether the gradients of a step were lost.

        Raises:
            InputError: The sharded model was closed, or no longer owns the model.
        """
        if self.replaced:
            raise InputError(
                f"this {self._variable} was closed, or its model was passed to another"
                " plait.initialize or plait.parallelize; use the result of that call"
            )
        lost = self._lost
        self._lost = None
        if self.backward_has_failed:
            lost = "step"
        for hook in self._parts.hooks.all:
            if hook.has_refused:
                lost = "step"
            hook.has_refused = False
        if lost is None:
            return False

        for clear in self._parts.hooks.on_error:
            clear(lost)
        if lost == "step":
            self.drop()
        return lost == "step"

    def drop(self) -> None:
        """Drop the gradients of the step so far."""
        drop_gradients(self._parts.model)
        for callback in self._parts.hooks.drop_gradients:
            callback()
        self.backwards = 0
        self.reduced = False

    def check_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError if an optimizer step would use missing or unreduced gradients.

        Args:
            optimizer: The optimizer whose step would follow.
        """
        self._refuse_unfrozen_parameters(optimizer)
        self._refuse_added_parameters(optimizer)
        if not self.backwards and any(
            parameter.grad is not None for parameter in self._parts.model.parameters()
        ):
            raise InputError(
                f"{self._variable}.step() found gradients that {self._variable}.backward did not"
                " produce: loss.backward() does not divide by the number of micro-batches and"
                f" ranks; call {self._variable}.backward(loss)"
            )
        if has_unreduced(self.units):
            self._refuse_unreduced_gradients()
        self.backwards = 0

    def _refuse_unfrozen_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if not unfrozen:
            return  # The usual case, which needs no look at the optimizer.

        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        untrained = [
            name
            for name in unfrozen
            if id(self._frozen[name]) not in updated or not self._is_reduced(self._frozen[name])
        ]
        if untrained:
            raise InputError(
                f"{untrained[0]} ({len(untrained)} parameters in all) was frozen when"
                " plait.initialize was called and requires a gradient now, but it is not trained;"
                " call plait.initialize while it is trainable, and freeze it afterwards"
                " (requires_grad_(False)) until its training starts"
            )

    def _refuse_added_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self.known:
                    raise InputError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that was"
                        " not part of the model when plait.initialize was called, so its gradient"
                        " is not reduced; add all modules before that call, and freeze"
                        " (requires_grad_(False)) the parameters whose training starts later"
                    )

    def _refuse_unreduced_gradients(self) -> None:
        remedy = (
            "run the forward and backward of a step's last micro-batch outside"
            f" {self._variable}.accumulate()"
        )
        if self._variable == "engine":
            remedy = (
                "call engine.step() after every backward, or"
                " engine.set_gradient_accumulation_boundary(True) before the forward and backward"
                " of the last micro-batch"
            )
        raise InputError(
            f"{self._variable}.step() was called after a backward that was not marked as the last"
            f" of the step, so the gradients are not reduced; {remedy}"
        )

    def _is_reduced(self, parameter: nn.Parameter) -> bool:
        """Return True if a parameter's gradients are summed over ranks.

        Buckets do not include a parameter that was unfrozen within the step.
        """
        return self._reducer is None or self._reducer.reduces(parameter)


_GUARDS: weakref.WeakSet[Guard] = weakref.WeakSet()
"""Guards of models whose parameters or activations are split."""


@functools.cache
def _explain_uncaught_errors() -> None:
    """Add an explanation to torch's error about mixed tensors if no code catches the error.

    A loop that computes a loss between forward and backward gets this error from torch, outside of
    any call of Plait. `sys.excepthook` adds a note under torch's message.
    """
    report = sys.excepthook

    def explain_and_report(kind: Any, error: BaseException, trace: Any) -> None:
        if _is_of_mixed_tensors(error):
            notes = {_mixed_tensors_message(error, guard._parts) for guard in _GUARDS}
            for note in sorted(notes):
                error.add_note(note)
        report(kind, error, trace)

    sys.excepthook = explain_and_report


def _is_of_mixed_tensors(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and MIXED_TENSORS in str(error)


def _mixed_tensors_message(error: BaseException, parts: Parts) -> str:
    """Return the message for code that computes with shards and full tensors together."""
    explanations = []
    stage = parts.zero_stage
    if stage:
        read = "read no weight there" if stage == 3 else "read a weight after that"
        explanations.append(
            f"outside the model's forward its parameters are shards (ZeRO stage {stage}):"
            f" let forward= call the model and not the modules inside it, and {read}, or use ZeRO"
            " stage 0"
        )
    if parts.region is not None:
        explanations.append(
            "parallel.tp splits parameters (read parameter.full_tensor(), or call the module) and"
            " logits until the loss has them (change them with parallel.loss_parallel = false)"
        )
    operator = str(error).partition(" ")[0]
    return (
        f"{operator} was given a full tensor together with one that is split"
        " over processes; " + ". ".join(explanations)
    )


def checked_loss(loss: Any, variable: str = "engine") -> torch.Tensor:
    """Return the argument of `backward` if it is a tensor that a backward can start from.

    Args:
        loss: The argument.
        variable: Name of the user's variable, for messages.

    Raises:
        InputError: The argument is not a tensor, has more than one element, or requires no
            gradient.
    """
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"{variable}.backward takes the loss of a micro-batch, a tensor with one element, not"
            f" {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise InputError(
            f"{variable}.backward takes a loss with one element, not one of shape"
            f" {tuple(loss.shape)}; take its mean"
        )
    if not loss.requires_grad:
        raise InputError(
            f"{variable}.backward was given a loss without a gradient: it was detached, or computed"
            " under torch.no_grad(); compute the loss from the model's output with gradients"
            " enabled"
        )
    return loss


class RunningForwards:
    """Counter of a model's running forwards, including nested ones.

    Calls that need all ranks are refused while a forward runs, because they would deadlock or
    change the state of this forward.

    Attributes:
        running: Number of forwards that are running.
    """

    def __init__(self, model: nn.Module) -> None:
        self.running = 0

        def begin(*_: object) -> None:
            self.running += 1

        def end(*_: object) -> None:
            # It runs without `begin` if a pre-hook that was prepended later raises.
            self.running = max(0, self.running - 1)

        self._handles = [
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        ]

    def close(self) -> None:
        """Stop counting the model's forwards."""
        for handle in self._handles:
            handle.remove()


STEPS = 10
"""Number of updates after which parameters are compared with their first values."""


class UnchangedParameters:
    """Comparison of all trainable parameters before the first update and after `STEPS` updates.

    It compares a sum over the bits of each parameter. Other steps cost nothing.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        self._names: list[str] = []
        self._before: torch.Tensor | None = None
        """Sum of each parameter before the first update: [parameters], int64."""
        self._changed: HostCopy | None = None
        """Flags of the comparison, on their way to the host: [parameters], 1 for changed."""
        self._updates = 0

    def before_update(self) -> None:
        """Record the parameters before the first update."""
        if self._updates == 0 and self._before is None:
            self._names = [
                name
                for name, parameter in self._model.named_parameters()
                if _can_be_compared(parameter)
            ]
            self._before = self._digests()

    def after_update(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        """Count an update. After `STEPS` updates, find parameters that have not changed.

        Collective in update `STEPS`. The next call reads the result without waiting for the
        device, and warns about trained parameters that have not changed.

        Args:
            optimizer: The optimizer, whose groups with a learning rate of 0 do not count.
            skipped: Whether the step was skipped.
        """
        if self._updates > STEPS:
            return
        if self._updates == STEPS:
            self._updates += 1
            self._warn(optimizer)
            return
        if skipped or not any(float(group["lr"]) > 0 for group in optimizer.param_groups):
            return
        self._updates += 1
        if self._updates == STEPS:
            self._compare()

    def _digests(self) -> torch.Tensor:
        parameters = dict(self._model.named_parameters())
        sums = [
            bits_of(local_tensor(parameters[name].detach()))
            for name in self._names
            if name in parameters
        ]
        # A pipeline stage may train nothing.
        if not sums:
            return torch.zeros(0, dtype=torch.int64, device=self._mesh.device)
        return torch.stack(sums)

    def _compare(self) -> None:
        assert self._before is not None
        digests = self._digests()
        if len(digests) != len(self._before):
            # Layers have been replaced since the first update.
            self._updates = STEPS + 1
            return
        changed = (digests != self._before).to(torch.uint8)
        self._before = None
        # A shard may be unchanged where others are not.
        for axes in (SAMPLE_AXES, ("tp",)):
            group = self._mesh.group(*axes)
            if group is not None and len(changed):
                dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=group)
        self._changed = HostCopy(changed)

    def _warn(self, optimizer: torch.optim.Optimizer) -> None:
        if self._changed is None or self._mesh.rank != 0:
            return
        flags = self._changed.values().tolist()
        parameters = dict(self._model.named_parameters())
        trained = {
            p for group in optimizer.param_groups if float(group["lr"]) > 0 for p in group["params"]
        }
        unchanged = [
            name
            for name, changed in zip(self._names, flags, strict=True)
            if not changed
            and name in parameters
            and parameters[name].requires_grad
            and parameters[name] in trained
        ]
        if unchanged:
            warn(
                f"{listed_names(unchanged, 1)} did not change in the first {STEPS} updates,"
                " although it requires a gradient: the loss does not depend on it, its gradient is"
                " zero, or the updates are below the precision of its dtype; freeze it"
                " (requires_grad_(False)) if it should not change"
            )


def _can_be_compared(parameter: nn.Parameter) -> bool:
    local = local_tensor(parameter.detach())
    storage = local.untyped_storage()
    # A parameter on disk has no memory between its uses. Where its file is mapped, a comparison
    # would read all of it into memory.
    is_in_memory = storage.nbytes() > 0 and storage.filename is None
    return parameter.requires_grad and (local.numel() == 0 or is_in_memory)
