"""Recorder of live memory per block and over time, during a forward and a backward.

`Recorder` observes any run. `DryRecorder` observes a run on fake tensors: it also counts FLOPs and
traffic, and makes collectives return at once.

`LiveStorages` tracks which storages are alive, their sizes, and the part of the model that created
them. It is a dispatch mode for real and fake tensors. A unit is a block, the head, or the rest of
the model. A storage belongs to the unit that was running when the storage was created, unless it is
assigned to another unit (`claim`). Only storages of tensors that pass torch's dispatcher are
visible. Temporary memory inside kernels is not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from plait._torch.groups import finished_work, process_group_of
from plait._torch.operators import TorchDispatchMode, operator_name, tree_leaves
from plait._torch.tensors import around_shape_inference, local_tensor, on_resize, storage_id
from plait.attributes import override_attributes
from plait.parallel.accounting.peak import HEAD, OUTSIDE, Direction, Interval, LiveBytes


class LiveStorages(TorchDispatchMode):
    """Dispatch mode that counts the bytes of storages that are created within its context.

    Args:
        known: Tensors whose storages are never counted, such as parameters and the batch.
    """

    def __init__(self, *, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.unit: int = -1
        """Unit of new storages."""
        self.bytes: Counter[int] = Counter()
        """Live bytes by unit."""
        self.total = 0
        """Live bytes of all units."""
        self.peak = 0
        """Largest value of `total`."""
        self._known: dict[int, Any] = {}
        self._units: dict[int, tuple[int, int]] = {}
        self._references: dict[int, Any] = {}
        self._paused = False
        self._open = ExitStack()
        self.forget(known)

    def __enter__(self) -> Self:
        # fully_shard frees gathered parameters by resizing their storages.
        self._open.enter_context(on_resize(self._resized))
        # DTensor infers shapes with tensors that have no memory.
        self._open.enter_context(around_shape_inference(self._pause))
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._open.close()

    def _pause(self) -> AbstractContextManager[None]:
        return override_attributes(self, _paused=True)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop counting the storages of `tensors`."""
        for tensor in tensors:
            storage = local_tensor(tensor.detach()).untyped_storage()
            self._gone(storage_id(storage))
            # The reference keeps the storage alive, so no later storage can get its address.
            self._known[storage_id(storage)] = storage

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of `tensors` that existed before this mode was active."""
        for tensor in tensors:
            self._appeared(local_tensor(tensor.detach()).untyped_storage())

    def claim(self, tensor: torch.Tensor, unit: int) -> None:
        """Assign the storage of a tensor to a unit, if the storage is counted."""
        self.claim_storage(storage_id(tensor.untyped_storage()), unit)

    def claim_storage(self, key: int, unit: int) -> None:
        """Assign the storage with the address `key` (`_cdata`) to a unit, if it is alive."""
        if key in self._units:
            size, before = self._units[key]
            self.bytes[before] -= size
            self.bytes[unit] += size
            self._units[key] = (size, unit)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor dispatches the operators on its local tensors, which are counted.
            return NotImplemented
        if self._paused:
            return func(*args, **(kwargs or {}))
        out = self.call(func, args, kwargs or {})

        for leaf in tree_leaves(out):
            # Fake tensors report the device that they stand for; only meta tensors have no memory.
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._appeared(leaf.untyped_storage())
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. Subclasses override this method."""
        return func(*args, **kwargs)

    def _appeared(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key in self._known or key in self._units:
            return
        size = storage.nbytes()
        self._units[key] = (size, self.unit)
        # The method is weak as well, because a storage must not keep the recorder alive.
        self._references[key] = weakref.ref(
            storage, partial(_call, weakref.WeakMethod(self._gone), key)
        )
        self._add(self.unit, size)

    def _add(self, unit: int, size: int) -> None:
        self.bytes[unit] += size
        self.total += size
        self.peak = max(self.peak, self.total)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._units.get(storage_id(storage))
        if entry is not None:
            before, unit = entry
            self._units[storage_id(storage)] = (storage.nbytes(), unit)
            self._add(unit, storage.nbytes() - before)

    def _gone(self, key: int) -> None:
        entry = self._units.pop(key, None)
        self._references.pop(key, None)
        if entry is not None:
            size, unit = entry
            self.bytes[unit] -= size
            self.total -= size


def _call(method: Callable[[], Callable[[int], None] | None], key: int, _: object) -> None:
    bound = method()
    if bound is not None:
        bound(key)


BACKWARD = -4
"""Unit of tensors that the backward creates before that of the first block.

In its backward, block i has the unit BACKWARD - 1 - i.
"""


class Recorder(LiveStorages):
    """Recorder of live storages by unit, with an `Interval` for each period in which one unit runs.

    A unit is the index of a block, OUTSIDE, HEAD, or a unit of the backward (BACKWARD).

    Args:
        known: Tensors whose storages are not counted, such as parameters and the batch.
        drops_gradients: Whether a block's gradients are freed when the backward of the block ends.
    """

    def __init__(self, *, known: Any, drops_gradients: bool = True) -> None:
        super().__init__(known=known)
        self.unit = OUTSIDE
        self.gradients: Counter[int] = Counter()
        """Bytes of accumulated gradients, keyed by block. HEAD stands for a head that is a sharding
        unit.
        """
        self.drops_gradients = drops_gradients
        self._done: list[Interval] = []
        self._now: tuple[Direction, int] | None = None
        self._peak = self._peak_with = LiveBytes()

    def begin_forward(self, unit: int) -> None:
        """Assign storages that are created from now on to `unit`, which runs its forward."""
        self.mark("forward", unit)
        self.unit = unit

    def begin_backward(self, block: int) -> None:
        """Assign storages that are created from now on to the backward of a block."""
        self.mark("backward", block)
        self.unit = BACKWARD - 1 - block

    def of_block(self, index: int) -> int:
        """Return the live bytes that the forward and the backward of a block have created."""
        return self.bytes[index] + self.bytes[BACKWARD - 1 - index]

    def mark(self, direction: Direction, unit: int) -> None:
        """Begin a new `Interval`, unless the current one has the same direction and unit."""
        if self._now == (direction, unit):
            return
        self._close()
        self._now = (direction, unit)
        self._peak, self._peak_with = self._alive(with_gradients=False), self._alive()

    def take(self) -> tuple[Interval, ...]:
        """Return the recorded intervals, and start a new list."""
        self._close()
        done = tuple(self._done)
        self._done = []
        self._now = None
        return done

    def accumulated(self, parameter: nn.Parameter, unit: int) -> None:
        """Count the gradient of `parameter`, which has just been accumulated."""
        assert parameter.grad is not None
        before = self.total
        # Gradients are counted separately, because the ZeRO stage determines how long they stay.
        self.forget([parameter.grad])
        self.gradients[unit] += before - self.total
        self._compare()

    def _close(self) -> None:
        if self._now is None:
            return
        direction, unit = self._now
        self._done.append(Interval(direction, unit, self._peak, self._peak_with, self._alive()))
        # The gradients of a sharding unit are reduced when its backward ends, and only their shards
        # stay.
        if direction == "backward" and (unit >= 0 or unit == HEAD) and self.drops_gradients:
            self.gradients[unit] = 0

    def _appeared(self, storage: torch.UntypedStorage) -> None:
        super()._appeared(storage)
        self._compare()

    def _compare(self) -> None:
        if self.total > self._peak.total:
            self._peak = self._alive(with_gradients=False)
        if self.total + self.gradients.total() > self._peak_with.total:
            self._peak_with = self._alive()

    def _alive(self, *, with_gradients: bool = True) -> LiveBytes:
        logits = self.bytes[HEAD]
        temporaries = sum(size for unit, size in self.bytes.items() if unit <= BACKWARD)
        root = self.gradients[OUTSIDE]
        gradients = self.gradients.total() - root
        if not with_gradients:
            gradients = root = 0
        return LiveBytes(
            activations=self.total - logits - temporaries,
            logits=logits,
            temporaries=temporaries,
            gradients=gradients,
            root_gradients=root,
        )


class DryRecorder(Recorder):
    """Recorder for runs on fake tensors, which also counts FLOPs and traffic."""

    def __init__(self, *, known: Any, drops_gradients: bool = True) -> None:
        super().__init__(known=known, drops_gradients=drops_gradients)
        self.flops = 0
        """FLOPs of matrix products and attention."""
        self.traffic: Counter[str] = Counter()
        """Bytes that this rank sends in rings, by collective."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args)
        out = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _collective(self, func: Any, args: Any) -> Any:
        kind, full_index, returns_tensors = _COLLECTIVES[operator_name(func)]
        # The bytes are counted by the rank that sends them.
        if kind == "receive":
            return finished_work()
        size = sum(
            leaf.numel() * leaf.element_size()
            for leaf in tree_leaves(args[full_index])
            if isinstance(leaf, torch.Tensor)
        )
        ranks = process_group_of(args).size()
        if kind != "send":
            # A ring all-reduce is a reduce-scatter and an all-gather. In each of them a rank sends
            # (ranks - 1) / ranks of the tensor.
            rounds = 2 if kind == "all_reduce" else 1
            size = rounds * size * (ranks - 1) // ranks
        self.traffic[kind] += size
        if returns_tensors:
            return args[0], finished_work()
        return finished_work()


_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, True),
    "_allgather_base_": ("all_gather", 0, True),
    "_reduce_scatter_base_": ("reduce_scatter", 1, True),
    "alltoall_base_": ("reduce_scatter", 1, False),  # gloo implements reduce-scatter by it
    "send": ("send", 0, False),
    "recv_": ("receive", 0, False),
}
"""(Kind, index of the full tensor in the arguments, whether it returns tensors) per operator.
"""


def watch(
    model: nn.Module,
    units: Mapping[str, int],
    recorder: Recorder,
    *,
    last: bool = True,
    head: str | None = None,
) -> Callable[[], None]:
    """Add hooks to a model that tell a recorder which block runs and which gradients are computed.

    The input of a block belongs to the block, even if another module computes it.

    Args:
        model: The model that will run.
        units: Indices of the blocks, keyed by the name of the block.
        recorder: Receives the events.
        last: Whether the head follows the last block of `units`.
        head: Name of the head if it is a sharding unit of its own, else None.

    Returns:
        A function that removes the hooks.
    """
    handles = []
    first_block = min(units.values(), default=None)
    last_block = max(units.values(), default=None)

    def entering(
        index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        recorder.begin_forward(index)
        if isinstance(hidden, torch.Tensor):
            recorder.claim(hidden, index)
            # The gradient of the first block's input is the last that blocks compute.
            if index == first_block and hidden.requires_grad:
                hidden.register_hook(lambda _: recorder.mark("backward", OUTSIDE))

    def leaving(index: int, _module: nn.Module, _args: object, output: Any) -> None:
        ends = last and index == last_block
        recorder.begin_forward(HEAD if ends else OUTSIDE)
        if ends:
            # The hidden states are the first output of a block. The head reads them.
            for leaf in tree_leaves(output)[:1]:
                recorder.claim(leaf, HEAD)
        on_first_gradient(output, partial(recorder.begin_backward, index))

    for name, index in units.items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(entering, index), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leaving, index)))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        outside = HEAD if head is not None and name.startswith(f"{head}.") else OUTSIDE
        unit = next((u for block, u in units.items() if name.startswith(f"{block}.")), outside)
        hook = partial(recorder.accumulated, unit=unit)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def on_first_gradient(output: Any, call: Callable[[], None]) -> None:
    """Call a function once, when the first gradient of any tensor in `output` is computed."""
    if not isinstance(output, torch.Tensor | tuple | list | dict):
        output = vars(output)
    # The backward of several outputs begins with whichever gradient is computed first.
    called = False

    def first(_: torch.Tensor) -> None:
        nonlocal called
        if not called:
            called = True
            call()

    for leaf in tree_leaves(output):
        # Logits that are computed later, in chunks, have the hidden states that they depend on.
        leaf = getattr(leaf, "hidden", leaf)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(first)
