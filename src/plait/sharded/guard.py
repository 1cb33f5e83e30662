"""Guards a training loop against mistakes: a step that failed leaves nothing behind, and calls that
would train something else are refused.

A failure is cleared when the handle is used again, not where it happens: there other ranks may be
in another place, and the exception must reach the user at once. Only a failure of all ranks can be
cleared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from plait._torch.units import drop_gradients, has_unreduced
from plait.comm.board import BACKWARD
from plait.comm.failures import failed_collective
from plait.comm.watch import WATCH
from plait.errors import InputError
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import Lost, StepHook
from plait.parallel.technique import Parts
from plait.parallel.tensor.styles import Region
from plait.sharded.misuse import MIXED_TENSORS


class Guard(StepHook):
    """For one handle."""

    def __init__(self, parts: Parts, handle: str = "engine") -> None:
        """`handle`: what the user has it as, for messages."""
        self.replaced = False
        """Whether the handle has the model no more."""
        self._parts = parts
        self._handle = handle
        self._lost: Lost | None = None
        self.known = {id(p): p for p in parts.model.parameters()}
        """The parameters that the model has had since it was sharded."""
        self._frozen = {
            name: p for name, p in parts.model.named_parameters() if not p.requires_grad
        }
        self._reducer = parts.noted(Reducer)
        self.backwards = 0
        """Of the step so far."""
        self.in_backward = False
        self.reduced = False
        """Whether the gradients of the step so far are sums over all ranks already."""

    def release(self) -> None:
        """The model is passed to another owner, or the handle is closed."""
        self.replaced = True

    @contextmanager
    def running(self, lost: Lost) -> Iterator[None]:
        """Around whatever runs the model. `lost`: what an exception costs."""
        try:
            yield
        except BaseException as error:
            self._lost = "step" if "step" in (lost, self._lost) else lost
            if isinstance(error, RuntimeError) and MIXED_TENSORS in str(error):
                raise InputError(_mixed(error, self._parts)) from error
            failure = failed_collective(
                error, "a collective of the forward, the backward or the update"
            )
            if failure is not None:
                raise failure from error
            raise

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around every backward of the handle's own."""
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
        """Before the handle is used: clear what a failure left. Returns whether the gradients of a
        step were lost. Collective after a failure, which all ranks had.
        """
        if self.replaced:
            raise InputError(
                f"this {self._handle} was closed, or its model given to another plait.initialize or"
                " plait.parallelize; use that"
            )
        lost = self._lost
        self._lost = None
        for hook in self._parts.hooks.all:
            lost = "step" if hook.has_refused else lost
            hook.has_refused = False
        if lost is None:
            return False
        for clear in self._parts.hooks.on_error:
            clear(lost)
        if lost == "step":
            self.drop()
        return lost == "step"

    def drop(self) -> None:
        """The gradients of the step so far."""
        drop_gradients(self._parts.model)
        for forget in self._parts.hooks.drop_gradients:
            forget()
        self.backwards = 0
        self.reduced = False

    def check_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an update that does not do what it seems to."""
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            held = {
                id(parameter) for group in optimizer.param_groups for parameter in group["params"]
            }
            thawed = [
                name
                for name in thawed
                if id(self._frozen[name]) not in held or not self._is_reduced(self._frozen[name])
            ]
        if thawed:
            raise InputError(
                f"{thawed[0]} ({len(thawed)} parameters in all) was frozen when plait.initialize"
                " was called and requires a gradient now, but it is not trained; call"
                " requires_grad_(True) before plait.initialize, and requires_grad_(False) after it"
                " for as long as the parameter is not trained"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self.known:
                    raise InputError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that"
                        " was not the model's when plait.initialize was called, so its gradient is"
                        " this rank's alone; put all parts into the model before, and freeze"
                        " (requires_grad_(False)) what shall begin later"
                    )
        if not self.backwards and any(
            parameter.grad is not None for parameter in self._parts.model.parameters()
        ):
            raise InputError(
                f"{self._handle}.step() found gradients that {self._handle}.backward did not make:"
                " loss.backward() does not divide by the number of micro-batches and ranks; call"
                f" {self._handle}.backward(loss)"
            )
        if has_unreduced(self._parts.model):
            remedy = (
                "call engine.step() after every backward, or"
                " engine.set_gradient_accumulation_boundary(True) before the forward and backward"
                " of the micro-batch that is the last"
                if self._handle == "engine"
                else (
                    "the forward and backward of a step's last micro-batch go outside of"
                    f" {self._handle}.accumulate()"
                )
            )
            raise InputError(
                f"{self._handle}.step() ends a step whose last backward was taken for one before"
                f" the last, so the gradients are this rank's alone; {remedy}"
            )
        self.backwards = 0

    def _is_reduced(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter's gradients are summed over ranks.

        Buckets do not include a parameter that was unfrozen within the step.
        """
        return self._reducer is None or self._reducer.reduces(parameter)


def _mixed(error: Exception, parts: Parts) -> str:
    """The message for code that computes with shards and full tensors together."""
    ways = []
    data = parts.noted(DataParallel)
    if data is not None and data.stage:
        read = "read no weight there" if data.stage == 3 else "read a weight after that"
        ways.append(
            f"outside of the model's forward its parameters are shards (ZeRO stage {data.stage}):"
            f" let forward= call the model and not the modules inside it, and {read}, or use ZeRO"
            " stage 0"
        )
    if parts.noted(Region) is not None:
        ways.append(
            "parallel.tp splits parameters (read parameter.full_tensor(), or call the module) and"
            " logits until the loss has them (change them with parallel.loss_parallel = false)"
        )
    return (
        f"{str(error).partition(' ')[0]} was given a full tensor together with one that is split"
        " over processes; " + ". ".join(ways)
    )


def checked_loss(loss: Any, handle: str = "engine") -> torch.Tensor:
    """What `backward` was given, if it can start from it."""
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"{handle}.backward takes the loss of a micro-batch, a tensor with one element, not"
            f" {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise InputError(
            f"{handle}.backward takes a loss with one element, not one of shape"
            f" {tuple(loss.shape)}; take its mean"
        )
    if not loss.requires_grad:
        raise InputError(
            f"{handle}.backward was given a loss without a gradient: it was detached, or computed"
            " under torch.no_grad()"
        )
    return loss
