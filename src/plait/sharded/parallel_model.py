"""`plait.parallelize`: a sharded model for your own training loop.

Where a plain loop is enough, `loss.backward()` leaves gradients that are means over the
data-parallel ranks, as DistributedDataParallel does, and any optimizer steps. What needs to see the
step (`why_called`) has it called: `sharded.backward(loss)` or `sharded.forward_backward(batch,
loss_fn)`, then `sharded.step(optimizer)`. These work everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.cluster.mesh import Mesh
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, InputError, ModelError, Problem, refuse
from plait.model.experts import wants_balance_loss
from plait.model.positions import call_model
from plait.optim.gradient_math import multiply_all
from plait.optim.gradient_norm import clip_factor
from plait.optim.placement_groups import step_by_placement
from plait.parallel.data.data_parallel import free_gathered
from plait.parallel.data.reducer import Reducer
from plait.parallel.hooks import Hooks
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.technique import Parts
from plait.sharded.assemble import ConfigLike, leaving_no_group, resolved_for, shard
from plait.sharded.check import checked_model
from plait.sharded.guard import checked_loss
from plait.sharded.misuse import checked_optimizer, refuse_own_batches
from plait.sharded.model import ShardedModel
from plait.sharded.ownership import refuse_taken, take_over
from plait.sharded.step import Outcome, Stepper
from plait.sharded.step_watch import StepWatch

MeanLoss = Callable[[Any, Any], torch.Tensor]
"""(output, micro-batch) -> the mean loss of the micro-batch, 0-dimensional."""


def why_called(config: Resolved) -> str | None:
    """Why the steps of your own training loop have to be `ParallelModel.step`; None where a plain
    loop is enough.
    """
    if config.layout.pp > 1:
        return f"parallel.pp = {config.layout.pp}: each process has a part of the model"
    if config.precision.loss_scale is not None:
        return "fp16: the loss is scaled, and a step with an overflow is skipped on all ranks"
    if config.compression.candidates:
        return 'parallel.compress_gradients = "auto": full steps are timed to decide it'
    for section, device in (
        ("optimizer", config.optimizer_offload.device),
        ("param", config.parameter_offload.device),
    ):
        if device == "nvme":
            return f"zero_optimization.offload_{section}: the step reads and writes files"
    return None


class ParallelModel(ShardedModel):
    """Of your own training loop. Gradients are means over the data-parallel ranks; `accumulate`
    leaves the division by the number of micro-batches to you, `forward_backward` does it.
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
        """`before`: the parameters that the model had before it was sharded."""
        self.why_called = why_called(config)
        self._watch = StepWatch(
            parts.model, before, parts.noted(Reducer), why_called=self.why_called
        )
        self.steps = 0
        """Taken with `step`, of this process."""
        self._steppers: WeakKeyDictionary[torch.optim.Optimizer, Stepper] = WeakKeyDictionary()
        parts = parts.with_(hooks=Hooks((*parts.hooks.all, self._watch)))
        super().__init__(parts, mesh, config, forward=forward, handle="sharded")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the model, which may also be called itself."""
        if self.pipeline is not None:
            raise InputError(
                f"{self.why_called}: call sharded.forward_backward, or sharded.predict without"
                " gradients"
            )
        self.guard.recover()
        return call_model(self.model, *args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside belong to a step that goes on: gradients accumulate and, where the ZeRO
        stage allows, nothing is communicated.

        Forward and backward of every micro-batch but the last go inside; the last one goes outside.
        An exception inside ends the step: its gradients are dropped, also those that no optimizer
        sees yet.
        """
        self.before_microbatch(last=False)
        try:
            with self._dropping_what_failed():
                yield
        finally:
            self.before_microbatch(last=True)

    @contextmanager
    def _dropping_what_failed(self) -> Iterator[None]:
        """In a plain loop nothing of the handle may be called next, so the gradients of a step that
        failed go at once.
        """
        try:
            yield
        except BaseException:
            if self.why_called is None:
                self.guard.drop()
            raise

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch from its loss, 0-dimensional."""
        checked_loss(loss, "sharded")
        self.guard.recover()
        if self.why_called is None:
            loss.backward()
            return
        with self.guard.backward():
            (loss * (self.loss_scale / self.mesh.layout.dp)).backward()
            for complete in self.hooks.after_backward:
                complete()

    def forward_backward(self, batch: Any, loss_fn: MeanLoss) -> torch.Tensor:
        """Forward and backward of a step's micro-batches (`batch`: see
        `parallel.micro_batches.micro_batches`), also through a pipeline. Returns the mean of their
        losses, on every rank of the pipeline; 0-dimensional, float64. After an exception that all
        ranks had, the step begins anew. Collective.
        """
        self.refuse_within("forward_backward")
        self.guard.recover()
        if self.why_called is not None and self.guard.backwards:
            raise InputError(
                "sharded.forward_backward is a step's only call; call sharded.step(optimizer)"
                " before the next"
            )
        count = self.config.batch.accumulation
        pieces = self.micro_batches(batch)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        factor = (
            1 / count
            if self.why_called is None
            else self.loss_scale / (count * self.mesh.layout.dp)
        )

        def scaled(output: Any, piece: Any) -> torch.Tensor:
            nonlocal total
            loss = checked_loss(loss_fn(output, piece), "sharded")
            total = total + loss.detach().double()
            return loss * factor

        if self.why_called is not None:
            with self.guard.running("step"):
                self.train_microbatches(pieces, scaled, loss_fn=_Weighted(loss_fn))
        else:
            with self._dropping_what_failed():
                for piece in pieces[:-1]:
                    with self.accumulate():
                        scaled(self.forward(self.model, piece), piece).backward()
                scaled(self.forward(self.model, pieces[-1]), pieces[-1]).backward()
        group = self.mesh.group("pp")
        if group is not None:
            dist.all_reduce(total, group=group)
        return total / count

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their global norm is at most `max_norm`; returns the norm before,
        float64. Right on every layout, where `torch.nn.utils.clip_grad_norm_` counts shards or
        replicas wrongly or fails. Collective.
        """
        if self.why_called is not None:
            raise InputError(
                f"{self.why_called}: sharded.step clips, by gradient_clipping of the configuration"
            )
        norm = self.grad_norm()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        multiply_all([local_tensor(grad) for grad in grads], clip_factor(norm, max_norm))
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Unscale, find the global norm, clip by `gradient_clipping` of the configuration, update
        unless gradients overflowed, and drop the gradients of the optimizer's parameters.
        `optimizer` was built over `model.parameters()` after `parallelize`. Collective. Raises
        NumbersError on all ranks, before anything has changed, where gradients are not finite and
        `faults.non_finite` does not skip.
        """
        self.guard.recover()
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            if self.why_called is not None and len(self._steppers):
                raise InputError(
                    f"{self.why_called}: a step ends for all parameters at once, and a second"
                    " optimizer would find no gradients; use one optimizer with several parameter"
                    " groups"
                )
            free_gathered(self.model)  # what is gathered is not what the optimizer holds
            step_by_placement(checked_optimizer(optimizer, self.model))
            if self.tier is not None:
                self.tier.drive(optimizer)
            stepper = self._steppers[optimizer] = self.stepper(optimizer)
            if self.why_called is None:  # the others' gradients are for other optimizers
                stepper.parameters = [
                    parameter for group in optimizer.param_groups for parameter in group["params"]
                ]
        self._watch.inside = True
        try:
            self.steps += 1
            if self.why_called is None:
                return stepper(error=self.error_of_numbers(self.steps))
            with self.guard.running("step"):
                return self.update(stepper, step=self.steps)[0]
        finally:
            self._watch.inside = False


class _Weighted:
    """A mean loss, as a pipeline's check calls a loss."""

    def __init__(self, loss_fn: MeanLoss) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: Any, piece: Any) -> tuple[torch.Tensor, int]:
        return self._loss_fn(output, piece), 1


@leaving_no_group()
def parallelize(
    model: nn.Module,
    config: ConfigLike,
    *,
    weights: str | Path | None = None,
    forward: Forward = default_forward,
) -> ParallelModel:
    """Shard `model` in place, for your own training loop: `loss.backward()` leaves gradients
    averaged over the data-parallel ranks, as DistributedDataParallel does; build the optimizer
    afterwards. Buffers that the forward changes are rank 0's at the start of every step. `config`,
    `weights`: see `plait.initialize`; `forward(model, micro-batch)` is what `forward_backward` and
    `predict` call.
    """
    refuse_taken(model)
    resolved = resolved_for(model, config)
    if resolved.loss_chunk_tokens:
        rule = "only plait.causal_lm_loss is computed in chunks, and no loss is given"
        remedy = "use 0, and call plait.chunked_causal_lm_loss in your own training loop"
        raise ConfigError(
            Problem("parallel.loss_chunk_tokens", resolved.loss_chunk_tokens, rule, remedy)
        )
    every = resolved.faults.compare_replicas_every
    if every:
        rule = "plait.parallelize makes no optimizer, whose states are compared too"
        raise ConfigError(
            Problem("faults.compare_replicas_every", every, rule, "use plait.initialize, or 0")
        )
    rule = "plait.parallelize does not see the steps of the loop, which has its own tracker"
    remedy = "leave it out, or use plait.initialize"
    refuse(
        Problem(resolved.tracker_setting(spec), spec.name, rule, remedy)
        for spec in resolved.trackers
    )
    if resolved.data_parallel.update_in_backward:
        raise ModelError(
            "parallel.optimizer_in_backward: plait.parallelize makes no optimizer; use"
            " plait.initialize, or false"
        )
    if resolved.layout.ep > 1:
        rule = "plait.parallelize with experts on different processes is not proven"
        raise ConfigError(
            Problem(
                "parallel.ep",
                resolved.layout.ep,
                rule,
                "use plait.initialize and engine.train_batch, or 1",
            )
        )
    _refuse_losses_of_routers(model, resolved)
    before = list(model.parameters())
    take_over(model)
    checked = checked_model(model, resolved)
    mesh, parts, _ = shard(
        checked, weights=weights, forward=forward, mean=why_called(resolved) is None
    )
    refuse_own_batches(parts, "plait.parallelize")
    return ParallelModel(parts, mesh, resolved, forward=forward, before=before)


def _refuse_losses_of_routers(model: nn.Module, resolved: Resolved) -> None:
    """Where Plait would compute them, and the loss of the loop leaves them out."""
    rule = "Plait adds it to plait.causal_lm_loss, and your own loop computes its loss"
    remedy = "use plait.initialize and engine.train_batch"
    refuse(
        Problem(setting, value, rule, f"{remedy}, or {json.dumps(off)}")
        for setting, value, off in resolved.routing.added
    )
    if resolved.layout.pp > 1 and wants_balance_loss(model):
        rule = (
            f"with parallel.pp = {resolved.layout.pp} the balance loss is a sum over the stages;"
            f" {rule}"
        )
        raise ConfigError(
            Problem("model.config.output_router_logits", True, rule, f"{remedy}, or False")
        )
