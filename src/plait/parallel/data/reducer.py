"""Reduction of the gradients of replicated parameters (ZeRO stage 0), overlapped with backward.

The idea is that of DistributedDataParallel's reducer, which cannot be used here: it wraps the
forward of the root module, breaks under pipeline schedules, and always averages. `Reducer` only
listens to gradients, so it works for any part of a model and any schedule. `sum_gradients` is the
simpler sum after the last backward, for mesh dimensions whose reductions do not overlap with the
backward.

Note [Life of a gradient]
    This is the life of a gradient of parameters that are replicated (ZeRO stage 0). Sharded
    parameters are reduced by torch's `fully_shard` (`techniques/data_parallel.py`).

    A gradient has one copy, in a bucket that it shares with the gradients of other parameters.

    1. Accumulate. Autograd accumulates a gradient into `parameter.grad` and calls `_on_gradient`.
       The first one of a step is a new tensor. It is copied into the bucket, and `parameter.grad`
       becomes a view of the bucket, so that later micro-batches accumulate there without a copy.
    2. Launch. In the last backward of a step, a bucket whose gradients have all arrived is
       all-reduced while backward continues. Buckets are launched in the order of their index,
       because collectives of one group must have the same order on all ranks. From then on
       `parameter.grad` is None: no kernel may write to a buffer that is being sent.
    3. Finish. `finish_reduction` launches the remaining buckets. Parameters that this rank did not
       use contribute zeros, so that ranks which used different parameters make the same calls. It
       then waits for all buckets.
    4. Restore. `parameter.grad` becomes the view of the bucket again, or None if no rank used the
       parameter. One all-reduce of flags per step finds out which parameters were used.

    Two cases need more than one round of launches in a step. Both keep the rule that a gradient
    which has been summed over the ranks is not summed again:

    * Late gradients. A reentrant checkpoint runs a backward inside another one, so a gradient can
      arrive after the launch of its bucket. It stays in `parameter.grad`, and `finish_reduction`
      reduces it in a second round, for the late buckets only.
    * Another backward after `finish_reduction`. The sums move to `Bucket.reduced` and are added to
      those of the new round.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.modules import is_compiled
from plait._torch.operators import tree_leaves
from plait._torch.passes import after_backward, graph_task
from plait._torch.tensors import local_tensor
from plait.cluster import accelerator
from plait.cluster.process_groups import is_fake
from plait.comm.all_reduce import Buckets, Flat
from plait.comm.collectives import AsyncAllReduce
from plait.comm.failures import naming
from plait.errors import ModelError
from plait.parallel.data.unused import foreign_backward
from plait.parallel.hooks import FailureScope, StepEnd, StepHook, UncopiedHook
from plait.parallel.parameter_layout import (
    dims_in_memory,
    like_in_memory,
    like_parameter,
    parameter_name,
)


@dataclass
class Reducer(StepHook):
    """All-reduce of the gradients of a model over a group. See Note [Life of a gradient].

    `attach` allocates the buckets and registers the hooks. In the last backward of a step buckets
    are launched as they become complete, and `finish_reduction` waits for their sums.
    """

    model: nn.Module
    group: dist.ProcessGroup
    bucket_bytes: int
    """Size at which a bucket is closed. A larger parameter has a bucket to itself."""
    make_buckets: Callable[[Sequence[Flat]], Buckets]
    """Allocates the buffers that are summed over `group` (see `comm.transport`)."""
    mean: bool = False
    """True to divide by the size of the group, as DistributedDataParallel does."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of the reduction, or None for the dtype of the gradients."""
    track_unused: bool = True
    """True if a parameter that no rank used keeps `grad = None`.

    The exchange of used parameters also tells which buckets are late on any rank. It costs one
    small all-reduce per step.
    """
    excluded: frozenset[nn.Parameter] = frozenset()
    """Parameters of the model that another hook reduces."""
    separate_vectors: bool = False
    """True if parameters of fewer than two dimensions have separate buckets.

    Compression does not apply to them.
    """
    synchronise: bool = True
    """True if the next backward is the last one of its step. The others only accumulate."""
    expects_gradients: bool = True
    """True if a gradient may arrive now. At other times a gradient raises InputError.

    An engine expects gradients inside its backward, and the user's training loop at any time.
    """
    buckets: list[Bucket] = field(default_factory=list, init=False)
    reduction: Buckets = field(init=False)
    """Buffers of the buckets and the collective that sums them."""
    _slots: dict[nn.Parameter, ParameterSlot] = field(default_factory=dict, init=False)
    _trainable: list[nn.Parameter] = field(default_factory=list, init=False)
    """Parameters that have a slot.

    A parameter that is frozen while the buckets are rebuilt stays in the list, because it may be
    trained again.
    """
    _frozen: list[nn.Parameter] = field(default_factory=list, init=False)
    """Parameters without a slot, because they have never required a gradient so far."""
    _used: list[bool] = field(default_factory=list, init=False)
    """True for each slot whose gradient of this step has been launched."""
    _late_buckets: set[int] = field(default_factory=set, init=False)
    """Indices of the buckets for which a gradient arrived after their launch."""
    _next_bucket: int = field(default=0, init=False)
    """Index of the bucket that is launched next."""
    _graph_task: int | None = field(default=None, init=False)
    """Backward pass that the last gradient of this round came from."""
    _has_nested_backwards: bool = field(default=False, init=False)
    """True if gradients of one round have ever come from several backward passes."""
    _finishes_with_backward: bool = field(default=False, init=False)
    """True if the end of a backward finishes the reduction, as in the user's training loop."""
    _finish_queued: bool = field(default=False, init=False)
    _finished: bool = field(default=False, init=False)
    """True if `finish_reduction` has completed this round."""
    _handles: list[Any] = field(default_factory=list, init=False)

    def attach(self) -> None:
        """Allocate the buckets and register the gradient hooks.

        Call this once, when the model has its final parameters (not on `meta`).
        """
        self._trainable = [
            p for p in self.model.parameters() if p.requires_grad and p not in self.excluded
        ]
        self._allocate()
        for parameter in self._slots:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def finish_with_backward(self) -> None:
        """Finish the reduction in every `loss.backward()`, so that gradients are means afterwards.

        This is for the user's own training loop. DistributedDataParallel does the same.
        """
        self.mean = True
        self._finishes_with_backward = True
        # Inside a compiled call the hook would be compiled too.
        if not is_compiled(self.model):
            hook = UncopiedHook(self._after_forward)
            self._handles.append(self.model.register_forward_hook(hook))

    def release(self) -> None:
        """Remove all hooks from the model and drop the buckets and the gradients."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._slots:
            parameter.grad = None
        self._handles.clear()
        self._trainable.clear()
        self._slots.clear()
        self.buckets.clear()
        # They own shared memory and file descriptors.
        self.make_buckets = self.reduction = None  # type: ignore[assignment]

    def rebuild(
        self,
        make_buckets: Callable[[Sequence[Flat]], Buckets],
        *,
        bucket_bytes: int,
        separate_vectors: bool,
    ) -> None:
        """Replace the buckets between two steps, when no gradient is needed. Collective.

        Args:
            make_buckets: See `Reducer.make_buckets`.
            bucket_bytes: See `Reducer.bucket_bytes`.
            separate_vectors: See `Reducer.separate_vectors`.
        """
        self.make_buckets = make_buckets
        self.bucket_bytes = bucket_bytes
        self.separate_vectors = separate_vectors
        self._allocate()

    def reduces(self, parameter: nn.Parameter) -> bool:
        """Return True if the gradients of a parameter are reduced."""
        return parameter in self._slots

    def _allocate(self) -> None:
        self.buckets.clear()
        self._slots.clear()
        reduced_or_excluded = {*self._trainable, *self.excluded}
        self._frozen = [p for p in self.model.parameters() if p not in reduced_or_excluded]

        members_of_buckets = self._partition()
        flats = []
        for members in members_of_buckets:
            dtype = self.reduce_dtype or members[0].dtype
            shapes = tuple(_shape_in_memory(p) for p in members)
            flats.append(Flat(dtype, shapes, tp_local=isinstance(members[0], DTensor)))

        self.reduction = self.make_buckets(flats)
        for members, wire in zip(members_of_buckets, self.reduction.buffers, strict=True):
            self._add_bucket(members, wire)
        self.start_step()

    def _partition(self) -> list[list[nn.Parameter]]:
        """Return the trainable parameters of each bucket, all of one dtype.

        Parameters that tensor parallelism splits do not share a bucket with replicated ones, whose
        sums must stay bitwise equal on all ranks of tp. In one bucket, gradients of both kinds
        could share a quantisation block, and would then change the bits of each other's sums.
        """
        trainable = self._trainable
        sizes = []
        for p in trainable:
            sizes.append(
                (
                    local_tensor(p.detach()).numel() * p.element_size(),
                    (p.dtype, p.ndim > 1 or not self.separate_vectors, isinstance(p, DTensor)),
                )
            )
        return [[trainable[i] for i in members] for members in partition(sizes, self.bucket_bytes)]

    def _add_bucket(self, members: list[nn.Parameter], wire: torch.Tensor) -> None:
        flat = wire
        if wire.dtype != members[0].dtype:
            flat = torch.zeros_like(wire, dtype=members[0].dtype)

        locals_ = [local_tensor(p.detach()) for p in members]
        parts = flat.split([t.numel() for t in locals_])
        views = [like_in_memory(part, t) for part, t in zip(parts, locals_, strict=True)]

        first_slot = len(self._slots)
        slots = range(first_slot, first_slot + len(members))
        bucket = Bucket(members, flat, wire, len(self.buckets), slots)
        self.buckets.append(bucket)
        for index, parameter, view in zip(slots, members, views, strict=True):
            self._slots[parameter] = ParameterSlot(
                bucket, view, like_parameter(view, parameter), index
            )

    def before_microbatch(self, last: bool) -> None:
        """Reduce in the backward of the last micro-batch only."""
        self.synchronise = last
        self._add_unfrozen()

    def _add_unfrozen(self) -> None:
        """Rebuild the buckets with the parameters that were unfrozen since the last step."""
        unfrozen = [p for p in self._frozen if p.requires_grad]
        # The old buckets hold the gradients of this step, if it has any already.
        if not unfrozen or any(self._used) or any(p.grad is not None for p in self._slots):
            return

        for parameter in unfrozen:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        trainable = {*self._trainable, *unfrozen}
        self._trainable = [p for p in self.model.parameters() if p in trainable]
        self._allocate()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for a backward of a step. Gradients outside it are refused."""
        if self._finished:
            self._save_sums()
        self.expects_gradients = True
        try:
            yield
        finally:
            self.expects_gradients = False

    def _save_sums(self) -> None:
        """Move the sums of the finished round to `Bucket.reduced`, and start another round."""
        for bucket in self.buckets:
            for index, parameter in zip(bucket.slots, bucket.parameters, strict=True):
                # The user may have dropped or changed the gradient.
                self._used[index] = self._move_to_bucket(parameter)
                parameter.grad = None
            bucket.reduced = bucket.flat.clone()
        self._begin_round()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Copy a new gradient into its bucket, and start the reduction of a complete bucket."""
        if not self.expects_gradients:
            self.has_refused = True
            raise foreign_backward()
        if self._finished:
            self._begin_round()

        slot = self._slots[parameter]
        bucket = slot.bucket
        if bucket.launched:
            self._late_buckets.add(bucket.index)
            return

        self._move_to_bucket(parameter)
        if not self.synchronise:
            return

        previous_task = self._graph_task
        self._graph_task = graph_task()
        if previous_task is not None and previous_task != self._graph_task:
            self._has_nested_backwards = True
        if self._finishes_with_backward:
            self._queue_finish()

        # Launch the buckets that were complete before this gradient. A launch sets `grad` to None,
        # and hooks of the user that run after this one must still find this gradient.
        while self._next_bucket < len(self.buckets):
            next_bucket = self.buckets[self._next_bucket]
            if next_bucket.missing:
                break
            self._fill_and_launch(next_bucket)
        bucket.missing.discard(slot.index)

    def _move_to_bucket(self, parameter: nn.Parameter) -> bool:
        """Move the gradient of a parameter into its bucket, or fill its slot with zeros.

        Returns:
            Whether the parameter has a gradient.
        """
        slot = self._slots[parameter]
        gradient = parameter.grad
        if gradient is None:
            slot.view.zero_()
            return False

        if gradient is not slot.grad:
            if gradient.layout != torch.strided:
                raise ModelError(
                    f"`{parameter_name(self.model, parameter)}` has a"
                    f" {str(gradient.layout).removeprefix('torch.')}"
                    " gradient, but only dense gradients can be reduced; build the embedding with"
                    " sparse=False"
                )
            with torch.no_grad():
                slot.view.copy_(local_tensor(gradient))
            parameter.grad = slot.grad
        return True

    def _fill_and_launch(self, bucket: Bucket) -> None:
        bucket.launched = True
        for parameter in bucket.parameters:
            if self._move_to_bucket(parameter):
                self._used[self._slots[parameter].index] = True
                # A gradient that is accumulated later must not change what is being sent.
                parameter.grad = None
        self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if bucket.wire is not bucket.flat:
            bucket.wire.copy_(bucket.flat)
        # Compressed buckets may wait for other ranks already in `start`, so a failure there must
        # have a name too.
        with naming("all-reduce of gradients over dp_replicate"):
            self.reduction.start(self._next_bucket)
        self._next_bucket += 1

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Finish the reduction when the backward of `output` ends.

        If reentrant checkpoints run nested backward passes, the end of the outermost one counts.
        """
        if not (torch.is_grad_enabled() and self.synchronise):
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._queue_finish())

    def _queue_finish(self) -> None:
        # The first gradient after a finished reduction begins a new round.
        if self._finished:
            self._begin_round()
        if self.synchronise and not self._finish_queued:
            self._finish_queued = True
            after_backward(self.finish_reduction)

    def after_backward(self) -> None:
        """Finish the reduction after the last backward, because the caller reads gradients next."""
        if self.synchronise:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        """Complete the sums (or means) of all gradients. Collective.

        Ranks whose loss reached no parameter must call it too. A second call for the same backward
        does nothing.
        """
        if self._finished:
            return
        for bucket in self.buckets[self._next_bucket :]:
            self._fill_and_launch(bucket)
        self._finished = True

        # The exchange of flags is launched before the wait for the buckets, to overlap with them.
        flags = self._launch_flags()
        for index in range(len(self.buckets)):
            self._wait_for_bucket(index)
        used, late_buckets = self._read_flags(flags)

        if late_buckets:
            self._reduce_late_buckets(late_buckets)
        for parameter, slot in self._slots.items():
            if used[slot.index]:
                parameter.grad = slot.grad
            else:
                parameter.grad = None
        self._used = used

    def _wait_for_bucket(self, index: int) -> None:
        """Wait for the sum of a bucket, and add the sums of earlier rounds."""
        bucket = self.buckets[index]
        with naming("all-reduce of gradients over dp_replicate"):
            self.reduction.finish(index)
        if bucket.wire is not bucket.flat:
            bucket.flat.copy_(bucket.wire)
        # Earlier rounds have been divided already, so they are added after the division.
        if self.mean:
            bucket.flat.div_(self.group.size())
        if bucket.reduced is not None:
            bucket.flat.add_(bucket.reduced)
            bucket.reduced = None

    def _reduce_late_buckets(self, indices: Sequence[int]) -> None:
        """Reduce the gradients that arrived after the launch of these buckets."""
        for index in indices:
            bucket = self.buckets[index]
            bucket.reduced = bucket.flat.clone()
            self._next_bucket = index
            self._fill_and_launch(bucket)
        for index in indices:
            self._wait_for_bucket(index)

    def _launch_flags(self) -> AsyncAllReduce | None:
        """Start exchanging which slots this rank used, and which of its buckets are late."""
        for index in self._late_buckets:
            for parameter in self.buckets[index].parameters:
                self._used[self._slots[parameter].index] |= parameter.grad is not None
        # A pipeline stage may have nothing to train.
        if not self.track_unused or not self.buckets:
            return None

        late = [index in self._late_buckets for index in range(len(self.buckets))]
        # [slots + buckets]
        flags = accelerator.tensor_of(
            [*self._used, *late], dtype=torch.uint8, device=self.buckets[0].flat.device
        )
        return AsyncAllReduce(flags, self.group, dist.ReduceOp.MAX)

    def _read_flags(self, pending: AsyncAllReduce | None) -> tuple[list[bool], list[int]]:
        """Read the reduced flags of slots and buckets.

        Returns:
            For each slot, whether any rank used it; and the indices of the buckets that are late on
            any rank.
        """
        if pending is None:
            return [True] * len(self._used), sorted(self._late_buckets)
        with naming("all-reduce over dp_replicate"):
            flags = pending.value()

        # Reading the flags waits for the device. A rank that used all slots knows the result: all
        # are used. Without nested backward passes no rank has a late bucket either.
        if all(self._used) and not self._has_nested_backwards:
            return self._used, []

        values = [bool(flag) for flag in flags.tolist()]
        slot_count = len(self._used)
        late_buckets = [index for index, late in enumerate(values[slot_count:]) if late]
        return values[:slot_count], late_buckets

    @property
    def unfinished(self) -> bool:
        """True if gradients exist that no `finish_reduction` has summed."""
        return not self._finished and any(parameter.grad is not None for parameter in self._slots)

    def after_step(self, end: StepEnd) -> str:
        """Clear the state of the step that has ended."""
        self.start_step()
        return ""

    def backward_failed(self) -> bool:
        """Return True if the last backward raised before its final callback ran."""
        return self._finish_queued and not self._finished and graph_task() is None

    def on_error(self, lost: FailureScope) -> None:
        """Complete the collectives of a failed step. Collective.

        Ranks may have stopped at different buckets. Each one launches those that it has not
        launched yet, so that all ranks make the same calls.
        """
        if lost != "step" or self._finished:
            return
        for bucket in self.buckets[self._next_bucket :]:
            bucket.flat.zero_()
            self._launch(bucket)
        for index in range(len(self.buckets)):
            self._wait_for_bucket(index)

    def drop_gradients(self) -> None:
        """Drop the gradients of the step so far. Call this between two backward passes."""
        for parameter in self._slots:
            parameter.grad = None
        self.start_step()

    def zero_gradients(self, parameters: set[torch.Tensor], set_to_none: bool) -> None:
        """Zero the sums of earlier rounds, which are not in `parameter.grad`."""
        for parameter, slot in self._slots.items():
            sums = slot.bucket.reduced
            if sums is None or parameter not in parameters:
                continue
            start = slot.view.storage_offset() - slot.bucket.flat.storage_offset()
            sums[start : start + slot.view.numel()].zero_()
            if set_to_none:
                self._used[slot.index] = False

    def start_step(self) -> None:
        """Clear the state of the previous step.

        The first gradient of a step does this as well. Call it before a step in which this rank may
        receive no gradient at all.
        """
        for bucket in self.buckets:
            bucket.reduced = None
        self._begin_round()
        self._used = [False] * len(self._slots)

    def _begin_round(self) -> None:
        self._next_bucket = 0
        self._finish_queued = False
        self._finished = False
        self._late_buckets.clear()
        self._graph_task = None
        # In the user's training loop a gradient of an earlier backward may still exist. Its launch
        # marks it as used.
        if self._finishes_with_backward:
            self._used = [False] * len(self._slots)
        for bucket in self.buckets:
            bucket.missing = set(bucket.slots)
            bucket.launched = False


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced together.

    `flat` has shape [numel] and holds the gradients one after the other, each in the memory layout
    of its parameter.
    """

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    wire: torch.Tensor
    """Buffer that is summed over the ranks: `flat`, or a buffer in the reduction's dtype."""
    index: int
    slots: range
    """Slot indices of `parameters`."""
    missing: set[int] = field(default_factory=set)
    """Slots whose gradient has not arrived in this round."""
    launched: bool = False
    reduced: torch.Tensor | None = None
    """Sum of earlier rounds of the step while another round runs, otherwise None."""


@dataclass(frozen=True)
class ParameterSlot:
    """Position of a parameter in a bucket."""

    bucket: Bucket
    view: torch.Tensor
    grad: torch.Tensor
    """Value of the parameter's `grad`: `view`, or a DTensor around it under tensor parallelism."""
    index: int


def partition(sizes: Sequence[tuple[int, Hashable]], bucket_bytes: int) -> list[list[int]]:
    """Assign parameters to gradient buckets, approximately in the order of their gradients.

    Parameters are taken in reverse order of registration. A bucket is closed before it exceeds
    `bucket_bytes`, and holds one kind of parameters.

    Args:
        sizes: (bytes, kind) of each parameter.
        bucket_bytes: Largest size of a bucket with several parameters.

    Returns:
        The indices of each bucket's parameters. Buckets that are complete earlier come first.
    """
    closed: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        nbytes, kind = sizes[index]
        members, filled = open_.get(kind, ([], 0))
        if members and filled + nbytes > bucket_bytes:
            closed.append(members)
            members = []
            filled = 0
        members.append(index)
        open_[kind] = members, filled + nbytes

    buckets = [*closed, *(members for members, _ in open_.values())]
    # The last member is the parameter that was registered first, whose gradient comes last.
    return sorted(buckets, key=lambda members: -members[-1])


def _shape_in_memory(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the local shape, with the dimension that has the largest stride first."""
    tensor = local_tensor(parameter.detach())
    return tuple(tensor.shape[dim] for dim in dims_in_memory(tensor) or range(tensor.ndim))


def sum_gradients(
    parameters: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    users: dist.ProcessGroup | None,
) -> None:
    """Sum the gradients of parameters over ranks, in place. Collective.

    A parameter that no rank used keeps no gradient. If any rank used it, all ranks get a gradient,
    as in one process.

    Args:
        parameters: Parameters, the same on all ranks.
        group: The ranks whose gradients are summed. None if there are no others.
        users: The ranks that may use a parameter. None if all of them use every parameter.
    """
    if not parameters:
        return
    used = [parameter.grad is not None for parameter in parameters]
    used_by_any = [True] * len(used)
    if users is not None:
        device = local_tensor(parameters[0].detach()).device
        flags = accelerator.tensor_of(used, dtype=torch.uint8, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=users)
        # Reading the flags waits for the device. A rank that used all parameters knows the result.
        if not all(used) and not is_fake():
            used_by_any = flags.tolist()

    sums = []
    for parameter, is_used in zip(parameters, used_by_any, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if group is not None:
            gradient = local_tensor(parameter.grad)
            # Grouped products leave the gradient transposed, and collectives need it contiguous.
            sent = gradient.contiguous()
            sums.append((gradient, sent, dist.all_reduce(sent, group=group, async_op=True)))
    for gradient, sent, work in sums:
        if work is not None:
            work.wait()
        if sent is not gradient:
            gradient.copy_(sent)
