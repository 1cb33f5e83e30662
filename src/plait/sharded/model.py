"""`ShardedModel`: a model on its layout, and the calls that run it.

It manages micro-batches, gradients and step hooks. LR schedules and files belong to the engine. The
caller owns the optimizer, passes it to `stepper`, and passes the resulting `Stepper` to `update`.

Note [Owner of a model]
    A model belongs to the engine or `ParallelModel` that it was passed to last. A replicated model
    is a plain module and may be passed on. The previous owner then removes its own hooks from the
    model, and raises an error if it is used. A model that was split (shards, tensor or pipeline
    parallelism) has changed for good and is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel as TorchDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from plait._torch.units import is_gathered, zero_gradients
from plait._torch.zeroing import observe_zero_grad
from plait.cluster.mesh import Mesh
from plait.cluster.process_groups import is_fake
from plait.cluster.small_messages import broadcast_object
from plait.comm import hang
from plait.comm.failures import ComparedCollectives
from plait.comm.watch import WATCH
from plait.config.resolving.resolve import Resolved
from plait.config.resolving.resolved_parts import CALLER_SOURCE, MICRO_KEY
from plait.errors import InputError, ModelError, NumbersError
from plait.losses.chunked_loss import DeferredLogits
from plait.optim.backward_optimizer import BackwardOptimizer
from plait.optim.disk_optimizer import DiskTier
from plait.parallel.hooks import Hooks, StepEnd
from plait.parallel.micro_batches import CACHES, Forward, micro_batches, to_device, with_cache
from plait.parallel.parts import Parts
from plait.parallel.pipeline.cut_check import LossFunction
from plait.parallel.techniques.data_parallel import free_after_evaluation, free_gathered
from plait.parallel.techniques.mixed_precision import LossScaler
from plait.parallel.techniques.pipeline_parallel import PipelineRank
from plait.sharded.cache import cache_argument, new_cache
from plait.sharded.guard import Guard, RunningForwards, UnchangedParameters
from plait.sharded.misuse import refuse_cache, refuse_resized
from plait.sharded.step import StepOutcome, Stepper, global_norm, non_finite_error

_ATTRIBUTE = "_plait"
"""Attribute of a user's model that refers to its `ShardedModel`."""


class ShardedModel:
    """A model that was sharded in place. It remains the user's object.

    `sharded.assemble.shard` creates the arguments.

    Args:
        parts: The model after all techniques were applied, with its step hooks.
        mesh: Mesh of the ranks.
        config: The resolved configuration.
        forward: Passes a micro-batch through the model.
        variable: Name of the user's variable, for messages.

    Attributes:
        guard: Clears the state that a failed call leaves, and refuses wrong calls.
        pipeline: Pipeline stages of this rank, or None without a pipeline.
        region: Tensor-parallel region, or None.
        tier: Files of optimizer states, gradients or parameters, or None.
        scaler: Loss scaler of float16, or None.
        is_evaluating: Whether the model is inside `evaluating`.
    """

    def __init__(
        self,
        parts: Parts,
        mesh: Mesh,
        config: Resolved,
        *,
        forward: Forward,
        variable: str = "engine",
    ) -> None:
        self.mesh = mesh
        self.config = config
        self.forward = forward
        self.guard = Guard(parts, variable)
        self.parts = parts.with_hooks(self.guard)
        self.pipeline = parts.hooks.find(PipelineRank)
        self.region = parts.region
        self.tier = parts.hooks.find(DiskTier)
        scale = config.precision.loss_scale
        self.scaler = LossScaler(scale) if scale is not None else None
        self._unchanged = UnchangedParameters(parts.model, mesh)

        self.is_evaluating = False
        self._evaluating_thread: int | None = None
        """Identifier of the thread that is inside `evaluating`, or None."""
        self._evaluation_lock = threading.Lock()

        self._shapes: list[tuple[str, nn.Parameter, torch.Size]] = []
        """Names and shapes of the parameters of a replicated model, to detect a resize.

        If the model was split, the methods that resize it are refused themselves.
        """
        if not self.is_cut:
            self._shapes = [(name, p, p.shape) for name, p in parts.model.named_parameters()]

        # Other calls are refused within a forward only where ranks exchange something during it.
        self._forwards: RunningForwards | None = None
        if self.is_cut or mesh.layout.dp < mesh.layout.world_size:
            self._forwards = RunningForwards(parts.model)

        self._compared_collectives = ExitStack()
        if config.faults.check_collectives and mesh.layout.world_size > 1:
            self._compared_collectives.enter_context(ComparedCollectives())
        free_after_evaluation(parts.model, stays_gathered=lambda: self.is_evaluating)

        # A plain attribute of the user's model, outside nn.Module's registries: no wrapper, no
        # global table, and all names stay as they are.
        object.__setattr__(parts.model, _ATTRIBUTE, self)
        observe_zero_grad(self._after_zero_grad, parts.model)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the model, or a model from a file, has no owner.
        return type(None), ()

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.parts.model

    @property
    def hooks(self) -> Hooks:
        """Step hooks of the model, in the order in which they are called."""
        return self.parts.hooks

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.mesh.device

    @property
    def loss_scale(self) -> float:
        """Factor by which a loss is multiplied before its backward. It is 1 without float16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def holds_output(self) -> bool:
        """True if this rank has the model's output.

        Every rank has it, except those of a pipeline that do not hold the last stage.
        """
        return self.pipeline is None or self.pipeline.holds_output

    def prepare_batch(self, batch: Any) -> Any:
        """Return a micro-batch on the device, after all techniques have changed it."""
        # Techniques run first: they read values of the batch, which after the move would wait for
        # the device.
        return to_device(self.hooks.prepare(batch), self.device)

    def micro_batches(self, batch: Any) -> list[Any]:
        """Split the batch of a step into micro-batches, and prepare each.

        Args:
            batch: Samples of this data-parallel rank. If the configuration has no batch size, any
                number of samples is accepted.
        """
        size = None
        if self.config.sources.get(MICRO_KEY) != CALLER_SOURCE:
            size = self.config.batch.micro_batch_size
        batches = micro_batches(batch, count=self.config.batch.accumulation, size=size)
        return [self.prepare_batch(micro_batch) for micro_batch in batches]

    def before_microbatch(self, *, last: bool) -> None:
        """Call the step hooks before the forward of a micro-batch.

        Args:
            last: Whether the micro-batch is the last of its step.
        """
        WATCH.phase(hang.FORWARD)
        refuse_resized(self._shapes)
        for callback in self.hooks.before_microbatch:
            callback(last)

    def train_microbatches(
        self,
        batches: Sequence[Any],
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        loss_fn: LossFunction | None = None,
    ) -> None:
        """Run the forward and backward of all micro-batches of a step. Collective.

        Args:
            batches: Micro-batches of the step, as `micro_batches` returns them.
            loss: Maps (output, micro-batch) to the 0-dimensional tensor that the backward starts
                from.
            loss_fn: The function that `loss` computes with. If it supports logits that are split
                over the vocabulary, the logits are not gathered. A pipeline checks that the last
                stage has everything that this function reads.
        """
        with self.logits_for(loss_fn):
            if self.pipeline is not None:
                # The runtime interleaves the micro-batches of its stages, so it calls the hooks
                # before each of them itself (`StagedZero`).
                with self.guard.backward():
                    self.pipeline.runtime.train(
                        batches, forward=self.forward, loss=loss, loss_fn=loss_fn
                    )
                return

            for index, batch in enumerate(batches):
                self.before_microbatch(last=index == len(batches) - 1)
                scaled_loss = loss(self.forward(self.model, batch), batch)
                with self.guard.backward():
                    scaled_loss.backward()

    @property
    def _has_accumulated(self) -> bool:
        """True if the step has had a backward whose gradients may not be reduced yet."""
        return self.guard.backwards > 0

    def _after_zero_grad(self, owner: Optimizer | nn.Module, *, set_to_none: bool) -> None:
        """Drop the gradients that `zero_grad` of an optimizer or a module does not see.

        An optimizer has only the shards, whose `grad` does not contain unreduced gradients. Between
        its forward and its backward, a module has only gathered parameters, whose `grad` does not
        contain the reduced gradients of the shards.
        """
        is_hidden = isinstance(owner, nn.Module) and is_gathered(self.guard.units)
        if not (self._has_accumulated or is_hidden):
            return

        if isinstance(owner, nn.Module):
            parameters = list(owner.parameters())
        else:
            parameters = [p for group in owner.param_groups for p in group["params"]]
        shards = zero_gradients(self.model, parameters, set_to_none=set_to_none)
        zeroed: set[torch.Tensor] = {*parameters, *shards}
        # The owner may be of another model.
        if any(id(parameter) in self.guard.known for parameter in zeroed):
            for callback in self.hooks.zero_gradients:
                callback(zeroed, set_to_none)

    def finish_reduction(self) -> None:
        """Reduce the gradients of a step over all ranks. Collective.

        It is called after the last backward of a step. A second call does nothing.
        """
        if self.guard.reduced:
            return
        for callback in self.hooks.finish_reduction:
            callback()
        self.guard.reduced = True

    def grad_norm(self) -> torch.Tensor:
        """Return the global norm of the gradients: 0-dimensional, float64. Collective.

        Each element counts once on every layout.
        """
        grads = [
            p.grad
            for p in self.model.parameters()
            if p.grad is not None and p not in self._counted_by_other_stage
        ]
        return global_norm(grads, self.mesh, tier=self.tier)

    @property
    def _counted_by_other_stage(self) -> frozenset[nn.Parameter]:
        """Tied parameters whose gradient another pipeline stage adds to the norm."""
        return self.pipeline.counted_by_other_stage if self.pipeline is not None else frozenset()

    def stepper(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        in_backward: BackwardOptimizer | None = None,
        **schedule: Any,
    ) -> Stepper:
        """Return a `Stepper` that updates the model's parameters with an optimizer.

        Args:
            optimizer: Optimizer over the parameters of the sharded model.
            in_backward: Optimizer that updates during the backward, if there is one.
            schedule: Fields of `Stepper` that describe the LR schedule.
        """
        return Stepper(
            parameters=list(self.model.parameters()),
            mesh=self.mesh,
            optimizer=optimizer,
            clipping=self.config.gradient_clipping,
            counted_by_other_stage=self._counted_by_other_stage,
            scaler=self.scaler,
            non_finite=self._non_finite,
            checks_finite=self._checks_finite,
            tier=self.tier,
            before_update=self.hooks.before_update,
            in_backward=in_backward,
            **schedule,
        )

    @property
    def _non_finite(self) -> Literal["raise", "skip"]:
        """Action for a step whose loss or gradients are not finite."""
        setting = self.config.faults.non_finite
        if setting != "auto":
            return setting
        return "skip" if self.config.precision.check_overflow else "raise"

    @property
    def _checks_finite(self) -> bool:
        """True if a step reads its norm before the update. See `Stepper.checks_finite`."""
        is_configured = (
            self.scaler is not None
            or self.config.precision.check_overflow
            or self.config.faults.non_finite != "auto"
        )
        # On a CPU the check is free. In a dry run the values of the ranks that do not exist are
        # undefined.
        return is_configured or (self.device.type == "cpu" and not is_fake())

    def non_finite_error(
        self, step: int, local_loss: Callable[[], float] | None = None
    ) -> Callable[[float], NumbersError]:
        """Return a function that builds the error of a step with a non-finite loss or gradient.

        The function takes the gradient norm. Its call is collective.

        Args:
            step: Number of the step.
            local_loss: Returns this rank's part of the loss.
        """

        def build(norm: float) -> NumbersError:
            loss = local_loss() if local_loss is not None else None
            return non_finite_error(self.model, step=step, norm=norm, loss=loss, device=self.device)

        return build

    def update(
        self,
        stepper: Stepper,
        *,
        divisor: float = 1.0,
        loss: Callable[[], torch.Tensor] | None = None,
        local_loss: Callable[[], float] | None = None,
        step: int = 0,
    ) -> tuple[StepOutcome, str]:
        """End a step: reduce gradients, update parameters, call the step hooks. Collective.

        Args:
            stepper: The result of `stepper`.
            divisor: Number that the gradients are divided by, in addition to the loss scale.
            loss: Returns the global loss of the step, 0-dimensional.
            local_loss: Returns this rank's part of the loss, for the error.
            step: Number of the step, for the error.

        Returns:
            (outcome, description). The description says what the step hooks decided. It is empty if
            they decided nothing.

        Raises:
            NumbersError: The step is not finite, and such steps are not skipped. It is raised on
                all ranks before anything has changed.
        """
        self.guard.check_update(stepper.optimizer)
        WATCH.phase(hang.UPDATE)
        self.finish_reduction()
        self.guard.reduced = False

        scale = self.loss_scale
        self._unchanged.before_update()
        outcome = stepper(
            divisor=divisor, loss=loss, non_finite_error=self.non_finite_error(step, local_loss)
        )
        self._unchanged.after_update(stepper.optimizer, skipped=outcome.skipped)

        end = StepEnd(skipped=outcome.skipped, rescaled=self.loss_scale / scale)
        decisions = [callback(end) for callback in self.hooks.after_step]
        return outcome, ". ".join(filter(None, decisions))

    def refuse_within(self, call: str) -> None:
        """Raise InputError if a call comes from within a forward, a backward or a pipeline's step.

        Such a call would free the parameters that the outer computation has gathered, and the other
        ranks would not join its collectives.

        Args:
            call: Name of the call, for the message.
        """
        if self.pipeline is not None:
            self.pipeline.runtime.refuse_within(call)
        if self._forwards is not None and (self._forwards.running or self.guard.in_backward):
            pass_name = "forward" if self._forwards.running else "backward"
            raise InputError(
                f"{call} was called inside the model's {pass_name} (by a hook, or by one of its"
                " modules), and the call would change the parameters that the"
                f" {pass_name} has gathered; call it before or after the {pass_name}"
            )

    def predict(self, batch: Any, *, cache: Any = None, continue_on_error: bool = False) -> Any:
        """Return the model's output for one micro-batch in evaluation mode. Collective.

        Several calls in a row are faster inside `evaluating`.

        Args:
            batch: One micro-batch. With `cache` it is a mapping.
            cache: A KV cache from `new_cache` with the tokens before those of `batch`. The model
                adds to it.
            continue_on_error: If one stage of a pipeline fails, let the others continue. See
                `Runtime.evaluate`.

        Returns:
            The output for the full sequences, even if a technique splits them. None on the ranks of
            a pipeline that do not hold its last stage.

        Raises:
            InputError: The layout does not support the cache, or the call comes from within a
                forward or backward.
        """
        self.refuse_within("predict")
        if cache is not None:
            refuse_cache(self.parts, self.mesh, cache)
            batch = with_cache(batch, cache, argument=cache_argument(self.model) or CACHES[0])

        with torch.no_grad(), self.evaluating():
            output = self.output(self.prepare_batch(batch), continue_on_error=continue_on_error)
            logits = getattr(output, "logits", None)
            # parallel.loss_chunk_tokens leaves the head to the loss, and there is no loss here.
            if isinstance(logits, DeferredLogits):
                output.logits = logits.full()
        return self.hooks.join_output(output, batch) if self.holds_output else output

    def new_cache(self, *, on_host: bool = False) -> Any:
        """Return an empty KV cache for `predict`, or None if the model does not support one.

        Args:
            on_host: Keep the layers in host memory. See `sharded.cache.new_cache`.

        Raises:
            ModelError: A pipeline stage cannot keep a cache.
        """
        staged = self.pipeline.runtime.staged if self.pipeline is not None else None
        return new_cache(self.model, staged, on_host=on_host)

    @torch.no_grad()
    def output(self, micro_batch: Any, *, continue_on_error: bool = False) -> Any:
        """Return the output for a micro-batch of `prepare_batch`, in evaluation mode. Collective.

        Unlike `predict`, it does not gather split sequences or logits.
        """
        with self.evaluating():
            if self.pipeline is not None:
                return self.pipeline.runtime.evaluate(
                    micro_batch, forward=self.forward, continue_on_error=continue_on_error
                )
            return self.forward(self.model, micro_batch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set evaluation mode inside the context.

        Parameters that `predict` gathers stay gathered until the context ends. Contexts may be
        nested in one thread.

        Raises:
            InputError: Another thread evaluates the model. The thread that leaves first would end
                the evaluation mode of the other.
        """
        if self._evaluating_thread == threading.get_ident():
            yield
            return
        self.refuse_within("an evaluation")
        if not self._evaluation_lock.acquire(blocking=False):
            raise InputError(
                "another thread evaluates this model or generates with it; make such calls one"
                " after the other"
            )

        was_training = self.model.training
        # Modules that the user has set to evaluation mode, such as a frozen BatchNorm, stay in it.
        modes = [(module, module.training) for module in self.model.modules()]
        self.is_evaluating = True
        self._evaluating_thread = threading.get_ident()
        self.model.eval()
        try:
            with self.guard.running("forward"), WATCH.during(hang.EVALUATION):
                yield
        finally:
            self.is_evaluating = False
            self._evaluating_thread = None
            self.model.train(was_training)
            for module, training in modes:
                module.training = training
            free_gathered(self.model)
            self._evaluation_lock.release()

    @contextmanager
    def logits_for(self, loss_fn: object) -> Iterator[None]:
        """Keep logits split over the vocabulary inside the context, if `loss_fn` supports it.

        It changes nothing without tensor parallelism.
        """
        if self.region is None:
            yield
            return
        self.region.split_logits_for(loss_fn)
        try:
            yield
        finally:
            self.region.gather_logits = True

    def from_output_stage(self, value: Any) -> Any:
        """Return the last pipeline stage's `value` on all ranks of the pipeline. Collective.

        Args:
            value: A small picklable object. Other ranks may pass anything.
        """
        group = self.mesh.group("pp")
        if self.pipeline is None or group is None:
            return value
        # Only the value of the source rank is sent.
        return broadcast_object(value, group, source=self.pipeline.output_rank)

    @property
    def is_cut(self) -> bool:
        """True if the model was changed permanently, so that no other owner can take it over.

        This is the case if its parameters are shards, or if modules were replaced.
        """
        layout = self.mesh.layout
        parts = self.parts
        return (
            isinstance(parts.model, FSDPModule)
            or max(layout.pp, layout.tp, layout.ep) > 1
            or parts.offloaded_activations is not None
        )

    def release(self) -> None:
        """Remove all hooks from the model, unless another owner has taken it over.

        A replicated model is then as the user passed it, except for its weights.
        """
        if owner_of(self.model) is not self:
            return
        self._compared_collectives.close()
        if self._forwards is not None:
            self._forwards.close()
        for end in self.hooks.release:
            end()
        if not self.is_cut:
            object.__delattr__(self.model, _ATTRIBUTE)

    def close(self) -> None:
        """Release the model, and end threads, files and process groups.

        The default process group is destroyed only if Plait created it and nothing else uses it.
        """
        self.release()
        for end in self.hooks.close:
            end()
        self.mesh.close()


def owner_of(model: nn.Module) -> ShardedModel | None:
    """Return the sharded model that owns a model, or None."""
    return getattr(model, _ATTRIBUTE, None)


def refuse_taken(model: nn.Module) -> None:
    """Raise ModelError for a model that is already wrapped or split."""
    if isinstance(model, DistributedDataParallel | TorchDataParallel):
        raise ModelError(
            f"the model is already wrapped in {type(model).__name__}, which would reduce every"
            " gradient twice; pass the inner model (`model.module`) and delete the wrapping line:"
            " Plait does its work"
        )
    # DeepSpeed marks the parameters that it has partitioned with `ds_id`.
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelError(
            "the model's parameters were split by DeepSpeed itself (its zero.Init, or Transformers'"
            " HfDeepSpeedConfig), so this process has only a part of them; leave that out, and"
            " build the model with plait.from_pretrained(name)"
        )
    owner = owner_of(model)
    if owner is not None and owner.is_cut:
        layout = owner.mesh.layout
        raise ModelError(
            f"the model was already sharded by Plait (ZeRO stage {owner.parts.zero_stage},"
            f" parallel.pp {layout.pp},"
            f" parallel.tp {layout.tp}), and its parameters are shards now; build it again (under"
            " torch.device('meta'), at no cost) and load its checkpoint, or use its existing engine"
        )
    if any(isinstance(module, FSDPModule | DistributedDataParallel) for module in model.modules()):
        raise ModelError(
            "part of the model is already sharded or wrapped (fully_shard or"
            " DistributedDataParallel); pass the plain model"
        )


def take_over(model: nn.Module) -> None:
    """Release a model from its previous owner, if it has one."""
    owner = owner_of(model)
    if owner is not None:
        owner.release()
        owner.mesh.leave()
