"""What stands between a loop's mistakes and its numbers: a step that failed leaves nothing behind, and calls that would train something
else are refused.

A failure is cleared when the engine is used again, not where it happens: there other ranks may be in another place, and the exception must
reach the user at once. Only a failure of all ranks can be cleared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from plait._torch.passes import reset_failed_step
from plait._torch.units import drop_gradients, has_unreduced
from plait.engine.step import Stepper
from plait.errors import InputError, PlaitError
from plait.parallel import compression
from plait.parallel.pipeline import PipelineRank
from plait.parallel.technique import Parts
from plait.parallel.unused import UnusedTracker

Lost = Literal["", "forward", "step"]
"""What a failure has cost: nothing; a forward, which has added to no gradient; all gradients of the step."""


_MIXED = "got mixed torch.Tensor and DTensor"


class Guard:
    """For one engine."""

    def __init__(self, parts: Parts, *, stepper: Stepper, unused: UnusedTracker | None, pipeline: PipelineRank | None) -> None:
        self.replaced = False
        """Whether the engine has the model no more."""
        self._parts, self._stepper, self._unused, self._pipeline = parts, stepper, unused, pipeline
        self._lost: Lost = ""
        self._known = {id(p): p for p in parts.model.parameters()}
        self._frozen = {name: p for name, p in parts.model.named_parameters() if not p.requires_grad}
        self.backwards = 0
        """Of the step so far."""
        for listener in (parts.reducer, unused):
            if listener is not None:
                listener.accepts = False

    def let_go(self) -> None:
        """The model goes to somebody else, or the engine is closed."""
        self.replaced = True
        if self._stepper.in_backward is not None:
            self._stepper.in_backward.detach()

    @contextmanager
    def running(self, lost: Lost) -> Iterator[None]:
        """Around whatever runs the model. `lost`: what an exception costs."""
        try:
            yield
        except BaseException as error:
            self._lost = "step" if "step" in (lost, self._lost) else lost
            if isinstance(error, RuntimeError) and _MIXED in str(error):
                raise InputError(_mixed(error, self._parts)) from error
            raise

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around every backward of the engine's own."""
        self.backwards += 1
        with ExitStack() as stack:
            stack.enter_context(self.running("step"))
            for listener in (self._parts.reducer, self._unused):
                if listener is not None:
                    stack.enter_context(listener.backward())
            yield

    def settle(self) -> bool:
        """Before the engine is used: clear what a failure left. Returns whether the gradients of a step were lost. Collective after a
        failure, which all ranks had."""
        if self.replaced:
            raise InputError("this engine was closed, or its model given to another plait.initialize or plait.parallelize; use that one")
        lost, self._lost = self._lost, ""
        if not lost:
            return False
        if lost == "step" and self._stepper.in_backward is not None and self._stepper.in_backward.take_norms():
            raise PlaitError(
                "parallel.optimizer_in_backward: the step failed when some parameters were updated already; load a checkpoint, or use false"
            )
        reset_failed_step(self._parts.model, keep_gradients=lost == "forward")
        if self._pipeline is not None:
            self._pipeline.forget()
        if self._parts.activation_store is not None:
            self._parts.activation_store.begin()
        if lost == "step":
            if self._parts.reducer is not None:
                self._parts.reducer.abandon()
            self.drop_gradients()
        return lost == "step"

    def drop_gradients(self) -> None:
        """Those of the step so far."""
        if self._parts.reducer is not None:
            self._parts.reducer.forget()
        drop_gradients(self._parts.model)
        compression.settle(self._parts, skipped=True, factor=1.0)
        if self._unused is not None:
            self._unused.forget()
        self.backwards = 0

    def _held(self, parameter: torch.Tensor) -> bool:
        return any(parameter is other for group in self._stepper.optimizer.param_groups for other in group["params"])

    def check_update(self) -> None:
        """Refuse an update that does not do what it seems to."""
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed and (self._parts.reducer is not None or not self._held(self._frozen[thawed[0]])):
            raise InputError(
                f"{thawed[0]} ({len(thawed)} parameters in all) was frozen when plait.initialize was called and requires a gradient now, "
                "but it is not trained; call requires_grad_(True) before, and requires_grad_(False) afterwards where it shall rest"
            )
        for group in self._stepper.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._known:
                    raise InputError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that was not the model's when plait.initialize "
                        "was called, so its gradient is this rank's alone; put all parts into the model before, and freeze "
                        "(requires_grad_(False)) what shall begin later"
                    )
        if not self.backwards and any(parameter.grad is not None for parameter in self._stepper.parameters):
            raise InputError(
                "engine.step() found gradients that engine.backward did not make: loss.backward() does not divide by the number of "
                "micro-batches and ranks; call engine.backward(loss)"
            )
        if has_unreduced(self._parts.model):
            raise InputError(
                "engine.step() ends a step whose last backward was taken for one before the last, so the gradients are this rank's alone; "
                "call engine.step() after every backward, or engine.set_gradient_accumulation_boundary(True) before the forward and "
                "backward of the micro-batch that is the last"
            )
        self.backwards = 0


def _mixed(error: Exception, parts: Parts) -> str:
    """The message for code that computes with shards and full tensors together."""
    ways = []
    if parts.stage:
        read = "read no weight there" if parts.stage == 3 else "read a weight after that"
        ways.append(
            f"outside of the model's forward its parameters are shards (ZeRO stage {parts.stage}): let forward= call the model and not the "
            f"modules inside it, and {read}, or use ZeRO stage 0"
        )
    if parts.tensor_region is not None:
        ways.append(
            "parallel.tp splits parameters (read parameter.full_tensor(), or call the module) and logits until the loss has them (change "
            "them with parallel.loss_parallel = false)"
        )
    return f"{str(error).partition(' ')[0]} was given a full tensor together with one that is split over processes; " + ". ".join(ways)


def checked_loss(loss: Any) -> torch.Tensor:
    """What engine.backward was given, if it can start from it."""
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"engine.backward takes the loss of a micro-batch, a tensor with one element, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise InputError(f"engine.backward takes a loss with one element, not one of shape {tuple(loss.shape)}; take its mean")
    if not loss.requires_grad:
        raise InputError("engine.backward was given a loss without a gradient: it was detached, or computed under torch.no_grad()")
    return loss
