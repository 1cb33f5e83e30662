"""Handling of parameters that a step did not use, under `fully_shard`.

In a single process the gradient of an unused parameter stays None, and the optimizer skips the
parameter. Sharded units reduce zeros instead, so that ranks that used different parameters agree on
the collective. With a gradient of zeros, the optimizer would decay the parameter and its
moments.
`UnusedTracker` records the parameters that autograd reached on this rank. After the reduction it
restores None for those that no rank used.

At ZeRO stages 1 and 2 ranks may also differ in the *units* that they run. At stage 3 they may not,
because every use of a unit gathers it, which is a collective. The exchange that finds unused
parameters therefore also compares the order of the units' collectives between ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import or_

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.operators import allowing_requires_grad
from plait._torch.passes import around_backward
from plait._torch.tensors import local_tensor
from plait._torch.unit_order import DIGEST_BITS, UnitOrder
from plait._torch.units import (
    gathered_parameters,
    reduce_unused_parameters,
    sharded_modules,
    sharded_parameters,
)
from plait.cluster import accelerator
from plait.cluster.accelerator import HostCopy
from plait.cluster.small_messages import all_gather_objects
from plait.errors import CommunicationError, InputError
from plait.parallel.hooks import FailureScope, StepHook, backward_underway
from plait.parallel.parameter_layout import parameter_name


class UnusedTracker(StepHook):
    """Hook that restores None as the gradient of parameters that no rank used.

    An engine calls `finish_reduction` once per step, after the last backward and before gradients
    are read. In the user's own training loop, it is called at the end of every backward outside
    `accumulate` instead. Gradients of earlier backwards are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        order: UnitOrder | None = None,
        finishes_backward: bool = False,
        have_errors: Callable[[], bool],
    ) -> None:
        """Register gradient hooks on the parameters of a sharded model.

        Args:
            model: The root.
            group: The ranks whose gradients are summed.
            device: Device of the collective.
            order: The order of the units' collectives, which is compared between the ranks.
            finishes_backward: Whether the end of a backward finishes the reduction, as in the
                user's own training loop.
            have_errors: Returns whether the reduction adds compression errors of earlier steps,
                which also belong to parameters that this step does not use.
        """
        self.group = group
        self._model = model
        self._device = device
        self._have_errors = have_errors
        self._comparison = None
        if order is not None:
            self._comparison = _OrderComparison(order, group)
        units = [module for module in sharded_modules(model) if sharded_parameters(module)]
        # Frozen parameters too: they may be unfrozen at any step.
        self.parameters = [p.sharded_param for module in units for p in sharded_parameters(module)]
        self.expects_gradients = finishes_backward
        """True if a gradient may arrive now. At other times a gradient raises InputError."""
        self._is_last = True
        self._had_gradient: list[bool] | None = None
        self._used = [False] * len(self.parameters)
        """True if autograd has reached each parameter in this step on this rank."""
        self._index = {p: i for i, p in enumerate(self.parameters)}
        reduce_unused_parameters(model)
        # The tensors that autograd accumulates into exist after a unit's first gathering, which
        # torch does in a hook before this one.
        self._handles = {m: m.register_forward_pre_hook(self._watch) for m in units}  # type: ignore[attr-defined]
        # A unit whose own forward does not run may still be gathered, if another module reads its
        # parameter.
        self._end_handle = model.register_forward_hook(self._watch_gathered)
        if finishes_backward:
            around_backward(model, begin=self._begin_backward, end=self._end_backward)

    # torch.compile would trace the hook of a compiled block, and fails on shards that are in files.
    @torch.compiler.disable
    def _watch(self, module: FSDPModule, *_: object) -> None:
        pairs = gathered_parameters(module)
        for sharded, unsharded in pairs:
            # Integers of quantised weights cannot require a gradient.
            if unsharded.is_floating_point() or unsharded.is_complex():
                # A weak reference: the garbage collector cannot follow the hooks of a parameter to
                # which autograd has accumulated, and would never free the model.
                tracker = weakref.ref(self)
                _call_on_gradient(unsharded, partial(_mark_used, tracker, self._index[sharded]))
        if pairs:
            self._handles.pop(module).remove()

    def _watch_gathered(self, *_: object) -> None:
        for module in list(self._handles):
            self._watch(module)
        if not self._handles:
            self._end_handle.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for a backward of a step. Gradients outside it are refused."""
        self.expects_gradients = True
        try:
            yield
        finally:
            self.expects_gradients = False

    def drop_gradients(self) -> None:
        """Clear the record of the parameters that the step has used so far."""
        self._used = [False] * len(self.parameters)
        self._had_gradient = None

    def zero_gradients(self, parameters: set[torch.Tensor], set_to_none: bool) -> None:
        """Clear the record of parameters whose gradients were dropped in the middle of a step."""
        if not set_to_none:
            return
        for parameter, index in self._index.items():
            if parameter not in parameters:
                continue
            self._used[index] = False
            if self._had_gradient is not None:
                self._had_gradient[index] = False

    def on_error(self, lost: FailureScope) -> None:
        """Forget the collectives of a failed pass, which may differ between ranks."""
        if self._comparison is not None:
            self._comparison.forget()

    def before_microbatch(self, last: bool) -> None:
        """Finish the reduction only with the last micro-batch of a step."""
        self._is_last = last

    def _begin_backward(self) -> None:
        # At ZeRO 2 and 3 every micro-batch reduces, so only the first one of a step sees the
        # gradients from before the step.
        if self._had_gradient is None:
            self._had_gradient = [p.grad is not None for p in self.parameters]

    def _end_backward(self) -> None:
        if self._is_last:
            self.finish_reduction()

    def mark_used(self, index: int) -> None:
        """Record that autograd has reached a parameter, by its index in `parameters`."""
        if not self.expects_gradients:
            self.has_refused = True
            raise foreign_backward()
        self._used[index] = True

    def finish_reduction(self) -> None:
        """Set `grad = None` for parameters that no rank used since the last call. Collective.

        This takes one small all-reduce.

        Raises:
            CommunicationError: The ranks have gathered or reduced different units.
        """
        digest: list[int] = []
        if self._comparison is not None:
            digest = self._comparison.begin()
        flags = accelerator.tensor_of(
            [*digest, *self._used], dtype=torch.uint8, device=self._device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        if self._comparison is not None:
            self._comparison.end(flags[: len(digest)])
            flags = flags[len(digest) :]

        # Reading the flags waits for the device. A rank that used every parameter that has a
        # gradient does not need them.
        keeps_gradient = self._used
        if self._had_gradient is not None:
            keeps_gradient = list(map(or_, self._used, self._had_gradient))
        pairs = zip(self.parameters, keeps_gradient, strict=True)
        candidates = [p for p, keeps in pairs if not keeps and p.grad is not None]
        if candidates:
            used_by_any = flags.tolist()
            may_have_error = self._have_errors()
            for parameter in candidates:
                if not used_by_any[self._index[parameter]]:
                    if not may_have_error:
                        self._refuse_unseen_gradient(parameter)
                    parameter.grad = None
        self.drop_gradients()

    def _refuse_unseen_gradient(self, parameter: torch.Tensor) -> None:
        """Refuse to drop a non-zero gradient: its parameter would silently not be trained."""
        gradient = parameter.grad
        assert gradient is not None
        if not bool(local_tensor(gradient).any()):
            return
        name = parameter_name(self._model, parameter)
        raise CommunicationError(
            f"{name} has a gradient that no rank has seen autograd compute, and would not be"
            " trained: this is a bug in Plait; report it with the model and the configuration, and"
            " meanwhile set parallel.unused_parameters = false (if every step uses every"
            " parameter) or use ZeRO stage 0"
        )


def _mark_used(tracker: weakref.ref[UnusedTracker], index: int, _: torch.Tensor) -> None:
    alive = tracker()
    if alive is not None:
        alive.mark_used(index)


def _call_on_gradient(parameter: torch.Tensor, function: Callable[[torch.Tensor], None]) -> None:
    """Call `function` whenever a gradient was accumulated into a parameter.

    The parameter may be frozen now and unfrozen later.
    """
    # torch refuses the hook for a frozen parameter, but keeps it if the parameter is frozen later.
    # The first forward, which gathers the parameter, may run inside torch.func.jvp.
    requires_grad = parameter.requires_grad
    with allowing_requires_grad():
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(function)
        parameter.requires_grad_(requires_grad)


_DELAY_STEPS = 2
"""Steps after which a GPU's result of the comparison is read."""


class _OrderComparison:
    """Check that the ranks of a group issue the units' collectives in the same order.

    Ranks exchange the bytes of their digest and of its complement by an all-reduce with MAX. The
    two maxima are each other's complement only if all digests are equal.

    On a GPU the result of a step is read `_DELAY_STEPS` steps later, when its copy has arrived, so
    that the host does not wait for the device. All ranks read it in the same step, so all of them
    can exchange their collectives for the error message.
    """

    def __init__(self, order: UnitOrder, group: dist.ProcessGroup) -> None:
        self._order = order
        self._group = group
        self._collectives: list[int] = []
        self._pending: deque[tuple[HostCopy, list[int]]] = deque()

    def begin(self) -> list[int]:
        """Return the bytes to exchange. Called at the end of a step."""
        digest = list(self._order.digest.to_bytes(DIGEST_BITS // 8, "little"))
        self._collectives = self._order.take()
        return [*digest, *(255 - byte for byte in digest)]

    def end(self, maxima: torch.Tensor) -> None:
        """Compare the exchanged bytes of this step, or on a GPU those of an earlier step.

        Args:
            maxima: The bytes of `begin` after the all-reduce, uint8.

        Raises:
            CommunicationError: The digests differ between ranks.
        """
        self._pending.append((HostCopy(maxima), self._collectives))
        delay = 0
        if accelerator.is_accelerator(maxima.device):
            delay = _DELAY_STEPS
        if len(self._pending) <= delay:
            return
        copy, collectives = self._pending.popleft()
        first, second = copy.values().view(2, -1).int()
        if not bool((first + second == 255).all()):
            raise self._error(collectives)

    def forget(self) -> None:
        """Forget the collectives of a failed step."""
        self._order.take()
        self._pending.clear()

    def _error(self, own_collectives: list[int]) -> CommunicationError:
        collectives = all_gather_objects(own_collectives, self._group)
        ranks = dist.get_process_group_ranks(self._group)
        differing = self._order.difference(collectives)
        texts = [f"rank {rank}: {text}" for rank, text in zip(ranks, differing, strict=False)]
        # `take` returns the newest collectives only, which may agree.
        differences = "; ".join(texts) or "the difference is older than the recorded collectives"
        return CommunicationError(
            "the ranks ran different parts of the model in one step, and exchanged weights or"
            f" gradients of different blocks ({differences}); run the same blocks in the same"
            " order on all ranks (draw the blocks that are skipped from a generator with one seed"
            " on all ranks), or use ZeRO stage 1 or 2, where ranks may skip different blocks"
        )


def foreign_backward() -> InputError:
    """Return the error for a gradient that arrives while the model's engine runs no backward."""
    if backward_underway():
        return InputError(
            "engine.backward(loss): the loss also depends on the model of another engine, which"
            " does not expect gradients now and would not reduce them; call"
            " requires_grad_(False) on the other engine's model before its forward for this loss (a"
            " discriminator's, where the generator is trained), and requires_grad_(True)"
            " afterwards; gradients still flow through it"
        )
    return InputError(
        "loss.backward() was called on a model of plait.initialize: it does not divide by the"
        " number of micro-batches and ranks; call engine.backward(loss), or"
        " accelerator.backward(loss) with plait.hf.Accelerator, or use plait.parallelize with your"
        " own training loop"
    )
