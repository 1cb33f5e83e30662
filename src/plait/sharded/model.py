"""`ShardedModel`: a model on its layout, and the calls that run it. One handle under everything
that does.

It knows micro-batches, gradients and hooks, but no schedule and no files: those are the engine's.
It has no optimizer either: what steps one brings it (`stepper`, `update`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait.cluster.fake_group import is_fake
from plait.cluster.mesh import Mesh
from plait.comm import board
from plait.comm.desync import ComparedCollectives
from plait.comm.watch import WATCH
from plait.config.resolving.batch import CALLERS, MICRO
from plait.config.resolving.resolve import Resolved
from plait.errors import InputError, NumbersError
from plait.losses.chunked_loss import DeferredLogits
from plait.optim.backward_optimizer import BackwardOptimizer
from plait.optim.disk_optimizer import DiskTier
from plait.optim.gradient_norm import global_norm
from plait.parallel.activations.saved_tensors import OffloadedActivations
from plait.parallel.data.data_parallel import free_after_evaluation, free_gathered
from plait.parallel.hooks import Hooks, StepEnd
from plait.parallel.micro_batches import CACHES, Forward, micro_batches, to_device, with_cache
from plait.parallel.pipeline.cut_check import LossFunction
from plait.parallel.pipeline.pipeline_parallel import PipelineRank
from plait.parallel.precision.loss_scale import LossScaler
from plait.parallel.technique import Parts
from plait.parallel.tensor.styles import Region
from plait.sharded.cache import cache_argument, new_cache
from plait.sharded.finite import not_finite
from plait.sharded.guard import Guard
from plait.sharded.misuse import refuse_cache, refuse_resized
from plait.sharded.step import Outcome, Stepper
from plait.sharded.unchanged import UnchangedParameters
from plait.sharded.within import Forwards

_ATTRIBUTE = "_plait"


class ShardedModel:
    """A model that was sharded in place, and stays the user's own object. Made by
    `sharded.assemble.shard`.
    """

    def __init__(
        self,
        parts: Parts,
        mesh: Mesh,
        config: Resolved,
        *,
        forward: Forward,
        handle: str = "engine",
    ) -> None:
        """`handle`: what the user has it as, for messages."""
        self.mesh = mesh
        self.config = config
        self.forward = forward
        self.guard = Guard(parts, handle)
        self.parts = parts.with_(hooks=Hooks((*parts.hooks.all, self.guard)))
        self.pipeline = parts.hooks.of(PipelineRank)
        self.region = parts.noted(Region)
        self.tier = parts.hooks.of(DiskTier)
        scale = config.precision.loss_scale
        self.scaler = LossScaler(scale) if scale is not None else None
        self._unchanged = UnchangedParameters(parts.model, mesh)
        self.is_evaluating = False
        self._evaluates_in: int | None = None
        """The thread."""
        self._turn = threading.Lock()
        parameters = () if self.is_cut else parts.model.named_parameters()
        self._shapes = [(name, parameter, parameter.shape) for name, parameter in parameters]
        """Parameters of a replicated model. Of a model that was cut, the calls that resize are
        refused themselves.
        """
        self._forwards = (
            Forwards(parts.model)
            if self.is_cut or mesh.layout.dp < mesh.layout.world_size
            else None
        )
        self._compared = ExitStack()
        if config.faults.check_collectives and mesh.layout.world_size > 1:
            self._compared.enter_context(ComparedCollectives())
        free_after_evaluation(parts.model, unless=lambda: self.is_evaluating)
        # A plain attribute of the user's model, outside nn.Module's registries: no wrapper, no
        # global table, names stay as they are.
        object.__setattr__(parts.model, _ATTRIBUTE, self)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nobody, ()  # a copy of the model, or one from a file, is nobody's

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.parts.model

    @property
    def hooks(self) -> Hooks:
        """What acts on a step."""
        return self.parts.hooks

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.mesh.device

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by before its backward; 1 without float16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def holds_output(self) -> bool:
        """Whether this rank has the model's output: all have, but those of a pipeline that do not
        hold its last stage.
        """
        return self.pipeline is None or self.pipeline.holds_output

    def prepared(self, batch: Any) -> Any:
        """A micro-batch on the device, as the techniques want it."""
        # Techniques run first: they read values of the batch, which after the move would wait for
        # the device.
        return to_device(self.hooks.prepared(batch), self.device)

    def micro_batches(self, batch: Any) -> list[Any]:
        """A step's micro-batches, `prepared`. A file without batch sizes takes what it is given."""
        sizes = self.config.batch
        size = sizes.micro_batch_size if self.config.sources.get(MICRO) != CALLERS else None
        return [
            self.prepared(piece)
            for piece in micro_batches(batch, count=sizes.accumulation, size=size)
        ]

    def before_microbatch(self, *, last: bool) -> None:
        """Before the forward of a micro-batch. `last`: of its step."""
        WATCH.phase(board.FORWARD)
        refuse_resized(self._shapes)
        for tell in self.hooks.before_microbatch:
            tell(last)

    def train_microbatches(
        self,
        pieces: Sequence[Any],
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        loss_fn: LossFunction | None = None,
    ) -> None:
        """Forward and backward of a step's micro-batches, through the pipeline where there is one.
        `loss(output, micro-batch)` returns the 0-dimensional tensor that the backward begins with.
        `loss_fn` is what it computes with: logits stay split over the vocabulary where it can use
        them so, and a pipeline checks that it has what it reads. Collective.
        """
        with self.logits_for(loss_fn):
            if self.pipeline is not None:
                with self.guard.backward():
                    self.pipeline.runtime.train(
                        pieces, forward=self.forward, loss=loss, loss_fn=loss_fn
                    )
                return
            for index, piece in enumerate(pieces):
                self.before_microbatch(last=index == len(pieces) - 1)
                begin = loss(self.forward(self.model, piece), piece)
                with self.guard.backward():
                    begin.backward()

    def finish_reduction(self) -> None:
        """After the last backward of a step: gradients are the sums over all ranks. A second call
        does nothing. Collective.
        """
        if self.guard.reduced:
            return
        for finish in self.hooks.finish_reduction:
            finish()
        self.guard.reduced = True

    def grad_norm(self) -> torch.Tensor:
        """Global norm of the gradients, each element counted once whatever the layout; float64,
        0-dimensional. Collective.
        """
        grads = [
            p.grad
            for p in self.model.parameters()
            if p.grad is not None and p not in self.counted_by_others
        ]
        return global_norm(grads, self.mesh, tier=self.tier)

    @property
    def counted_by_others(self) -> frozenset[nn.Parameter]:
        """Parameters that another pipeline stage holds too, and counts in the norm."""
        return self.pipeline.counted if self.pipeline is not None else frozenset()

    def stepper(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        in_backward: BackwardOptimizer | None = None,
        **schedule: Any,
    ) -> Stepper:
        """What updates the model's parameters with an optimizer. `schedule`: of the learning rate,
        see `Stepper`.
        """
        return Stepper(
            parameters=list(self.model.parameters()),
            mesh=self.mesh,
            optimizer=optimizer,
            clipping=self.config.gradient_clipping,
            counted_by_others=self.counted_by_others,
            scaler=self.scaler,
            non_finite=self.non_finite,
            asks=self.asks_before_update,
            tier=self.tier,
            before_update=self.hooks.before_update,
            in_backward=in_backward,
            **schedule,
        )

    @property
    def non_finite(self) -> Literal["raise", "skip"]:
        """What becomes of a step whose loss or gradients are not finite."""
        wanted = self.config.faults.non_finite
        return (
            wanted
            if wanted != "auto"
            else "skip"
            if self.config.precision.check_overflow
            else "raise"
        )

    @property
    def asks_before_update(self) -> bool:
        """Whether a step is known to be finite before its update. Where nothing asks for it, a GPU
        is not waited for, and the numbers of a rank whose peers do not exist are not looked at.
        """
        asked = (
            self.scaler is not None
            or self.config.precision.check_overflow
            or self.config.faults.non_finite != "auto"
        )
        return asked or (self.device.type == "cpu" and not is_fake())

    def error_of_numbers(
        self, step: int, own_loss: Callable[[], float] | None = None
    ) -> Callable[[float], NumbersError]:
        """Makes the error of a step that is not finite from the norm of its gradients.
        Collective.
        """

        def error(norm: float) -> NumbersError:
            own = own_loss() if own_loss is not None else None
            return not_finite(self.model, step=step, norm=norm, loss=own, device=self.device)

        return error

    def update(
        self,
        stepper: Stepper,
        *,
        divisor: float = 1.0,
        loss: Callable[[], torch.Tensor] | None = None,
        own_loss: Callable[[], float] | None = None,
        step: int = 0,
    ) -> tuple[Outcome, str]:
        """End a step: reduce, update, tell the hooks. Returns also a description of what they
        decided. `loss`, `own_loss`: the step's over all ranks, and what this rank has of it;
        `step`: its number, for the error. Collective. Raises NumbersError on all ranks, before
        anything has changed, where the step is not finite and none is skipped.
        """
        self.guard.check_update(stepper.optimizer)
        WATCH.phase(board.UPDATE)
        self.finish_reduction()
        self.guard.reduced = False
        scale = self.loss_scale
        self._unchanged.before_update()
        outcome = stepper(divisor=divisor, loss=loss, error=self.error_of_numbers(step, own_loss))
        self._unchanged.after_update(stepper.optimizer, skipped=outcome.skipped)
        end = StepEnd(skipped=outcome.skipped, rescaled=self.loss_scale / scale)
        return outcome, ". ".join([said for after in self.hooks.after_step if (said := after(end))])

    def refuse_within(self, call: str) -> None:
        """Raise InputError for a call from inside of a pipeline's step, or of a forward or backward
        that computes with parts of the model on this rank: the call would take from under it what
        it gathered, and the others are at other places.
        """
        if self.pipeline is not None:
            self.pipeline.runtime.refuse_within(call)
        if self._forwards is not None and (self._forwards.running or self.guard.in_backward):
            raise InputError(
                f"{call} was called inside of the model's"
                f" {'forward' if self._forwards.running else 'backward'} (by a hook, or by one of"
                " its modules), which computes with parts of the model on each rank, and the call"
                " would change what it has gathered; call it before or after"
            )

    def predict(self, batch: Any, *, cache: Any = None, passes_on: bool = False) -> Any:
        """The model's output for one micro-batch, in evaluation mode; None on the ranks of a
        pipeline that do not hold its last stage. Of full sequences, also where a technique cuts
        them. Collective. Several in a row are faster inside `evaluating`.

        `cache`, from `new_cache`, is what the model keeps of the tokens before those of `batch`, a
        mapping; the model adds to it. Raises InputError where the layout has no place for one.
        `passes_on`: where a stage of a pipeline fails, the others go on, see `Runtime.evaluate`.
        """
        self.refuse_within("predict")
        if cache is not None:
            refuse_cache(self.parts, self.mesh, cache)
            batch = with_cache(batch, cache, argument=cache_argument(self.model) or CACHES[0])
        with torch.no_grad(), self.evaluating():
            output = self.output(self.prepared(batch), passes_on=passes_on)
            logits = getattr(output, "logits", None)
            # parallel.loss_chunk_tokens leaves the head to the loss
            if isinstance(logits, DeferredLogits):
                output.logits = logits.full()
        return self.hooks.joined(output, batch) if self.holds_output else output

    def new_cache(self, *, on_host: bool = False) -> Any:
        """An empty cache for `predict`; None for a model that takes none. Raises ModelError where a
        stage cannot keep one. `on_host`: see `sharded.cache`.
        """
        return new_cache(
            self.model,
            self.pipeline.runtime.staged if self.pipeline is not None else None,
            on_host=on_host,
        )

    @torch.no_grad()
    def output(self, piece: Any, *, passes_on: bool = False) -> Any:
        """`predict`, of a micro-batch that is `prepared`."""
        with self.evaluating():
            if self.pipeline is not None:
                return self.pipeline.runtime.evaluate(
                    piece, forward=self.forward, passes_on=passes_on
                )
            return self.forward(self.model, piece)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode; parameters that `predict` gathers are resharded at the end.
        Raises InputError where another thread is in it: the first to leave would take the other out
        of evaluation mode.
        """
        if self._evaluates_in == threading.get_ident():
            yield
            return
        self.refuse_within("an evaluation")
        if not self._turn.acquire(blocking=False):
            raise InputError(
                "another thread evaluates this model or generates with it; make such calls one"
                " after the other"
            )
        training, self.is_evaluating, self._evaluates_in = (
            self.model.training,
            True,
            threading.get_ident(),
        )
        self.model.eval()
        try:
            with self.guard.running("forward"), WATCH.during(board.EVALUATION):
                yield
        finally:
            self.is_evaluating = False
            self._evaluates_in = None
            self.model.train(training)
            free_gathered(self.model)
            self._turn.release()

    @contextmanager
    def logits_for(self, loss_fn: object) -> Iterator[None]:
        """Logits stay split over the vocabulary where the loss can use them so."""
        if self.region is None:
            yield
            return
        self.region.serve(loss_fn)
        try:
            yield
        finally:
            self.region.gather_logits = True

    def from_output_stage(self, value: Any) -> Any:
        """`value` of the rank of a pipeline that holds the last stage, on all its ranks; small, and
        picklable. Collective.
        """
        group = self.mesh.group("pp")
        if self.pipeline is None or group is None:
            return value
        box = [value if self.holds_output else None]
        dist.broadcast_object_list(box, group=group, group_src=self.pipeline.output_rank)
        return box[0]

    @property
    def is_cut(self) -> bool:
        """Whether the model's parameters are parts of what they were, so that no other owner can
        take it.
        """
        layout = self.mesh.layout
        parts = self.parts
        return (
            isinstance(parts.model, FSDPModule)
            or max(layout.pp, layout.tp, layout.ep) > 1
            or parts.noted(OffloadedActivations) is not None
        )

    def release(self) -> None:
        """Let go of the model, if it is still this handle's: a replicated one is as it was, but for
        its weights.
        """
        if owner_of(self.model) is not self:
            return
        self._compared.close()
        if self._forwards is not None:
            self._forwards.close()
        for end in self.hooks.release:
            end()
        if not self.is_cut:
            object.__delattr__(self.model, _ATTRIBUTE)

    def close(self) -> None:
        """`release`, and end its threads, files and process groups, the default one where Plait
        made it and nobody else uses it.
        """
        self.release()
        for end in self.hooks.close:
            end()
        self.mesh.close()


def owner_of(model: nn.Module) -> ShardedModel | None:
    """The handle that has the model now."""
    return getattr(model, _ATTRIBUTE, None)


def _nobody() -> None:
    return None
