"""`plait.parallelize`: a sharded model for your own training loop.

With most configurations a plain loop is enough: `loss.backward()` leaves gradients that are means
over the data-parallel ranks, as with DistributedDataParallel, and any optimizer can apply them.
Other configurations must run the step themselves (see `reason_for_step`). With these the loop calls
`sharded.backward(loss)` or `sharded.forward_backward(batch, loss_fn)`, and then
`sharded.step(optimizer)`. These calls work with every configuration.

Some mistakes of a loop would silently train wrong weights: an optimizer that was built before
sharding, a parameter that was added or unfrozen later, a step in the middle of gradient
accumulation. `StepWatch` refuses them when an optimizer is about to step.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait._torch.passes import backward_was_interrupted, graph_task
from plait._torch.tensors import local_tensor
from plait._torch.units import has_unreduced, sharded_modules
from plait.cluster.mesh import Mesh
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, InputError, ModelError, Problem, raise_problems
from plait.model.experts import enables_balance_loss
from plait.model.positions import call_model
from plait.optim.gradient_math import multiply_all
from plait.optim.optimizer import step_by_placement
from plait.parallel.data.compression import Residuals
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import StepHook
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.parts import Parts
from plait.parallel.techniques.data_parallel import free_gathered
from plait.sharded.assemble import (
    ConfigLike,
    checked_model,
    destroying_new_group,
    resolved_for,
    shard,
)
from plait.sharded.guard import checked_loss
from plait.sharded.misuse import checked_optimizer, refuse_own_batches
from plait.sharded.model import ShardedModel, refuse_taken, take_over
from plait.sharded.step import StepOutcome, Stepper, clip_factor

MeanLoss = Callable[[Any, Any], torch.Tensor]
"""Function (output, micro-batch) -> mean loss of the micro-batch, 0-dimensional."""


@destroying_new_group()
def parallelize(
    model: nn.Module,
    config: ConfigLike,
    *,
    weights: str | Path | None = None,
    forward: Forward = default_forward,
) -> ParallelModel:
    """Shard a model in place, for your own training loop. Collective.

    `loss.backward()` then leaves gradients that are means over the data-parallel ranks, as
    DistributedDataParallel does. Build the optimizer afterwards. Buffers that the forward changes
    have the values of rank 0 at the start of every step.

    Args:
        model: A model with real weights, or built under `torch.device("meta")`.
        config: A path, a mapping or a loaded Config. See `plait.initialize`.
        weights: Folder of safetensors for a model on meta. See `plait.initialize`.
        forward: Maps (model, micro-batch) to the output. `forward_backward` and `predict` call it.

    Returns:
        The sharded model, for calls such as `accumulate`. `model` itself stays the user's object.

    Raises:
        ConfigError: The configuration needs an engine, or does not fit the model or the processes.
        ModelError: The model cannot be split as the configuration says.
        InputError: An argument is wrong, or ranks differ.
    """
    refuse_taken(model)
    resolved = resolved_for(model, config)
    _refuse_engine_settings(resolved)
    _refuse_router_losses(model, resolved)

    before = list(model.parameters())
    take_over(model)
    mesh, parts, _ = shard(
        checked_model(model, resolved),
        weights=weights,
        forward=forward,
        mean=reason_for_step(resolved) is None,
    )
    refuse_own_batches(parts, "plait.parallelize")
    return ParallelModel(parts, mesh, resolved, forward=forward, before=before)


def _refuse_engine_settings(resolved: Resolved) -> None:
    """Refuse settings that need the engine's loss, optimizer or loop."""
    if resolved.loss_chunk_tokens:
        raise ConfigError(
            Problem(
                "parallel.loss_chunk_tokens",
                resolved.loss_chunk_tokens,
                "only plait.causal_lm_loss is computed in chunks, but no loss is given",
                "use 0, and call plait.chunked_causal_lm_loss in your own training loop",
            )
        )

    every = resolved.faults.compare_replicas_every
    if every:
        rule = "plait.parallelize creates no optimizer, whose states are compared too"
        raise ConfigError(
            Problem("faults.compare_replicas_every", every, rule, "use 0, or plait.initialize")
        )

    rule = "plait.parallelize does not see the steps of the loop, which has its own tracker"
    remedy = "leave it out, or use plait.initialize"
    raise_problems(
        Problem(f"{spec.name}.enabled", True, rule, remedy) for spec in resolved.trackers
    )

    if resolved.data_parallel.update_in_backward:
        raise ModelError(
            "parallel.optimizer_in_backward: plait.parallelize creates no optimizer; use false, or"
            " plait.initialize"
        )

    if resolved.layout.ep > 1:
        raise ConfigError(
            Problem(
                "parallel.ep",
                resolved.layout.ep,
                "plait.parallelize with experts on different processes is not tested",
                "use 1, or plait.initialize and engine.train_batch",
            )
        )


def _refuse_router_losses(model: nn.Module, resolved: Resolved) -> None:
    """Refuse auxiliary losses of routers, which the loss of a user's loop would omit."""
    rule = "Plait adds it to plait.causal_lm_loss, and your own loop computes its loss"
    remedy = "use plait.initialize and engine.train_batch"
    raise_problems(
        Problem(setting, value, rule, f"{remedy}, or {json.dumps(off)}")
        for setting, value, off in resolved.routing.loss_settings
    )
    if resolved.layout.pp > 1 and enables_balance_loss(model):
        rule = (
            f"with parallel.pp = {resolved.layout.pp} the balance loss is a sum over the stages;"
            f" {rule}"
        )
        raise ConfigError(
            Problem("model.config.output_router_logits", True, rule, f"{remedy}, or False")
        )


def reason_for_step(config: Resolved) -> str | None:
    """Return the reason why a loop has to call `ParallelModel.step`, or None for a plain loop."""
    if config.layout.pp > 1:
        return f"parallel.pp = {config.layout.pp}: each process has a part of the model"
    if config.precision.loss_scale is not None:
        return "fp16: the loss is scaled, and a step with an overflow is skipped on all ranks"
    if config.compression.candidates:
        return 'parallel.compress_gradients = "auto": full steps are timed to decide it'
    offloads = (
        ("optimizer", config.optimizer_offload.device),
        ("param", config.parameter_offload.device),
    )
    for section, device in offloads:
        if device == "nvme":
            return f"zero_optimization.offload_{section}: the step reads and writes files"
    return None


class ParallelModel(ShardedModel):
    """Sharded model for your own training loop. `plait.parallelize` returns it.

    Gradients are means over the data-parallel ranks. `forward_backward` also divides by the number
    of micro-batches; with `accumulate` the loop does. The methods of `ShardedModel`, such as
    `predict`, `evaluating`, `grad_norm` and `close`, are available too.

    Attributes:
        why_called: The reason why `step` has to be called, or None if a plain loop is enough.
        steps: Number of calls of `step` in this process.
    """

    def __init__(
        self,
        parts: Parts,
        mesh: Mesh,
        config: Resolved,
        *,
        forward: Forward,
        before: list[nn.Parameter],
    ) -> None:
        """Initialize the sharded model.

        Args:
            parts: The model after all techniques were applied, with its step hooks.
            mesh: Mesh of the ranks.
            config: The resolved configuration.
            forward: Passes a micro-batch through the model.
            before: Parameters of the model before it was sharded.
        """
        self.why_called = reason_for_step(config)
        self._residuals = parts.hooks.find(Residuals)
        self._watch = StepWatch(
            parts.model, before, parts.reducer, self._residuals, why_called=self.why_called
        )
        self.steps = 0
        self._steppers: WeakKeyDictionary[torch.optim.Optimizer, Stepper] = WeakKeyDictionary()
        parts = parts.with_hooks(self._watch)
        super().__init__(parts, mesh, config, forward=forward, variable="sharded")
        if self.why_called is None:
            self.guard.recover_in_forwards()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model. The model itself may be called as well."""
        if self.pipeline is not None:
            raise InputError(
                f"{self.why_called}: call sharded.forward_backward, or sharded.predict without"
                " gradients"
            )
        self.guard.recover()
        return call_model(self.model, *args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of the backwards inside the context.

        The forward and backward of every micro-batch but the last go inside; the last goes outside.
        Where the ZeRO stage allows it, nothing is communicated inside. An exception inside ends the
        step and drops its gradients. `optimizer.zero_grad()` and `model.zero_grad()`, inside or
        afterwards, drop the gradients of their parameters. `parameter.grad = None` is not enough:
        gradients that are not reduced yet are not in `parameter.grad`.
        """
        self.before_microbatch(last=False)
        try:
            with self._dropping_failed_step():
                yield
        finally:
            self.before_microbatch(last=True)

    @property
    def _has_accumulated(self) -> bool:
        return self._watch.has_accumulated or super()._has_accumulated

    @contextmanager
    def _dropping_failed_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # A plain loop may call nothing of Plait afterwards, so `Guard.recover` would come
            # too late.
            if self.why_called is None:
                self.guard.drop()
            self.guard.refuse_mixed_tensors(error)
            raise

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch from its loss, 0-dimensional. Collective."""
        checked_loss(loss, "sharded")
        self.guard.recover()
        if self.why_called is None:
            loss.backward()
            return

        with self.guard.backward():
            # Gradients are summed over the data-parallel ranks here, and `step` removes the loss
            # scale.
            (loss * (self.loss_scale / self.mesh.layout.dp)).backward()
            for callback in self.hooks.after_backward:
                callback()

    def forward_backward(self, batch: Any, loss_fn: MeanLoss) -> torch.Tensor:
        """Run the forward and backward of all micro-batches of a step. Collective.

        Pipelines are supported. After an exception on all ranks the step starts again.

        Args:
            batch: Samples of this data-parallel rank. See `parallel.micro_batches.micro_batches`.
            loss_fn: Maps (output, micro-batch) to the mean loss, 0-dimensional.

        Returns:
            The mean of the micro-batches' losses: 0-dimensional, float64, on every rank of the
            pipeline.
        """
        self.refuse_within("forward_backward")
        self.guard.recover()
        if self.why_called is not None and self.guard.backwards:
            raise InputError(
                "sharded.forward_backward runs all micro-batches of a step, so it is called once"
                " per step; call sharded.step(optimizer) before the next call"
            )

        count = self.config.batch.accumulation
        batches = self.micro_batches(batch)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        factor = 1 / count
        if self.why_called is not None:
            # See `backward`.
            factor = self.loss_scale / (count * self.mesh.layout.dp)

        def scaled_loss(output: Any, micro_batch: Any) -> torch.Tensor:
            nonlocal total
            loss = checked_loss(loss_fn(output, micro_batch), "sharded")
            total = total + loss.detach().double()
            return loss * factor

        if self.why_called is not None:
            with self.guard.running("step"):
                self.train_microbatches(batches, scaled_loss, loss_fn=_WithUnitWeight(loss_fn))
        else:
            with self._dropping_failed_step():
                for micro_batch in batches[:-1]:
                    with self.accumulate():
                        scaled_loss(self.forward(self.model, micro_batch), micro_batch).backward()
                scaled_loss(self.forward(self.model, batches[-1]), batches[-1]).backward()

        # Only the last stage of a pipeline has added to `total`.
        group = self.mesh.group("pp")
        if group is not None:
            dist.all_reduce(total, group=group)
        return total / count

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their global norm is at most `max_norm`. Collective.

        It is correct on every layout. `torch.nn.utils.clip_grad_norm_` fails on some layouts, and
        counts shards or replicas wrongly on others.

        Returns:
            The norm before clipping: 0-dimensional, float64.
        """
        if self.why_called is not None:
            raise InputError(
                f"{self.why_called}: sharded.step clips by gradient_clipping of the configuration;"
                " leave this call out"
            )
        norm = self.grad_norm()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        multiply_all([local_tensor(grad) for grad in grads], clip_factor(norm, max_norm))
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """Clip gradients, update the optimizer's parameters, and drop their gradients. Collective.

        It unscales the gradients, and clips by `gradient_clipping` of the configuration. The update
        is skipped on all ranks if gradients overflowed.

        Args:
            optimizer: Optimizer that was built over `model.parameters()` after `parallelize`.

        Raises:
            NumbersError: Gradients are not finite, and `faults.non_finite` does not skip the step.
                It is raised on all ranks before anything has changed.
        """
        self.guard.recover()
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            stepper = self._adopt(optimizer)

        self._watch.in_handle_step = True
        try:
            self.steps += 1
            if self.why_called is None:
                outcome = stepper(non_finite_error=self.non_finite_error(self.steps))
                if outcome.skipped and self._residuals is not None:
                    self._residuals.drop_gradients()
                return outcome
            with self.guard.running("step"):
                return self.update(stepper, step=self.steps)[0]
        finally:
            self._watch.in_handle_step = False

    def _adopt(self, optimizer: torch.optim.Optimizer) -> Stepper:
        """Prepare an optimizer before its first step, and return its stepper."""
        if self.why_called is not None and len(self._steppers):
            raise InputError(
                f"{self.why_called}: the step of one optimizer drops the gradients of all"
                " parameters, so a second optimizer would find none; use one optimizer with several"
                " parameter groups"
            )
        # The optimizer holds shards. A gathered parameter would not be recognised as one of them.
        free_gathered(self.model)
        step_by_placement(checked_optimizer(optimizer, self.model))
        if self.tier is not None:
            self.tier.drive(optimizer)

        stepper = self.stepper(optimizer)
        if self.why_called is None:
            # Gradients of other parameters belong to other optimizers of the loop.
            stepper.parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
        self._steppers[optimizer] = stepper
        return stepper


class _WithUnitWeight:
    """A mean loss as (loss, weight), the form that the checks of a pipeline require."""

    def __init__(self, loss_fn: MeanLoss) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: Any, micro_batch: Any) -> tuple[torch.Tensor, int]:
        return self._loss_fn(output, micro_batch), 1


class StepWatch(StepHook):
    """Hook on the steps of all torch optimizers in this process that hold the model's parameters.

    It ends when the model is deleted or passed to another engine.

    Args:
        model: The sharded model.
        before: Parameters of the model before it was sharded.
        reducer: Reducer of the model's gradients, if there is one.
        residuals: State of compressed gradients, if there are any.
        why_called: The reason why a step has to be `ParallelModel.step`, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        before: list[nn.Parameter],
        reducer: Reducer | None,
        residuals: Residuals | None,
        *,
        why_called: str | None = None,
    ) -> None:
        self._reducer = reducer
        self._residuals = residuals
        self._why_called = why_called
        self.in_handle_step = False
        """True while `ParallelModel.step` runs."""
        self.has_accumulated = False
        """True if the step has had a micro-batch that is not its last one."""
        self._model = weakref.ref(model)
        self._units = [weakref.ref(unit) for unit in sharded_modules(model)]

        # Keyed by id, because parameters compare element by element. These references are not weak:
        # `model.to(...)` raises an error for a shard that has a weak reference.
        self._current = {id(parameter): parameter for parameter in model.parameters()}
        # An id may be reused after a parameter is deleted; the weak reference tells whether it is
        # still the same one.
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

    def before_microbatch(self, last: bool) -> None:
        """Record that the step accumulates gradients."""
        self.has_accumulated |= not last

    def release(self) -> None:
        """Stop checking the steps of optimizers."""
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

        units = [unit for reference in self._units if (unit := reference()) is not None]
        if graph_task() is not None and (self._reducer is not None or units):
            raise InputError(
                "optimizer.step() was called inside loss.backward(), where gradients are not"
                " complete; call it after the backward, or use plait.initialize with"
                " parallel.optimizer_in_backward = true"
            )
        updated = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._refuse_added_parameters(model, optimizer, updated)
        self._refuse_unfrozen_parameters(updated)
        unreduced = (self._reducer is not None and self._reducer.unfinished) or has_unreduced(units)
        if (updated or unreduced) and self._backward_failed(model):
            raise InputError(
                "optimizer.step() was called after a backward that ended with an exception, so some"
                " gradients are missing or not reduced; call optimizer.zero_grad() and run the next"
                " forward before the step"
            )
        if unreduced:
            raise InputError(
                "optimizer.step() was called after backwards inside accumulate() only, which does"
                " not reduce gradients; run the forward and backward of a step's last micro-batch"
                " outside it"
            )

        self.has_accumulated = False
        if self._residuals is not None:
            self._residuals.end_step(skipped=False)
        # A forward between the last backward and this step would otherwise keep the old values, or
        # read parameters while they change.
        for unit in units:
            unit.reshard()

    def _backward_failed(self, model: nn.Module) -> bool:
        if self._reducer is not None and self._reducer.backward_failed():
            return True
        return backward_was_interrupted(model)

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
                " call plait.parallelize while it is trainable, and freeze it afterwards"
                " (requires_grad_(False)) until its training starts"
            )

    def _holds_parameters_of(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Return True if an optimizer holds parameters of the model.

        Raises:
            InputError: The optimizer holds parameters that sharding has replaced.
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
        return self._current.get(id(parameter)) is parameter
