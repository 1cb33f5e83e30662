"""Data parallelism's gradient reduction for replicated parameters (ZeRO stage 0): buckets, all-reduced while backward still runs.

The same idea as DistributedDataParallel's reducer, which cannot be used here because it wraps or hijacks the root module's forward,
breaks under pipeline schedules and averages. This one listens to gradients only, so it works for any part of a model, in any schedule.
Invariant: gradients live in the buckets (one copy), and all ranks launch the buckets in one fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch import after_backward, local_tensor
from plait.comm.buckets import Buckets, Flat
from plait.comm.pending import Pending
from plait.comm.waits import Waits
from plait.parallel.bucket_account import partition
from plait.parallel.placed import like_parameter

GRADIENTS = "all_reduce dp_replicate"
"""The name of its waits."""


@dataclass
class _Bucket:
    """Gradients that are reduced together. `flat` [numel] holds them, one after the other."""

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    wire: torch.Tensor
    """What is summed over the ranks: `flat` itself, or a buffer in the reduction's dtype."""
    missing: int = 0


@dataclass(frozen=True)
class _Slot:
    bucket: _Bucket
    view: torch.Tensor
    grad: torch.Tensor
    """What the parameter's `grad` is set to: the view, or for a parameter split over tp a DTensor around it."""
    index: int


@dataclass
class Reducer:
    """All-reduces the gradients of `model` over `group` at the end of every synchronised backward, once attached.

    `mean` divides by the group's size (what DistributedDataParallel does); otherwise gradients are summed. `reduce_dtype` is the dtype on
    the wire. With `track_unused`, a parameter that no rank used keeps `grad = None`; one small all-reduce a step finds out.
    """

    model: nn.Module
    group: dist.ProcessGroup
    bucket_bytes: int
    make_buckets: Callable[[Sequence[Flat]], Buckets]
    """Makes the buffers that are summed over `group` (see `comm.transport`)."""
    mean: bool = False
    reduce_dtype: torch.dtype | None = None
    track_unused: bool = True
    separate_vectors: bool = False
    """Give parameters of fewer than two dimensions buckets of their own: compression leaves them as they are."""
    waits: Waits = field(default_factory=Waits)
    synchronise: bool = True
    buckets: list[_Bucket] = field(default_factory=list, init=False)
    reduction: Buckets = field(init=False)
    _slots: dict[nn.Parameter, _Slot] = field(default_factory=dict, init=False)
    _used: list[bool] = field(default_factory=list, init=False)
    _next: int = field(default=0, init=False)
    _queued: bool = field(default=False, init=False)
    _done: bool = field(default=False, init=False)

    def attach(self) -> None:
        """Allocate the buckets and listen to the parameters. Once, when the model has its final parameters (not on `meta`)."""
        self._allocate()
        for parameter in self._slots:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def rebuild(self, make_buckets: Callable[[Sequence[Flat]], Buckets], *, bucket_bytes: int, separate_vectors: bool) -> None:
        """Other buckets from the next step on. Between two steps, when no gradient is needed any more. Collective like `attach`."""
        self.make_buckets, self.bucket_bytes, self.separate_vectors = make_buckets, bucket_bytes, separate_vectors
        self.buckets.clear()
        self._slots.clear()
        self._allocate()

    def _allocate(self) -> None:
        partition = self._partition()
        shapes = [tuple(tuple(local_tensor(p.detach()).shape) for p in members) for members in partition]
        self.reduction = self.make_buckets(
            [
                Flat(self.reduce_dtype or members[0].dtype, held, tp_local=isinstance(members[0], DTensor))
                for members, held in zip(partition, shapes, strict=True)
            ]
        )
        for members, wire in zip(partition, self.reduction.buffers, strict=True):
            self._add_bucket(members, wire)
        self.start_step()

    def _partition(self) -> list[list[nn.Parameter]]:
        """Trainable parameters by bucket, one dtype a bucket; those that tensor parallelism split apart from those that it left whole,
        which must stay the same bits on every rank of its axis."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
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
        flat = wire if wire.dtype == members[0].dtype else torch.zeros_like(wire, dtype=members[0].dtype)
        views = [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in locals_]), locals_, strict=True)]
        bucket = _Bucket(members, flat, wire)
        self.buckets.append(bucket)
        for parameter, view in zip(members, views, strict=True):
            self._slots[parameter] = _Slot(bucket, view, like_parameter(view, parameter), len(self._slots))

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._done:  # the first gradient after a finished reduction begins a new step
            self.start_step()
        slot = self._slots[parameter]
        if parameter.grad is not slot.grad:
            assert parameter.grad is not None
            slot.view.copy_(local_tensor(parameter.grad))
            parameter.grad = slot.grad
        self._used[slot.index] = True
        if not self.synchronise:
            return
        if not self._queued:
            self._queued = True
            after_backward(self.finish)
        slot.bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        if bucket.wire is not bucket.flat:
            bucket.wire.copy_(bucket.flat)
        with self.waits.during(GRADIENTS):  # who compresses waits here for an earlier bucket
            self.reduction.start(self._next)
        self._next += 1

    def finish(self) -> None:
        """Reduce what is left and wait; gradients are then the sum (or mean) over the group. Safe to call twice for one backward."""
        if self._done:
            return
        self._done = True
        for bucket in self.buckets[self._next :]:
            for parameter in bucket.parameters:
                slot = self._slots[parameter]
                if parameter.grad is not slot.grad:  # not reached by any backward of this step on this rank
                    slot.view.zero_()
            self._launch(bucket)
        asked = self._ask_who_used()
        for index, bucket in enumerate(self.buckets):
            with self.waits.during(GRADIENTS):
                self.reduction.finish(index)
            if bucket.wire is not bucket.flat:
                bucket.flat.copy_(bucket.wire)
            if self.mean:
                bucket.flat.div_(self.group.size())
        used = self._used_anywhere(asked)
        for parameter, slot in self._slots.items():
            parameter.grad = slot.grad if used[slot.index] else None

    def _ask_who_used(self) -> Pending | None:
        if not self.track_unused or not self.buckets:  # a pipeline stage may have nothing to train
            return None
        flags = torch.tensor(self._used, dtype=torch.uint8, device=self.buckets[0].flat.device)
        return Pending(flags, self.group, dist.ReduceOp.MAX)

    def _used_anywhere(self, asked: Pending | None) -> list[bool]:
        if asked is None:
            return [True] * len(self._used)
        with self.waits.during(GRADIENTS):
            flags = asked.value()
        # Only a rank that missed a parameter has to look (a device synchronisation): where it used all, all are used.
        return self._used if all(self._used) else [bool(flag) for flag in flags.tolist()]

    def start_step(self) -> None:
        """Forget the previous step. Needed before a step in which this rank may get no gradient at all; else the first one does it."""
        self._next = 0
        self._queued = self._done = False
        self._used = [False] * len(self._slots)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before
