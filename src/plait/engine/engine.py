"""The engine: full optimizer steps (`train_batch`), or DeepSpeed's three calls (`engine(...)`,
`backward`, `step`).

Both divide before they reduce and reduce by sum. `train_batch` divides by the global weight of the
step (its result does not depend on how samples are cut over ranks and micro-batches); the three
calls take DeepSpeed's mean of means, unless `backward` is told weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plait.checkpoint.load import Verify
from plait.checkpoint.places import Place, place_of
from plait.checkpoint.writer import Writer
from plait.cluster import accelerator
from plait.comm import board
from plait.comm.pending import Pending
from plait.comm.watch import WATCH
from plait.engine.facts import EngineFacts
from plait.engine.loader_state import StatefulLoader, refuse_stateless
from plait.engine.state import load_engine, snapshot_of
from plait.engine.trackers import EngineTrackers
from plait.errors import InputError, PlaitError
from plait.inference.generate import generate
from plait.inference.requests import Generation
from plait.inference.score import score
from plait.losses.balance_loss import without_balance_loss
from plait.losses.loss import Loss, checked_total
from plait.losses.weight_check import WeightCheck
from plait.model.positions import call_model
from plait.sharded.guard import checked_loss
from plait.sharded.misuse import refuse_own_batches
from plait.sharded.model import ShardedModel
from plait.sharded.replicas import compare_replicas
from plait.sharded.step import Outcome, Stepper


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Tensors are 0-dimensional and on the device: read them only when
    needed.
    """

    loss: torch.Tensor
    """Global weighted mean."""
    weight: torch.Tensor
    """Its denominator."""
    grad_norm: torch.Tensor
    """Global, unscaled, before clipping."""
    skipped: bool
    """Gradients were not finite; nothing changed but the loss scale."""
    learning_rate: float
    """The rate of this step."""
    loss_scale: float
    """The scale of this step; 1 without float16."""
    decided: str = ""
    """A description of the decision about compression, after the step that takes it."""

    def __float__(self) -> float:
        return float(self.loss)


class Engine(EngineFacts):
    """Made by `plait.initialize`. The model is sharded in place and stays the user's own object."""

    def __init__(self, sharded: ShardedModel, stepper: Stepper, loss_fn: Loss | None) -> None:
        self.sharded = sharded
        """The model on its layout, and what acts on its steps."""
        self.config = sharded.config
        self.stepper = stepper
        self.loss_fn = loss_fn
        self.global_steps = 0
        self.skipped_steps = 0
        self._guard = sharded.guard
        self._dp_group = sharded.mesh.group(*sharded.parts.batch_axes)
        self._loss_group = sharded.mesh.group("pp", *sharded.parts.batch_axes)
        self._micro_step = self._step_began = 0
        self._boundary: bool | None = None
        self._weights: list[Any] = []
        self._weight_check = WeightCheck()
        self._outcome: Outcome | None = None
        self.communication = self.hooks.said
        """How data-parallel ranks exchange gradients and parameters, and why so; with what the
        first steps decided.
        """
        self._decided = ""
        self._writer = Writer(sharded.mesh)
        self.trackers: EngineTrackers | None = None
        """Trackers of the caller's loop, on the first rank; None where none are enabled, and for
        `plait train`, whose loop has them.
        """
        WATCH.progress(1, board.BETWEEN)

    def train_batch(self, batch: Any) -> StepResult:
        """One optimizer step over this data-parallel rank's share of the batch: micro_batch_size x
        accumulation samples (see `parallel.micro_batches.micro_batches`).

        The loss of every target counts the same, whichever rank and micro-batch it is in. Raises
        InputError for a wrong amount of data, PlaitError where the engine has no loss, and
        NumbersError on all ranks, before anything is updated, where loss or gradients are not
        finite and `faults.non_finite` does not skip such steps.
        """
        loss_fn = self._loss()
        self.sharded.refuse_within("train_batch")
        self._recover()
        self._writer.raise_failed()
        with self._guard.running("step"):
            return self._train_batch(loss_fn, batch)

    def _train_batch(self, loss_fn: Loss, batch: Any) -> StepResult:
        pieces = self.sharded.micro_batches(batch)
        # Overlaps with the first forward.
        weight = Pending(self._sum([loss_fn.weight(piece) for piece in pieces]), self._dp_group)
        checks_weight = self._weight_check.applies_to(loss_fn)
        totals: list[torch.Tensor] = []
        returned_weights: list[Any] = []
        factors: dict[torch.dtype, torch.Tensor] = {}

        def factor(dtype: torch.dtype) -> torch.Tensor:
            if dtype not in factors:
                # A step without a single target has gradient 0, not 0 / 0.
                divisor = torch.clamp(weight.value(), min=torch.finfo(torch.float64).tiny)
                factors[dtype] = (self.sharded.loss_scale / divisor).to(dtype)
            return factors[dtype]

        def scaled(output: Any, piece: Any) -> torch.Tensor:
            total, returned_weight = checked_total(loss_fn(output, piece))
            totals.append(total.detach())
            if checks_weight:
                self._weight_check.note(returned_weight)
            returned_weights.append(returned_weight)
            return total * factor(total.dtype)

        self.sharded.train_microbatches(pieces, scaled, loss_fn=without_balance_loss(loss_fn))
        # Only the last stage of a pipeline has a loss. The sum overlaps with the norm.
        loss_sum = self._sum(totals)
        # Two numbers on every rank, also where the loss functions of ranks differ: sizes of
        # messages must agree.
        everywhere = Pending(torch.stack([loss_sum, self._sum(returned_weights)]), self._loss_group)
        scale = self.sharded.loss_scale
        rate = self.get_lr()[0]
        outcome = self._update(
            loss=lambda: everywhere.value()[0], own_loss=lambda: math.fsum(map(float, totals))
        )
        targets = weight.value()
        if checks_weight:
            self._weight_check(
                divided_by=targets, returned=everywhere.value()[1], step=self.global_steps
            )
        loss = everywhere.value()[0] / targets
        self._track(outcome, rate, scale, loss)
        return StepResult(
            loss, targets, outcome.grad_norm, outcome.skipped, rate, scale, self._decided
        )

    @torch.no_grad()
    def eval_batch(self, batch: Any) -> tuple[float, float]:
        """(loss sum, weight) of one micro-batch a rank, summed over all ranks; dropout off, nothing
        changed. Collective.
        """
        loss_fn = self._loss()
        self._recover()
        piece = self.sharded.prepared(batch)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self.evaluating(), self.sharded.logits_for(loss_fn):
            output = self.sharded.output(piece)
            if self.sharded.holds_output:
                total, seen = checked_total(loss_fn(output, piece))
                totals += torch.stack([total.double(), self._there(seen, torch.float64)])
        if self._loss_group is not None:
            dist.all_reduce(totals, group=self._loss_group)
        return float(totals[0]), float(totals[1])

    def predict(self, batch: Any, *, cache: Any = None) -> Any:
        """The model's output for one micro-batch, in evaluation mode; None on the ranks of a
        pipeline that do not hold its last stage. Collective. Several in a row are faster inside
        `evaluating`. `cache`: see `ShardedModel.predict`.
        """
        self._recover()
        return self.sharded.predict(batch, cache=cache)

    def new_cache(self) -> Any:
        """An empty cache for `predict`; None for a model that takes none."""
        return self.sharded.new_cache()

    def generate(self, prompts: Any, **settings: Any) -> list[Generation]:
        """What the model adds to prompts, on the layout that it is trained on; nothing of the
        training changes. Collective. See `inference.generate.generate` for all arguments.
        """
        self._recover()
        return generate(self.sharded, prompts, **settings)

    def score(self, sequences: Any, **settings: Any) -> list[torch.Tensor]:
        """Log-probabilities of the tokens of sequences, on the layout that the model is trained on;
        nothing of the training changes. Collective. See `inference.score.score` for all arguments.
        """
        self._recover()
        return score(self.sharded, sequences, **settings)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode; parameters that `predict` gathers are resharded at the
        end.
        """
        if not self.sharded.is_evaluating:
            self._recover()
        with self.sharded.evaluating():
            yield

    def from_output_stage(self, value: Any) -> Any:
        """`value` of the rank of a pipeline that holds the last stage, on all its ranks; small, and
        picklable. Collective.
        """
        return self.sharded.from_output_stage(value)

    def _loss(self) -> Loss:
        if self.loss_fn is None:
            raise PlaitError(
                "this engine has no loss: pass loss_fn= to plait.initialize (plait.causal_lm_loss"
                " for a language model, plait.per_sample(...) for a mean over samples), or use"
                " engine(...), engine.backward(loss), engine.step()"
            )
        return self.loss_fn

    def _sum(self, values: Sequence[Any]) -> torch.Tensor:
        """Return the sum of numbers and 0-dimensional tensors: a new tensor, 0-dimensional,
        float64, on the device.
        """
        tensors = [value.reshape(()) for value in values if isinstance(value, torch.Tensor)]
        number = sum(value for value in values if not isinstance(value, torch.Tensor))
        if not tensors:
            return accelerator.tensor_of(number, dtype=torch.float64, device=self.device)
        if len(tensors) == 1:
            total = tensors[0].to(self.device, torch.float64, copy=True)
        else:
            total = torch.stack([tensor.to(self.device) for tensor in tensors]).sum(
                dtype=torch.float64
            )
        return total + number if number else total

    def _there(self, weight: Any, dtype: torch.dtype) -> torch.Tensor:
        """A weight of a loss, a tensor or a number, 0-dimensional on the device."""
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device, dtype)
        return accelerator.tensor_of(weight, dtype=dtype, device=self.device)

    def _track(
        self, outcome: Outcome, rate: float, scale: float, loss: torch.Tensor | None = None
    ) -> None:
        if self.trackers is not None:
            norm = outcome.grad_norm
            self.trackers.end_step(
                self.global_steps, grad_norm=norm, learning_rate=rate, loss_scale=scale, loss=loss
            )

    def _recover(self) -> None:
        """Clear what a failed step left; one of three calls begins anew with its first
        micro-batch.
        """
        if self._guard.recover():
            self._restart_step()

    def _restart_step(self) -> None:
        self._micro_step = self._step_began
        self._boundary = None
        self._weights = []
        if self.trackers is not None:
            self.trackers.drop_losses()

    def _update(self, *, divisor: float = 1.0, **losses: Callable[[], Any]) -> Outcome:
        outcome, self._decided = self.sharded.update(
            self.stepper, divisor=divisor, step=self.global_steps + 1, **losses
        )
        self._outcome = outcome
        if self._decided:
            self.communication = f"{self.communication}. {self._decided}"
        self.global_steps += 1
        every = self.config.faults.compare_replicas_every
        if every and self.global_steps % every == 0:
            compare_replicas(self.model, self.optimizer, self.sharded.mesh, step=self.global_steps)
        WATCH.progress(self.global_steps + 1, board.BETWEEN)
        self.skipped_steps += outcome.skipped
        return outcome

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch."""
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
        """Backward of one micro-batch. `loss` is its mean. Called several times before `step`,
        gradients add up, as in one process.

        Without `weight` the step's loss is the mean over micro-batches and ranks (DeepSpeed's);
        with it (the number of targets that the mean was taken over) it is the global weighted mean.
        A step must give weights for all of its micro-batches or for none. `retain_graph`: as
        torch's, for another backward through the same forward; the gradients add up.
        """
        checked_loss(loss)
        self._recover()
        if self._guard.backwards and bool(self._weights) != (weight is not None):
            raise InputError(
                "backward(weight=...) must be given for every backward of a step, on every rank, or"
                " for none"
            )
        self.sharded.before_microbatch(last=self.is_gradient_accumulation_boundary())
        factor = self.sharded.loss_scale
        if weight is None:
            scaled = loss * (factor / (self.config.batch.accumulation * self.dp_size))
        else:
            self._weights.append(weight)
            scaled = loss * (self._there(weight, loss.dtype) * factor)
        with self._guard.backward():
            scaled.backward(retain_graph=retain_graph)
            for complete in self.hooks.after_backward:
                complete()
        if self.trackers is not None:
            self.trackers.add_loss(loss)
        return loss.detach()

    def step(self) -> None:
        """End a micro-batch; at the end of a step, update. The learning rate moves only when the
        update was not skipped.
        """
        self._recover()
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            self._writer.raise_failed()
        self._micro_step += 1
        self._boundary = None
        if boundary:
            self._step_began = self._micro_step
            divisor = (
                float(Pending(self._sum(self._weights), self._dp_group).value())
                if self._weights
                else 1.0
            )
            self._weights = []
            scale = self.sharded.loss_scale
            rate = self.get_lr()[0]
            with self._guard.running("step"):
                outcome = self._update(divisor=divisor or 1.0)
            self._track(outcome, rate, scale)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self._micro_step + 1) % self.config.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide for the current micro-batch whether it is the last; forgotten after `step`. None:
        as counted.
        """
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last step updated the parameters."""
        return self._outcome is not None and not self._outcome.skipped

    def get_global_grad_norm(self) -> float:
        """Norm of the last step's gradients over all ranks, unscaled, before clipping; not finite
        for a skipped step.
        """
        return float(self._outcome.grad_norm) if self._outcome is not None else 0.0

    def get_lr(self) -> list[float]:
        """Current learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def zero_grad(self) -> None:
        """Drop the gradients of the step's micro-batches so far. `step` clears those that it used,
        so no loop has to call this.
        """
        self._recover()
        self._guard.drop()
        self._weights = []
        if self.trackers is not None:
            self.trackers.drop_losses()

    def train(self, mode: bool = True) -> Engine:
        """Set training mode."""
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
        """Write a checkpoint that loads on any layout (default tag `step-00000010`) into a folder,
        or a store's (`s3://bucket/run`). Collective; training is not changed. `client_state` is
        plain data, equal on every rank, and is restored with its types (tuples, integer keys, small
        tensors). `loader`: this rank's, whose `state_dict()` is kept, such as torchdata's
        StatefulDataLoader's.

        `wait` False returns when the state was copied, and a thread writes the copy;
        `checkpoint_written` says when it is on the disk. Where there is no room for a copy, or
        states are in files, it is written at once. Raises CheckpointError; for a copy that could
        not be written the next step or save does, or `close`. What was saved before stays. Raises
        InputError between the micro-batches of a step, whose gradients no checkpoint keeps.
        """
        self._recover()
        if self._guard.backwards:
            raise InputError(
                f"engine.save_checkpoint: {self._guard.backwards} micro-batches of this step have"
                " had their backward, and no checkpoint keeps their gradients, which a resumed run"
                " would lose; save after the engine.step() that updates"
            )
        if loader is not None:
            refuse_stateless(loader, "engine.save_checkpoint")
        with WATCH.during(board.CHECKPOINT):
            taken = snapshot_of(
                self, place_of(folder), tag=tag, client_state=client_state or {}, loader=loader
            )
            self._writer.begin(taken, stage=not wait and self.sharded.tier is None)
            written = self._writer.wait() if wait else None
        return written or taken.folder / taken.tag

    def checkpoint_written(self, *, wait: bool = False) -> Place | None:
        """The checkpoint of `save_checkpoint(wait=False)` that has reached the disk since the last
        call; None while it has not. With `wait` CheckpointError is raised where it could not be
        written; without it the next step raises it, on all ranks at once.
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
        """Go on from `folder/tag`, or from the latest that is undamaged; None where there is none.
        Returns its path and client state. Collective. `verify`: "full" compares every byte with its
        hash first, "sample" one tensor in eight, "off" only sizes and lists. What the configuration
        has otherwise than then (learning rate, betas, schedule ...) is the configuration's from
        here on. `on_note` is told of it on every rank, else the first rank warns. `loader` goes on
        where this rank's stood, on the same layout. Raises CheckpointError for another model's or
        optimizer's, and for a loader of another layout.
        """
        if loader is not None:
            refuse_stateless(loader, "engine.load_checkpoint")
        self._recover()
        if self._guard.backwards:
            self.zero_grad()  # they are of other weights
            self._restart_step()
        with WATCH.during(board.CHECKPOINT):
            self._writer.wait()
            found = load_engine(
                self, place_of(folder), tag=tag, verify=verify, on_note=on_note, loader=loader
            )
        WATCH.progress(self.global_steps + 1, board.BETWEEN)
        return found

    def close(self) -> None:
        """Let go of the model, and end the process group, if `initialize` made it. A replicated
        model may be given to Plait again. Raises CheckpointError where
        `save_checkpoint(wait=False)` could not write its copy.
        """
        try:
            self._writer.close()
            if self.trackers is not None:
                self.trackers.close()
        finally:
            self.sharded.close()
