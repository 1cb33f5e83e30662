"""Engine that trains a model on a layout.

A training loop takes full optimizer steps with `train_batch`, or makes DeepSpeed's three calls
(`engine(...)`, `backward`, `step`).

Note [Division of gradients]
    `train_batch` and the three calls divide the loss before its backward, and gradients are reduced
    by sum. `train_batch` divides by the global weight of the step (usually its number of targets),
    so the result does not depend on how samples are distributed over ranks and micro-batches. The
    three calls take DeepSpeed's mean of means, unless `backward` is passed weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.zeroing import observe_zero_grad
from plait.checkpoint.load import Verify
from plait.checkpoint.places import Place, place_of
from plait.checkpoint.save import Writer
from plait.cluster import accelerator
from plait.cluster.accelerator import HostCopy
from plait.comm import hang
from plait.comm.collectives import AsyncAllReduce
from plait.comm.failures import naming
from plait.comm.watch import WATCH
from plait.engine.state import (
    EngineFacts,
    StatefulLoader,
    load_engine,
    refuse_stateless,
    snapshot_of,
)
from plait.engine.trackers import EngineTrackers
from plait.errors import InputError, PlaitError, warn
from plait.inference.generate import generate
from plait.inference.requests import Generation
from plait.inference.score import score
from plait.losses.balance_loss import without_balance_loss
from plait.losses.chunked_loss import ChunkedCausalLMLoss
from plait.losses.loss import CausalLMLoss, Loss, PerSample, checked_total
from plait.model.positions import call_model
from plait.sharded.alike import compare_replicas
from plait.sharded.guard import checked_loss
from plait.sharded.misuse import refuse_own_batches
from plait.sharded.model import ShardedModel
from plait.sharded.step import StepOutcome, Stepper


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Tensors are 0-dimensional and on the device. Reading one waits for the device.

    Attributes:
        loss: Weighted mean of the loss over all ranks and micro-batches.
        weight: Sum of the weights, by which the loss was divided.
        grad_norm: Global norm of the unscaled gradients before clipping.
        skipped: Whether gradients were not finite. In that case only the loss scale has changed.
        learning_rate: Learning rate of this step (of the first parameter group).
        loss_scale: Loss scale of this step. It is 1 without float16.
        decided: Description of the decision about gradient compression, in the step that takes it.
            Otherwise "".
    """

    loss: torch.Tensor
    weight: torch.Tensor
    grad_norm: torch.Tensor
    skipped: bool
    learning_rate: float
    loss_scale: float
    decided: str = ""

    def __float__(self) -> float:
        return float(self.loss)


class Engine(EngineFacts):
    """Engine that trains a model on a layout. `plait.initialize` returns it.

    The model is sharded in place and is still the user's own object.

    Attributes:
        sharded: The model on its layout, with the hooks of its steps.
        config: The resolved configuration.
        loss_fn: Loss of `train_batch` and `eval_batch`, or None.
        global_steps: Number of steps so far, skipped ones included.
        skipped_steps: Number of steps that were skipped.
        communication: Description of how data-parallel ranks exchange gradients and parameters,
            with the reasons and with the decisions of the first steps.
        trackers: Experiment trackers of the user's training loop, on the first rank. None if none
            are enabled, and in `plait train`, which has separate trackers.
    """

    def __init__(self, sharded: ShardedModel, stepper: Stepper, loss_fn: Loss | None) -> None:
        """Initialize the engine.

        Args:
            sharded: The model on its layout, with the hooks of its steps.
            stepper: Optimizer step of the model.
            loss_fn: Loss of `train_batch` and `eval_batch`, if there is one.
        """
        self.sharded = sharded
        self.config = sharded.config
        self.stepper = stepper
        self.loss_fn = loss_fn
        self.global_steps = 0
        self.skipped_steps = 0
        self._guard = sharded.guard
        # The ranks of the first group read different slices of the batch. The second one includes
        # the pipeline stages, of which only the last has a loss.
        self._dp_group = sharded.mesh.group(*sharded.parts.batch_axes)
        self._loss_group = sharded.mesh.group("pp", *sharded.parts.batch_axes)

        # State of the three calls.
        self._micro_step = 0
        self._step_start = 0
        """Value of `_micro_step` at the start of the step."""
        self._boundary: bool | None = None
        """Override of `is_gradient_accumulation_boundary` for the current micro-batch."""
        self._weights: list[Any] = []
        """Weights that `backward` was passed in this step."""

        self._weight_check = WeightCheck()
        self._outcome: StepOutcome | None = None
        self.communication = self.hooks.description
        self._decision = ""
        """Description of what the hooks decided in the last step."""
        self._writer = Writer(sharded.mesh)
        self.trackers: EngineTrackers | None = None
        observe_zero_grad(self._after_zero_grad, self.model)
        WATCH.progress(1, hang.BETWEEN)

    def train_batch(self, batch: Any) -> StepResult:
        """Take one optimizer step. Collective.

        The loss of every target counts the same on every rank and in every micro-batch.

        Args:
            batch: This data-parallel rank's share of the step: micro_batch_size x accumulation
                samples, or an iterator or list of micro-batches. See
                `parallel.micro_batches.micro_batches`.

        Raises:
            InputError: The batch has the wrong number of samples.
            PlaitError: The engine has no loss.
            NumbersError: The loss or gradients are not finite, and `faults.non_finite` does not
                skip the step. It is raised on all ranks before anything is updated.
        """
        loss_fn = self._required_loss()
        self.sharded.refuse_within("train_batch")
        self._recover()
        self._writer.raise_failed()
        with self._guard.running("step"):
            return self._train_batch(loss_fn, batch)

    def _train_batch(self, loss_fn: Loss, batch: Any) -> StepResult:
        batches = self.sharded.micro_batches(batch)
        # This reduction overlaps with the first forward.
        weight = AsyncAllReduce(self._sum([loss_fn.weight(b) for b in batches]), self._dp_group)
        checks_weight = self._weight_check.applies_to(loss_fn)

        # See Note [Division of gradients].
        totals: list[torch.Tensor] = []
        returned_weights: list[Any] = []
        factors: dict[torch.dtype, torch.Tensor] = {}

        def factor(dtype: torch.dtype) -> torch.Tensor:
            if dtype not in factors:
                # A step without a single target has gradient 0, not 0 / 0.
                divisor = torch.clamp(weight.value(), min=torch.finfo(torch.float64).tiny)
                factors[dtype] = (self.sharded.loss_scale / divisor).to(dtype)
            return factors[dtype]

        def scaled_loss(output: Any, micro_batch: Any) -> torch.Tensor:
            total, returned_weight = checked_total(loss_fn(output, micro_batch))
            totals.append(total.detach())
            if checks_weight:
                self._weight_check.note(returned_weight)
            returned_weights.append(returned_weight)
            return total * factor(total.dtype)

        self.sharded.train_microbatches(batches, scaled_loss, loss_fn=without_balance_loss(loss_fn))

        # Only the last stage of a pipeline has a loss. This reduction overlaps with the norm. It
        # sends two numbers on every rank, even if the loss functions of ranks differ: sizes of
        # messages must agree.
        global_sums = AsyncAllReduce(
            torch.stack([self._sum(totals), self._sum(returned_weights)]), self._loss_group
        )
        # The update may change both, and the result has the values of this step.
        scale = self.sharded.loss_scale
        rate = self.get_lr()[0]
        outcome = self._update(
            loss=lambda: global_sums.value()[0], local_loss=lambda: math.fsum(map(float, totals))
        )

        targets = weight.value()
        if checks_weight:
            self._weight_check(
                divided_by=targets, returned=global_sums.value()[1], step=self.global_steps
            )
        loss = global_sums.value()[0] / targets
        self._track(outcome, rate, scale, loss)
        return StepResult(
            loss, targets, outcome.grad_norm, outcome.skipped, rate, scale, self._decision
        )

    @torch.no_grad()
    def eval_batch(self, batch: Any) -> tuple[float, float]:
        """Evaluate one micro-batch per rank, without dropout or side effects. Collective.

        Returns:
            The sum of the loss and the sum of the weights over all ranks.
        """
        loss_fn = self._required_loss()
        self._recover()
        micro_batch = self.sharded.prepare_batch(batch)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self.evaluating(), self.sharded.logits_for(loss_fn):
            output = self.sharded.output(micro_batch)
            if self.sharded.holds_output:
                total, weight = checked_total(loss_fn(output, micro_batch))
                totals += torch.stack([total.double(), self._to_device(weight, torch.float64)])
        if self._loss_group is not None:
            with naming("all-reduce of the validation loss"):
                dist.all_reduce(totals, group=self._loss_group)
        return float(totals[0]), float(totals[1])

    def predict(self, batch: Any, *, cache: Any = None) -> Any:
        """Return the model's output for one micro-batch in evaluation mode. Collective.

        Several calls in a row are faster inside `evaluating`.

        Args:
            batch: One micro-batch.
            cache: A KV cache from `new_cache`. See `ShardedModel.predict`.

        Returns:
            The output, or None on the ranks of a pipeline that do not hold its last stage.
        """
        self._recover()
        return self.sharded.predict(batch, cache=cache)

    def new_cache(self) -> Any:
        """Return an empty KV cache for `predict`, or None if the model does not support one."""
        return self.sharded.new_cache()

    def generate(self, prompts: Any, **settings: Any) -> list[Generation]:
        """Generate continuations of prompts on the training layout. Collective.

        The state of the training does not change. See `inference.generate.generate` for all
        arguments.
        """
        self._recover()
        return generate(self.sharded, prompts, **settings)

    def score(self, sequences: Any, **settings: Any) -> list[torch.Tensor]:
        """Return log-probabilities of the tokens of sequences. Collective.

        The model runs on the training layout, and the state of the training does not change. See
        `inference.score.score` for all arguments.
        """
        self._recover()
        return score(self.sharded, sequences, **settings)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set evaluation mode inside the context.

        Parameters that `predict` gathers stay gathered until the context ends.
        """
        if not self.sharded.is_evaluating:
            self._recover()
        with self.sharded.evaluating():
            yield

    def from_output_stage(self, value: Any) -> Any:
        """Return the last pipeline stage's `value` on all ranks of the pipeline. Collective.

        The value must be picklable, and should be small.
        """
        return self.sharded.from_output_stage(value)

    def _required_loss(self) -> Loss:
        if self.loss_fn is None:
            raise PlaitError(
                "this engine has no loss: pass loss_fn= to plait.initialize (plait.causal_lm_loss"
                " for a language model, plait.per_sample(...) for a mean over samples), or use"
                " engine(...), engine.backward(loss), engine.step()"
            )
        return self.loss_fn

    def _sum(self, values: Sequence[Any]) -> torch.Tensor:
        """Return the sum of numbers and 0-dimensional tensors.

        Returns:
            A new tensor: 0-dimensional, float64, on the device. The caller may reduce it in place.
        """
        tensors = [value.reshape(()) for value in values if isinstance(value, torch.Tensor)]
        number = sum(value for value in values if not isinstance(value, torch.Tensor))
        if not tensors:
            return accelerator.tensor_of(number, dtype=torch.float64, device=self.device)
        if len(tensors) == 1:
            total = tensors[0].to(self.device, torch.float64, copy=True)
        else:
            on_device = [tensor.to(self.device) for tensor in tensors]
            total = torch.stack(on_device).sum(dtype=torch.float64)
        return total + number if number else total

    def _to_device(self, weight: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of a loss, which is a tensor or a number, as a tensor on the device."""
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device, dtype)
        return accelerator.tensor_of(weight, dtype=dtype, device=self.device)

    def _track(
        self, outcome: StepOutcome, rate: float, scale: float, loss: torch.Tensor | None = None
    ) -> None:
        if self.trackers is not None:
            self.trackers.end_step(
                self.global_steps,
                grad_norm=outcome.grad_norm,
                learning_rate=rate,
                loss_scale=scale,
                loss=loss,
            )

    def _recover(self) -> None:
        """Clear a failed step's state. See Note [Clearing a failed step] in `sharded.guard`."""
        if self._guard.recover():
            self._restart_step()

    def _restart_step(self) -> None:
        """Restart the step of the three calls at its first micro-batch."""
        self._micro_step = self._step_start
        self._boundary = None
        self._drop_losses()

    def _drop_losses(self) -> None:
        """Drop the weights and losses of the step's micro-batches so far."""
        self._weights = []
        if self.trackers is not None:
            self.trackers.drop_losses()

    def _update(self, *, divisor: float = 1.0, **losses: Callable[[], Any]) -> StepOutcome:
        outcome, self._decision = self.sharded.update(
            self.stepper, divisor=divisor, step=self.global_steps + 1, **losses
        )
        self._outcome = outcome
        if self._decision:
            self.communication = f"{self.communication}. {self._decision}"
        self.global_steps += 1

        every = self.config.faults.compare_replicas_every
        if every and self.global_steps % every == 0:
            compare_replicas(self.model, self.optimizer, self.sharded.mesh, step=self.global_steps)
        WATCH.progress(self.global_steps + 1, hang.BETWEEN)
        self.skipped_steps += outcome.skipped
        return outcome

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch. The first of DeepSpeed's three calls."""
        if self.sharded.pipeline is not None:
            raise InputError(
                "parallel.pp > 1: a pipeline runs full steps, because each process has a part of"
                " the model; call engine.train_batch, engine.eval_batch or engine.predict"
            )
        refuse_own_batches(self.sharded.parts, "engine(...)")
        self._recover()
        if torch.is_grad_enabled():
            self.sharded.before_microbatch(last=self.is_gradient_accumulation_boundary())
        with self._guard.running("forward"):
            return call_model(self.model, *args, **kwargs)

    def backward(
        self, loss: torch.Tensor, *, weight: Any = None, retain_graph: bool = False
    ) -> torch.Tensor:
        """Run the backward of one micro-batch. Collective.

        The gradients of several calls before `step` add up, as in one process.

        Args:
            loss: Mean loss of the micro-batch, one element.
            weight: Number of targets that the mean was taken over. With it the loss of the step is
                the global weighted mean; without it the mean over micro-batches and ranks. It must
                be passed for all backwards of a step on all ranks, or for none.
            retain_graph: Keep the graph for another backward through the same forward.

        Returns:
            The loss, detached.
        """
        checked_loss(loss)
        self._recover()
        if self._guard.backwards and bool(self._weights) != (weight is not None):
            raise InputError(
                "backward(weight=...) must be given for every backward of a step, on every rank, or"
                " for none"
            )
        self.sharded.before_microbatch(last=self.is_gradient_accumulation_boundary())
        # See Note [Division of gradients].
        factor = self.sharded.loss_scale
        if weight is None:
            scaled = loss * (factor / (self.config.batch.accumulation * self.dp_size))
        else:
            # The sum of all weights is known in `step` only, which divides by it.
            self._weights.append(weight)
            scaled = loss * (self._to_device(weight, loss.dtype) * factor)
        with self._guard.backward():
            scaled.backward(retain_graph=retain_graph)
            for callback in self.hooks.after_backward:
                callback()
        if self.trackers is not None:
            self.trackers.add_loss(loss)
        return loss.detach()

    def step(self) -> None:
        """End a micro-batch, and update the parameters if it is the last of its step. Collective.

        The LR schedule advances only if the update was not skipped.
        """
        self._recover()
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:
            # An error of a checkpoint is raised here, where all ranks are at the same place.
            self._writer.raise_failed()
        self._micro_step += 1
        self._boundary = None
        if not is_boundary:
            return

        self._step_start = self._micro_step
        divisor = 1.0
        if self._weights:
            divisor = float(AsyncAllReduce(self._sum(self._weights), self._dp_group).value())
        self._weights = []
        scale = self.sharded.loss_scale
        rate = self.get_lr()[0]
        with self._guard.running("step"):
            # A step without a single target has weight 0 and gradient 0.
            outcome = self._update(divisor=divisor or 1.0)
        self._track(outcome, rate, scale)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self._micro_step + 1) % self.config.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the current micro-batch is the last of its step.

        Args:
            is_boundary: True or False for this micro-batch only, until `step`. None: the engine
                counts micro-batches.
        """
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Return True if the last step updated the parameters."""
        return self._outcome is not None and not self._outcome.skipped

    def get_global_grad_norm(self) -> float:
        """Return the global norm of the last step's unscaled gradients before clipping.

        It is not finite for a skipped step, and 0 before the first step.
        """
        return float(self._outcome.grad_norm) if self._outcome is not None else 0.0

    def get_lr(self) -> list[float]:
        """Return the current learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def zero_grad(self, *, restart: bool = True) -> None:
        """Drop the gradients of the step's micro-batches so far, and restart the step.

        `step` drops the gradients that it has used, so a loop need not call this.

        Args:
            restart: Whether the next micro-batch is the first of its step. With False the dropped
                micro-batches still count, as in DeepSpeed and Accelerate.
        """
        self._recover()
        self._guard.drop()
        if not restart:
            self._drop_losses()
            return
        self._warn_of_dropped("engine.zero_grad()", "which begins again with its first one")
        self._restart_step()

    def _warn_of_dropped(self, call: str, consequence: str) -> None:
        dropped = self._micro_step - self._step_start
        if dropped and self.rank == 0:
            warn(
                f"{call} drops {dropped} of the {self.config.batch.accumulation}"
                f" micro-batches of a step, {consequence}; leave it out of"
                " a loop over micro-batches, because engine.step() drops the gradients it has used"
            )

    def _after_zero_grad(self, owner: Any, *, set_to_none: bool) -> None:
        """Drop the loss weights of the gradients that `ShardedModel` drops after a `zero_grad`."""
        if owner is not self.model and owner is not self.optimizer:
            return
        self._warn_of_dropped(
            f"{type(owner).__name__}.zero_grad()", "which goes on without their gradients"
        )
        count = len(self._weights)
        self._drop_losses()
        # The other micro-batches of the step must be passed weights too.
        self._weights = [0] * count

    def train(self, mode: bool = True) -> Engine:
        """Set training mode, or evaluation mode if `mode` is False."""
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Set evaluation mode."""
        return self.train(False)

    def save_checkpoint(
        self,
        folder: str | Place,
        *,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        loader: StatefulLoader | None = None,
        wait: bool = True,
    ) -> Place:
        """Write a checkpoint that loads on any layout. Collective.

        Training is not changed, and earlier checkpoints are kept.

        Args:
            folder: Folder for checkpoints, on a disk or in a store (`s3://bucket/run`).
            tag: Name of the checkpoint. The default is like `step-00000010`.
            client_state: Plain data that is equal on every rank. It is restored with its types
                (tuples, integer keys, small tensors).
            loader: This rank's data loader, such as torchdata's StatefulDataLoader. Its
                `state_dict()` is saved.
            wait: If False, the call returns when the state has been copied, and a thread writes the
                copy. See `checkpoint_written`. If a copy does not fit into host memory, or if
                states are in files, the checkpoint is written before the call returns.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: The checkpoint could not be written. With `wait=False`, the next step,
                the next save or `close` raises the error.
            InputError: A step is incomplete: micro-batches have run their backward, and no
                checkpoint stores their gradients.
        """
        self._recover()
        if self._guard.backwards:
            raise InputError(
                f"engine.save_checkpoint: {self._guard.backwards} micro-batches of this step have"
                " had their backward, and no checkpoint stores their gradients, which a resumed"
                " run would lose; save after the engine.step() that updates"
            )
        if loader is not None:
            refuse_stateless(loader, "engine.save_checkpoint")
        with WATCH.during(hang.CHECKPOINT):
            snapshot = snapshot_of(
                self, place_of(folder), tag=tag, client_state=client_state or {}, loader=loader
            )
            # See Note [Life of a save] in `checkpoint.save`. States in files are not copied: a copy
            # would need the memory that the files save.
            self._writer.begin(snapshot, asynchronous=not wait and self.sharded.tier is None)
            written = self._writer.wait() if wait else None
        return written or snapshot.folder / snapshot.tag

    def checkpoint_written(self, *, wait: bool = False) -> Place | None:
        """Return the checkpoint of `save_checkpoint(wait=False)` that has been written to disk.

        Args:
            wait: Wait until it is written.

        Returns:
            The path, once per checkpoint. None while it is being written.

        Raises:
            CheckpointError: The checkpoint could not be written, if `wait` is True. Without it, the
                next step raises the error on all ranks at once.
        """
        return self._writer.wait() if wait else self._writer.finished()

    def load_checkpoint(
        self,
        folder: str | Place,
        *,
        tag: str | None = None,
        verify: Verify = "full",
        on_note: Callable[[str], None] | None = None,
        loader: StatefulLoader | None = None,
    ) -> tuple[Place, dict[str, Any]] | None:
        """Continue from a checkpoint, on any layout. Collective.

        If a setting of the optimizer or the schedule (learning rate, betas, ...) differs from the
        configuration that the checkpoint was written with, the new configuration applies.

        Args:
            folder: Folder of checkpoints.
            tag: Name of the checkpoint. The default is the newest one that is not damaged.
            verify: Verification before loading. "full" compares every byte with its hash, "sample"
                only one tensor in eight, "off" only file sizes and manifests.
            on_note: Called on every rank with a description of each difference to the checkpoint.
                Without it the first rank warns.
            loader: This rank's data loader. It continues at its saved position. This requires the
                layout of the checkpoint.

        Returns:
            The path of the checkpoint and its client state, or None if there is no checkpoint.

        Raises:
            CheckpointError: The checkpoint is damaged, is of another model or optimizer, or has the
                loader's position for another layout.
        """
        if loader is not None:
            refuse_stateless(loader, "engine.load_checkpoint")
        self._recover()
        if self._guard.backwards:
            # These gradients belong to other weights.
            self._guard.drop()
            self._restart_step()
        with WATCH.during(hang.CHECKPOINT):
            # The newest checkpoint may still be on its way to the disk.
            self._writer.wait()
            loaded = load_engine(
                self, place_of(folder), tag=tag, verify=verify, on_note=on_note, loader=loader
            )
        WATCH.progress(self.global_steps + 1, hang.BETWEEN)
        return loaded

    def close(self) -> None:
        """Release the model, and destroy the process group if `initialize` created it.

        A replicated model may be passed to Plait again.

        Raises:
            CheckpointError: The checkpoint of `save_checkpoint(wait=False)` could not be written.
        """
        try:
            self._writer.close()
            if self.trackers is not None:
                self.trackers.close()
        finally:
            # Also if a checkpoint could not be written.
            self.sharded.close()


_CONSISTENT = (CausalLMLoss, ChunkedCausalLMLoss, PerSample)
"""Losses whose two weights are always the same."""


_ROUNDING = 1e-6
"""Relative tolerance for sums of weights that are not integers."""


class WeightCheck:
    """Check that a loss returns the weight by which its step was divided.

    `train_batch` divides the loss before the first backward by `Loss.weight` of the batch (Note
    [Weight of a loss]). A loss that returns another weight would be scaled wrongly, without any
    visible sign. Both weights are summed over the ranks in any case, so the check costs no
    communication. On a GPU the weights are read one step later, when their copy has arrived, so
    that nothing waits for the device.
    """

    def __init__(self) -> None:
        self._tolerance = _ROUNDING
        self._copied: tuple[HostCopy, int] | None = None
        """Weights of the previous step and its number."""

    def applies_to(self, loss_fn: Loss) -> bool:
        """Return True if a loss may return another weight than its `weight` function does."""
        return type(loss_fn) not in _CONSISTENT

    def note(self, weight: Any) -> None:
        """Adapt the tolerance to the dtype of a weight."""
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            self._tolerance = max(self._tolerance, 2 * torch.finfo(weight.dtype).eps)

    def __call__(self, *, divided_by: torch.Tensor, returned: torch.Tensor, step: int) -> None:
        """Compare the weights of a step, both summed over all ranks.

        Args:
            divided_by: Weight before the forward, 0-dimensional.
            returned: Weight that the loss returned, 0-dimensional.
            step: Number of the step.

        Raises:
            InputError: The weights differ. Raised on all ranks.
        """
        # On a CPU reading the numbers waits for nothing.
        if divided_by.device.type == "cpu":
            self._compare(float(divided_by), float(returned), step)
            return
        previous = self._copied
        self._copied = (HostCopy(torch.stack([divided_by.double(), returned.double()])), step)
        if previous is not None:
            copy, previous_step = previous
            previous_divided_by, previous_returned = copy.values().tolist()
            self._compare(previous_divided_by, previous_returned, previous_step)

    def _compare(self, divided_by: float, returned: float, step: int) -> None:
        if not abs(divided_by - returned) <= self._tolerance * max(abs(divided_by), abs(returned)):
            raise InputError(
                f"step {step}: the loss returned weights that add up to {returned:g}, and its"
                f" weight function (the loss's `weight`) returned {divided_by:g} for the same"
                " batch; train_batch divides by the second, before the first backward, so both must"
                " count the same"
            )


class OptimizerProxy(torch.optim.Optimizer):
    """Proxy of an engine's optimizer for the construction of torch LR schedulers.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        # The constructor of torch is not called: groups and states are the engine's.
        self.engine = engine

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the engine."""
        return self.engine.optimizer

    def __getattr__(self, name: str) -> Any:
        # While the object is unpickled, it has no attributes yet.
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Parameter groups of the engine's optimizer."""
        return self.engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """States of the engine's optimizer on this rank."""
        return self.engine.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Default values of the engine's optimizer."""
        return self.engine.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because its gradients were not finite."""
        return self.engine.global_steps > 0 and not self.engine.was_step_applied()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state. A checkpoint stores the parts of all ranks."""
        return self.engine.optimizer.state_dict()
