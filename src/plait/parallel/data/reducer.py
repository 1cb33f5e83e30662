"""Data parallelism's gradient reduction for replicated parameters (ZeRO stage 0): buckets,
all-reduced while backward still runs.

The same idea as DistributedDataParallel's reducer, which cannot be used here because it wraps or
hijacks the root module's forward, breaks under pipeline schedules and averages. This one listens to
gradients only, so it works for any part of a model, in any schedule. Invariant: gradients live in
the buckets (one copy), all ranks launch the buckets in one fixed order, and nothing is added to a
bucket between its launch and the end of its sum: what arrives then (a reentrant checkpoint's
backward runs inside another one) is kept apart in `parameter.grad` and summed in a round of its
own. A gradient that has been summed over the ranks is never summed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import local_tensor
from plait._torch.modules import is_compiled
from plait._torch.operators import tree_leaves
from plait._torch.passes import after_backward, graph_task
from plait.cluster import accelerator
from plait.comm.buckets import Buckets, Flat
from plait.comm.failures import naming
from plait.comm.pending import Pending
from plait.errors import ModelError
from plait.parallel.data.bucket import Bucket, Slot
from plait.parallel.data.bucket_account import partition
from plait.parallel.data.unused import foreign_backward
from plait.parallel.hooks import Lost, StepEnd, StepHook
from plait.parallel.memory_layout import dims_in_memory, like_in_memory
from plait.parallel.placed import like_parameter


@dataclass
class Reducer(StepHook):
    """All-reduces the gradients of `model` over `group`, once attached: buckets start in the last
    backward of a step as they are complete, and `finish_reduction` ends the sums.

    `mean` divides by the group's size (what DistributedDataParallel does); otherwise gradients are
    summed. `reduce_dtype` is the dtype on the wire. With `track_unused`, a parameter that no rank
    used keeps `grad = None`, and ranks may get gradients in different numbers of parts; one small
    all-reduce a step finds out.
    """

    model: nn.Module
    group: dist.ProcessGroup
    bucket_bytes: int
    make_buckets: Callable[[Sequence[Flat]], Buckets]
    """Makes the buffers that are summed over `group` (see `comm.transport`)."""
    mean: bool = False
    reduce_dtype: torch.dtype | None = None
    track_unused: bool = True
    apart: frozenset[nn.Parameter] = frozenset()
    """Parameters of the model that another hook reduces."""
    separate_vectors: bool = False
    """Give parameters of fewer than two dimensions buckets of their own: compression leaves them as
    they are.
    """
    synchronise: bool = True
    """Whether the coming backward is the last of its step; the others only accumulate."""
    accepts: bool = True
    """Whether gradients are expected now; one that comes all the same is refused."""
    buckets: list[Bucket] = field(default_factory=list, init=False)
    reduction: Buckets = field(init=False)
    _slots: dict[nn.Parameter, Slot] = field(default_factory=dict, init=False)
    _frozen: list[nn.Parameter] = field(default_factory=list, init=False)
    """Parameters that never required a gradient when buckets were made."""
    _used: list[bool] = field(default_factory=list, init=False)
    """By slot: whether it has a gradient of this step that has been launched."""
    _late: set[int] = field(default_factory=set, init=False)
    """Buckets for which a gradient came after their launch."""
    _next: int = field(default=0, init=False)
    _task: int | None = field(default=None, init=False)
    """The backward that the last gradient of this round came from."""
    _nested: bool = field(default=False, init=False)
    """Whether gradients of one round came from several backwards, ever: reentrant checkpoints run
    one inside another.
    """
    _listens: bool = field(default=False, init=False)
    """Whether the end of a backward finishes the sums, because no code calls `finish_reduction`."""
    _queued: bool = field(default=False, init=False)
    _done: bool = field(default=False, init=False)
    _handles: list[Any] = field(default_factory=list, init=False)
    _trained: list[nn.Parameter] = field(default_factory=list, init=False)

    def attach(self) -> None:
        """Allocate the buckets and listen to the parameters. Once, when the model has its final
        parameters (not on `meta`).
        """
        # Kept, because a parameter that is frozen while buckets are rebuilt may train again.
        self._trained = [
            p for p in self.model.parameters() if p.requires_grad and p not in self.apart
        ]
        self._allocate()
        for parameter in self._slots:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def finish_with_backward(self) -> None:
        """For your own training loop: gradients are means, complete when `loss.backward()` returns,
        as DistributedDataParallel's are.
        """
        self.mean = self._listens = True
        if not is_compiled(self.model):  # inside a compiled call hooks would be compiled too
            self._handles.append(self.model.register_forward_hook(_OutputHook(self)))

    def release(self) -> None:
        """Listen no more and let go of the buckets; the parameters' gradients are dropped."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._slots:
            parameter.grad = None
        self._handles.clear()
        self._trained.clear()
        self._slots.clear()
        self.buckets.clear()
        self.make_buckets = self.reduction = None  # type: ignore[assignment]  # shared memory, and descriptors of processes

    def rebuild(
        self,
        make_buckets: Callable[[Sequence[Flat]], Buckets],
        *,
        bucket_bytes: int,
        separate_vectors: bool,
    ) -> None:
        """Other buckets from the next step on. Between two steps, when no gradient is needed any
        more. Collective like `attach`.
        """
        self.make_buckets = make_buckets
        self.bucket_bytes = bucket_bytes
        self.separate_vectors = separate_vectors
        self.buckets.clear()
        self._slots.clear()
        self._allocate()

    def reduces(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradients of a parameter are summed."""
        return parameter in self._slots

    def _admit_unfrozen(self) -> None:
        """Rebuild the buckets with the parameters that were unfrozen since the last step.

        Nothing happens once the step has a gradient, because the old buckets hold it.
        """
        unfrozen = [p for p in self._frozen if p.requires_grad]
        if not unfrozen or any(self._used) or any(p.grad is not None for p in self._slots):
            return
        for parameter in unfrozen:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        trained = {*self._trained, *unfrozen}
        self._trained = [p for p in self.model.parameters() if p in trained]
        self.rebuild(
            self.make_buckets,
            bucket_bytes=self.bucket_bytes,
            separate_vectors=self.separate_vectors,
        )

    def _allocate(self) -> None:
        others = {*self._trained, *self.apart}
        self._frozen = [p for p in self.model.parameters() if p not in others]
        partition = self._partition()
        self.reduction = self.make_buckets(
            [
                Flat(
                    self.reduce_dtype or members[0].dtype,
                    tuple(_shape_in_memory(p) for p in members),
                    tp_local=isinstance(members[0], DTensor),
                )
                for members in partition
            ]
        )
        for members, wire in zip(partition, self.reduction.buffers, strict=True):
            self._add_bucket(members, wire)
        self.start_step()

    def _partition(self) -> list[list[nn.Parameter]]:
        """Trainable parameters by bucket, one dtype a bucket; parameters that tensor parallelism
        splits separately from replicated ones, which must stay bitwise equal on every rank of its
        axis.
        """
        trainable = self._trained
        sizes = [
            (
                local_tensor(p.detach()).numel() * p.element_size(),
                (p.dtype, p.ndim > 1 or not self.separate_vectors, isinstance(p, DTensor)),
            )
            for p in trainable
        ]
        return [[trainable[i] for i in members] for members in partition(sizes, self.bucket_bytes)]

    def _add_bucket(self, members: list[nn.Parameter], wire: torch.Tensor) -> None:
        locals_ = [local_tensor(p.detach()) for p in members]
        flat = (
            wire
            if wire.dtype == members[0].dtype
            else torch.zeros_like(wire, dtype=members[0].dtype)
        )
        views = [
            like_in_memory(part, t)
            for part, t in zip(flat.split([t.numel() for t in locals_]), locals_, strict=True)
        ]
        bucket = Bucket(
            members,
            flat,
            wire,
            len(self.buckets),
            range(len(self._slots), len(self._slots) + len(members)),
        )
        self.buckets.append(bucket)
        for parameter, view in zip(members, views, strict=True):
            self._slots[parameter] = Slot(
                bucket, view, like_parameter(view, parameter), len(self._slots)
            )

    def before_microbatch(self, last: bool) -> None:
        """The others of a step only accumulate."""
        self.synchronise = last
        self._admit_unfrozen()

    def after_backward(self) -> None:
        """The caller reads sums after the last backward."""
        if self.synchronise:
            self.finish_reduction()

    def after_step(self, end: StepEnd) -> str:
        """See `start_step`."""
        self.start_step()
        return ""

    def on_error(self, lost: Lost) -> None:
        """What was launched ends on every rank."""
        if lost == "step":
            self.abandon()

    def _set_aside(self) -> None:
        for bucket in self.buckets:
            for index, parameter in zip(bucket.slots, bucket.parameters, strict=True):
                # the user may have dropped or changed it
                self._used[index] = self._collect(parameter)
                parameter.grad = None
            bucket.reduced = bucket.flat.clone()
        self._begin_round()

    def expect_backward(self, output: Any) -> None:
        """Finish when the backward of `output` ends: the outermost one, where reentrant checkpoints
        run others inside of it.
        """
        if not (torch.is_grad_enabled() and self.synchronise):
            return
        if self._queued and not self._done and graph_task() is None:
            self.abandon()  # the last backward failed
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._finish_afterwards())

    def _finish_afterwards(self) -> None:
        if self._done:  # the first gradient after a finished reduction begins a new one
            self._begin_round()
        if self.synchronise and not self._queued:
            self._queued = True
            after_backward(self.finish_reduction)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self.accepts:
            self.has_refused = True
            raise foreign_backward()
        if self._done:
            self._begin_round()
        slot = self._slots[parameter]
        bucket = slot.bucket
        if bucket.launched:
            self._late.add(bucket.index)
            return
        self._collect(parameter)
        if not self.synchronise:
            return
        task = self._task
        self._task = graph_task()
        self._nested |= task is not None and task != self._task
        if self._listens:
            self._finish_afterwards()
        # Buckets that were complete before this gradient: hooks of the user's on a parameter find
        # its gradient in place.
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send(self.buckets[self._next])
        bucket.missing.discard(slot.index)

    def _collect(self, parameter: nn.Parameter) -> bool:
        """Bring a parameter's gradient into its bucket; without one, zero. Returns whether there is
        one.
        """
        slot = self._slots[parameter]
        gradient = parameter.grad
        if gradient is None:
            slot.view.zero_()
            return False
        if gradient is not slot.grad:
            if gradient.layout != torch.strided:
                raise ModelError(
                    f"`{self._name(parameter)}` has a {str(gradient.layout).removeprefix('torch.')}"
                    " gradient, and ranks sum dense ones; build the embedding with sparse=False"
                )
            with torch.no_grad():
                slot.view.copy_(local_tensor(gradient))
            parameter.grad = slot.grad
        return True

    def _send(self, bucket: Bucket) -> None:
        bucket.launched = True
        for parameter in bucket.parameters:
            if self._collect(parameter):
                self._used[self._slots[parameter].index] = True
                parameter.grad = None  # later gradients must not change what is being sent
        self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if bucket.wire is not bucket.flat:
            bucket.wire.copy_(bucket.flat)
        with naming("all-reduce of gradients over dp_replicate"):  # compression may wait here
            self.reduction.start(self._next)
        self._next += 1

    def finish_reduction(self) -> None:
        """Reduce what is left, also on a rank whose loss reached no parameter, and wait; gradients
        are then the sum (or mean) over the group. Safe to call twice for one backward.
        """
        if self._done:
            return
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        self._done = True
        asked = self._ask()
        for index in range(len(self.buckets)):
            self._receive(index)
        used, late = self._answer(asked)
        if late:
            self._sum_late(late)
        for parameter, slot in self._slots.items():
            parameter.grad = slot.grad if used[slot.index] else None
        self._used = used

    def _receive(self, index: int) -> None:
        """Wait for a bucket's sum."""
        bucket = self.buckets[index]
        with naming("all-reduce of gradients over dp_replicate"):
            self.reduction.finish(index)
        if bucket.wire is not bucket.flat:
            bucket.flat.copy_(bucket.wire)
        if self.mean:
            bucket.flat.div_(self.group.size())
        if bucket.reduced is not None:
            bucket.flat.add_(bucket.reduced)
            bucket.reduced = None

    def _sum_late(self, indices: Sequence[int]) -> None:
        """Another round, for what came after the launch of these buckets."""
        for index in indices:
            bucket = self.buckets[index]
            bucket.reduced = bucket.flat.clone()
            self._next = index
            self._send(bucket)
        for index in indices:
            self._receive(index)

    def _ask(self) -> Pending | None:
        """Which parameters this rank used, and which buckets need another round here."""
        for index in self._late:
            for parameter in self.buckets[index].parameters:
                self._used[self._slots[parameter].index] |= parameter.grad is not None
        if not self.track_unused or not self.buckets:  # a pipeline stage may have nothing to train
            return None
        late = [index in self._late for index in range(len(self.buckets))]
        flags = accelerator.tensor_of(
            [*self._used, *late], dtype=torch.uint8, device=self.buckets[0].flat.device
        )
        return Pending(flags, self.group, dist.ReduceOp.MAX)

    def _answer(self, asked: Pending | None) -> tuple[list[bool], list[int]]:
        """(by slot, whether any rank used it; buckets that need another round)."""
        if asked is None:
            return [True] * len(self._used), sorted(self._late)
        with naming("all-reduce over dp_replicate"):
            flags = asked.value()
        # Who used all, in one part, need not look (a device synchronisation): then all are used,
        # and the others' gradients came so too.
        if all(self._used) and not self._nested:
            return self._used, []
        found = [bool(flag) for flag in flags.tolist()]
        return found[: len(self._used)], [
            index for index, late in enumerate(found[len(self._used) :]) if late
        ]

    @property
    def unfinished(self) -> bool:
        """Whether there are gradients that no `finish_reduction` has summed."""
        return not self._done and any(parameter.grad is not None for parameter in self._slots)

    def abandon(self) -> None:
        """After a step that failed on all ranks: end what was launched, and drop all gradients.
        Collective, wherever each rank stopped.
        """
        if not self._done:
            for bucket in self.buckets[self._next :]:
                bucket.flat.zero_()
                self._launch(bucket)
            for index in range(len(self.buckets)):
                self._receive(index)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of the step so far. Between two backwards."""
        for parameter in self._slots:
            parameter.grad = None
        self.start_step()

    def start_step(self) -> None:
        """Forget the previous step. Needed before a step in which this rank may get no gradient at
        all; else the first one does it.
        """
        for bucket in self.buckets:
            bucket.reduced = None
        self._begin_round()
        self._used = [False] * len(self._slots)

    def _begin_round(self) -> None:
        self._next = 0
        self._queued = self._done = False
        self._late.clear()
        self._task = None
        if self._listens:  # a gradient that is still there is seen at the launch
            self._used = [False] * len(self._slots)
        for bucket in self.buckets:
            bucket.missing = set(bucket.slots)
            bucket.launched = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward of a step that ends with `finish_reduction`. What has been summed
        already is set aside, to be added again.
        """
        if self._done:
            self._set_aside()
        self.accepts = True
        try:
            yield
        finally:
            self.accepts = False

    def _name(self, parameter: nn.Parameter) -> str:
        return next(
            (name for name, p in self.model.named_parameters() if p is parameter), "a parameter"
        )


class _OutputHook:
    """On the model's root; a copy of the model has one that does nothing."""

    def __init__(self, reducer: Reducer | None = None) -> None:
        self._reducer = reducer

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._reducer is not None:
            self._reducer.expect_backward(output)

    def __reduce__(self) -> tuple[type[_OutputHook], tuple[()]]:
        return _OutputHook, ()


def _shape_in_memory(parameter: nn.Parameter) -> tuple[int, ...]:
    """The local shape, its dimensions in the order in which they lie in memory."""
    tensor = local_tensor(parameter.detach())
    return tuple(tensor.shape[dim] for dim in dims_in_memory(tensor) or range(tensor.ndim))
