"""Optimizer states, gradients and parameters in files (ZeRO-Infinity's disk tier), and an optimizer
step that iterates over them.

The step is computed chunk by chunk: while one chunk is updated, the next are read and the previous
are written, each by a thread of its own, so that at most `buffer_count` chunks are in memory. The
optimizer is torch's own and sees ordinary tensors: the results are bitwise equal to those of a step
in memory. Not for GPUs yet: what is mapped is host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from plait._torch.dtensor import local_tensor
from plait._torch.units import replace_shard_buffers, shard_buffers, sharded_modules
from plait.cluster.host_memory import trim_heap
from plait.errors import ModelError
from plait.optim.gradient_math import multiply_all
from plait.parallel.hooks import StepHook
from plait.parallel.offload.arena import Arena, in_pages
from plait.parallel.offload.shard_reader import ShardReader
from plait.parallel.placed import like_parameter

T = TypeVar("T")

ELEMENTWISE = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
"""torch's optimizers that update every element by itself, so that a parameter may be updated in
slices.
"""
ALIGNED = 4096
"""Elements: slices begin at multiples, so that vectorised kernels meet the same elements at the
same places.
"""


@dataclass(frozen=True)
class _Slice:
    """Elements `start` to `end` of a parameter's local part."""

    parameter: nn.Parameter
    start: int
    end: int

    @property
    def gradient(self) -> torch.Tensor:
        """Of the full parameter."""
        assert self.parameter.grad is not None
        return self.parameter.grad

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor of the parameter's shape, flat, sharing its memory."""
        return local_tensor(tensor).view(-1)[self.start : self.end]


@dataclass(frozen=True)
class _Use:
    """A mapped tensor, or a slice of one, that is needed in memory for a while."""

    tensor: torch.Tensor
    changes: bool = True
    """Whether it is written to."""
    lasts: bool = True
    """Whether it is read again, so that what was written has to reach the disk."""


class DiskTier(StepHook):
    """Made before a model's weights are, given the optimizer afterwards."""

    def __init__(
        self,
        arena: Arena | None,
        *,
        buffer_bytes: int,
        buffer_count: int = 4,
        shards: Arena | None = None,
        pool_bytes: int = 0,
    ) -> None:
        """`arena` is for gradients and states, `shards` (which may be the same) for the shards of
        parameters; None leaves them in memory. `pool_bytes`: how much of the shards is in memory at
        once while the model computes.
        """
        self.arena = arena
        self.shards = shards
        self.pool_bytes = pool_bytes
        self.buffer_bytes = buffer_bytes
        self.buffer_count = buffer_count
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        """Shards in files, padding included."""
        self._shard_reader: ShardReader | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="plait-disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="plait-disk-write")
        self._leaving: deque[tuple[Future[None], int]] = deque()
        """Gradients that are being written to the disk."""
        self._optimizer: Optimizer | None = None
        self._inner_step: Callable[..., Any] | None = None
        self._factor: torch.Tensor | float = 1.0
        self._places: dict[tuple[nn.Parameter, str], torch.Tensor] = {}
        self._group_of: dict[nn.Parameter, int] = {}
        self._new: set[nn.Parameter] = set()
        """Parameters whose first step this is."""

    def adopt(
        self,
        model: nn.Module,
        *,
        states: int,
        units: Collection[str] = ("",),
        shards_of: Collection[str] = ("",),
    ) -> None:
        """Map the gradients of `units` (by their paths; "": the whole model) and the parameters'
        shards of `shards_of`, and reserve `states` optimizer states for each. Parameters that are
        computed with as they are (a model that is not sharded) stay in memory. Raises PlaitError on
        a full disk, with nothing changed.
        """
        paths = {module: path for path, module in model.named_modules()}
        moved = [
            unit
            for unit in sharded_modules(model)
            if isinstance(unit, nn.Module) and ("" in shards_of or paths[unit] in shards_of)
        ]
        inside = {
            p
            for unit in (units if "" not in units else ("",))
            for p in model.get_submodule(unit).parameters()
        }
        trained = [p for p in model.parameters() if p.requires_grad and p in inside]
        if self.shards is not None:
            self.shards.reserve(
                sum(in_pages(buffer) for unit in moved for buffer in shard_buffers(unit))
            )
        if self.arena is not None:
            self.arena.reserve(
                (1 + states) * sum(in_pages(local_tensor(p.detach())) for p in trained)
            )
        if self.shards is not None:
            for unit in moved:
                replace_shard_buffers(unit, self.shards.copy)
            self._buffers = [buffer for unit in moved for buffer in shard_buffers(unit)]
            self._shard_reader = ShardReader(
                self.shards, moved, pool_bytes=self.pool_bytes, reader=self._reader
            )
        if self.arena is None:
            return
        for parameter in trained:
            local = local_tensor(parameter.detach())
            self._gradients[parameter] = self.arena.empty(local.shape, local.dtype)
            parameter.register_post_accumulate_grad_hook(self._keep_gradient)

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Each once."""
        return tuple(
            dict.fromkeys(arena for arena in (self.arena, self.shards) if arena is not None)
        )

    def close(self) -> None:
        """End the threads, and close the files. What is mapped stays readable, as long as a tensor
        of it is there.
        """
        for pool in (self._writer, self._reader):
            pool.shutdown()
        for arena in self.arenas:
            arena.close()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor is in files."""
        return any(arena.holds(tensor) for arena in self.arenas)

    def fetch(self, tensor: torch.Tensor, *, write: bool) -> None:
        """See Arena; nothing for a tensor in memory."""
        for arena in self.arenas:
            if arena.holds(tensor):
                arena.fetch(tensor, write=write)

    def evict(self, tensor: torch.Tensor, *, written: bool = True) -> None:
        """See Arena; nothing for a tensor in memory."""
        for arena in self.arenas:
            arena.evict(tensor, written=written)

    def evict_parameter(self, parameter: torch.Tensor) -> None:
        """After it was filled."""
        self.evict(local_tensor(parameter.detach()))

    def evict_parameters(self) -> None:
        """After they were filled."""
        for buffer in self._buffers:
            self.evict(buffer)
        if self.arenas:
            trim_heap()  # of what was there before it was mapped

    def end_of_computation(self) -> None:
        """No parameters are gathered for now: evict what was prefetched."""
        if self._shard_reader is not None:
            self._shard_reader.end_step()

    def _keep_gradient(self, parameter: torch.Tensor) -> None:
        """The gradient leaves memory as soon as it is there."""
        assert (
            isinstance(parameter, nn.Parameter)
            and parameter.grad is not None
            and self.arena is not None
        )
        place = self._gradients[parameter]
        found = local_tensor(parameter.grad)
        if found.data_ptr() != place.data_ptr():
            place.copy_(found)
            parameter.grad = like_parameter(place, parameter)
        size = place.numel() * place.element_size()
        self._leaving.append((self._writer.submit(self.arena.evict, place), size))
        # backward is faster than the disk
        while sum(size for _, size in self._leaving) > self.buffer_bytes:
            self._leaving.popleft()[0].result()

    def walk(
        self, tensors: Sequence[torch.Tensor], *, write: bool = False
    ) -> Iterator[list[torch.Tensor]]:
        """The plain tensors in lists of about a buffer's size, in order, each list fetched before
        its use and evicted after it.
        """
        lists: list[list[torch.Tensor]] = []
        size = 0
        for tensor in tensors:
            count = tensor.numel() * tensor.element_size()
            if not lists or size + count > self.buffer_bytes:
                lists.append([])
                size = 0
            lists[-1].append(tensor)
            size += count
        yield from self._pipelined(
            lists, lambda entry: [_Use(tensor, changes=write) for tensor in entry]
        )

    def _pipelined(self, entries: Sequence[T], uses_of: Callable[[T], list[_Use]]) -> Iterator[T]:
        """Each entry when its tensors are in memory, in order; afterwards they are evicted. As many
        are prefetched as there is room for, so that the reader never waits for the computation.
        """

        def fetch(uses: list[_Use]) -> None:
            for use in uses:
                self.fetch(use.tensor, write=use.changes)

        def evict(uses: list[_Use]) -> None:
            for use in uses:
                self.evict(use.tensor, written=use.changes and use.lasts)

        self.end_of_computation()
        waiting = iter(entries)
        arriving: deque[tuple[T, Future[None]]] = deque()
        leaving: deque[Future[None]] = deque()

        def read_ahead() -> None:
            # besides the one that is computed
            while len(arriving) + len(leaving) < self.buffer_count - 1:
                entry = next(waiting, None)
                if entry is None:
                    return
                arriving.append((entry, self._reader.submit(fetch, uses_of(entry))))

        read_ahead()
        while arriving:
            entry, arrived = arriving.popleft()
            arrived.result()
            while leaving and leaving[0].done():
                leaving.popleft().result()
            read_ahead()
            yield entry
            leaving.append(self._writer.submit(evict, uses_of(entry)))
            while leaving and not arriving:
                leaving.popleft().result()
                read_ahead()
        for future in leaving:
            future.result()

    def drive(self, optimizer: Optimizer) -> None:
        """Replace `optimizer.step` by one that reads files. Raises ModelError for an optimizer that
        needs all parameters at once.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ModelError(
                "optimizer.type = 'LBFGS' looks at all parameters at once; use another, or"
                ' offload_optimizer.device = "none"'
            )
        self._optimizer = optimizer
        self._inner_step = optimizer.step
        # A method of the optimizer, as torch's schedules want it.
        optimizer.step = MethodType(lambda _, closure=None: self.step(closure), optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(lambda _: self._map_made())
        self._map_made()

    def scale_in_step(self, factor: torch.Tensor | float) -> None:
        """Multiply gradients in the coming step, so that they are read once less."""
        self._factor = factor

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step of the optimizer over all parameters that have a gradient."""
        optimizer = self._optimizer
        assert optimizer is not None
        if closure is not None:
            raise ModelError(
                "an optimizer whose states are on disk takes no closure; compute the gradients"
                " first, then call step()"
            )
        factor = self._factor
        self._factor = 1.0
        members = [list(group["params"]) for group in optimizer.param_groups]
        self._group_of = {p: index for index, parameters in enumerate(members) for p in parameters}
        stepping = [p for p in self._group_of if p.grad is not None]
        self._new = {p for p in stepping if not optimizer.state.get(p)}
        elementwise = is_elementwise(optimizer)
        try:
            scaled = isinstance(factor, torch.Tensor) or factor != 1.0
            for piece in self._pipelined(
                self._pieces(stepping, elementwise=elementwise),
                partial(self._uses_of, scaled=scaled),
            ):
                if scaled:
                    multiply_all([part.of(part.gradient) for part in piece], factor)
                if elementwise:
                    self._step_slices(optimizer, piece)
                else:
                    self._step_whole(optimizer, piece)
        finally:
            for group, parameters in zip(optimizer.param_groups, members, strict=True):
                group["params"] = parameters

    def _pieces(
        self, parameters: Sequence[nn.Parameter], *, elementwise: bool
    ) -> list[list[_Slice]]:
        """Slices whose parameter, gradient and states, as far as they are in files, together take
        about a buffer.
        """
        pieces: list[list[_Slice]] = [[]]
        left = self.buffer_bytes
        for parameter in parameters:
            count = local_tensor(parameter.detach()).numel()
            each = parameter.element_size()
            if self.arena is not None:
                each *= 2 + max(2, len(self._large_states(parameter)))
            start = 0
            while start < count or start == 0:
                room = max(ALIGNED, left // each // ALIGNED * ALIGNED) if elementwise else count
                end = min(count, start + room)
                pieces[-1].append(_Slice(parameter, start, end))
                left -= (end - start) * each
                start = max(end, 1)
                if left < ALIGNED * each:
                    pieces.append([])
                    left = self.buffer_bytes
        return [piece for piece in pieces if piece]

    def _large_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The states that are shaped like the parameter."""
        assert self._optimizer is not None
        states = self._optimizer.state.get(parameter, {})
        return {
            name: value
            for name, value in states.items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        }

    def _uses_of(self, piece: list[_Slice], *, scaled: bool) -> list[_Use]:
        """A gradient ends with the step, so what the step made of it need not reach the disk."""
        found = []
        for part in piece:
            large = self._large_states(part.parameter).values()
            found += [_Use(part.of(tensor)) for tensor in (part.parameter.detach(), *large)]
            found.append(_Use(part.of(part.gradient), changes=scaled, lasts=False))
        return found

    def _only(self, optimizer: Optimizer, members: Sequence[tuple[int, nn.Parameter]]) -> None:
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [parameter for owner, parameter in members if owner == index]

    def _step_whole(self, optimizer: Optimizer, piece: list[_Slice]) -> None:
        assert self._inner_step is not None
        self._only(optimizer, [(self._group_of[part.parameter], part.parameter) for part in piece])
        self._inner_step()
        for part in piece:
            for name, value in self._large_states(part.parameter).items():
                optimizer.state[part.parameter][name] = self._mapped(part.parameter, name, value)

    def _step_slices(self, optimizer: Optimizer, piece: list[_Slice]) -> None:
        """Plain parameters in place of the slices, with slices of the states."""
        assert self._inner_step is not None
        slices = []
        for part in piece:
            sliced = nn.Parameter(part.of(part.parameter.detach()))
            sliced.grad = part.of(part.gradient)
            if part.parameter not in self._new:
                large = self._large_states(part.parameter)
                optimizer.state[sliced] = {
                    name: part.of(value) if name in large else _own(value)
                    for name, value in optimizer.state[part.parameter].items()
                }
            slices.append(sliced)
        self._only(
            optimizer,
            [
                (self._group_of[part.parameter], sliced)
                for part, sliced in zip(piece, slices, strict=True)
            ],
        )
        self._inner_step()
        for part, sliced in zip(piece, slices, strict=True):
            self._take(optimizer, part, optimizer.state.pop(sliced, {}))

    def _take(self, optimizer: Optimizer, part: _Slice, found: dict[str, Any]) -> None:
        """The states of a slice into those of its parameter. Step counts advance with the last
        slice: the others must see the old ones.
        """
        parameter = part.parameter
        states = optimizer.state[part.parameter]
        count = local_tensor(parameter.detach()).numel()
        for name, value in found.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == (part.end - part.start,)
                and (value.ndim and name != "step")
            ):
                if name not in states:
                    states[name] = self._mapped(parameter, name, None)
                place = part.of(states[name])
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            elif part.end == count:
                states[name] = value

    def _mapped(
        self,
        parameter: nn.Parameter,
        name: str,
        value: torch.Tensor | None,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The place of a state in the files, filled with `value`. The same memory for the life of
        the optimizer. Where the parameter's states stay in memory: `value` itself, or an empty
        tensor.
        """
        if self.arena is None or parameter not in self._gradients:
            if value is not None:
                return value
            return like_parameter(
                torch.empty_like(local_tensor(parameter.detach()), dtype=dtype), parameter
            )
        if value is not None and type(local_tensor(value.detach())) is not torch.Tensor:
            kind = type(local_tensor(value.detach())).__name__
            raise ModelError(
                f"zero_optimization.offload_optimizer.device = 'nvme': `{name}` of the optimizer is"
                f" a {kind}, which would lose its form in a file; use an optimizer whose states are"
                ' plain tensors, or device "none"'
            )
        place = self._places.get((parameter, name))
        if place is None:
            local = local_tensor(parameter.detach())
            form = value.dtype if value is not None else dtype or parameter.dtype
            place = self._places[parameter, name] = self.arena.empty(local.shape, form)
        if value is not None and local_tensor(value).data_ptr() != place.data_ptr():
            place.copy_(local_tensor(value))
            self.arena.evict(place)
        return like_parameter(place, parameter)

    def place(self, parameter: nn.Parameter, name: str, dtype: torch.dtype) -> torch.Tensor:
        """An empty state shaped like the parameter, where its states are kept; for a checkpoint to
        fill.
        """
        return self._mapped(parameter, name, None, dtype=dtype)

    def _map_made(self) -> None:
        """States that others made: a checkpoint that was loaded, an optimizer that makes them when
        it is built.
        """
        assert self._optimizer is not None
        for parameter in list(self._optimizer.state):
            assert isinstance(parameter, nn.Parameter)
            for name, value in self._large_states(parameter).items():
                self._optimizer.state[parameter][name] = self._mapped(parameter, name, value)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's that update every element by itself."""
    return type(optimizer).__name__ in ELEMENTWISE and type(optimizer).__module__.startswith(
        "torch.optim"
    )


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
