"""Optimizer states, gradients and parameters in files, and an optimizer step that streams them.

This is ZeRO-Infinity's disk tier. GPUs are not supported yet: the mapped memory is host memory.

Note [Streaming step]
    The step is computed chunk by chunk. While one chunk is updated, one thread reads the next
    chunks and another writes the previous ones, so that at most `buffer_count` chunks are in
    memory. The optimizer is torch's own and sees ordinary tensors, so the results are bitwise equal
    to those of a step in memory. An elementwise optimizer is stepped on slices of parameters. Any
    other optimizer is stepped on full parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait._torch.tensors import local_tensor
from plait._torch.units import replace_shard_buffers, shard_buffers, sharded_modules
from plait.cluster.host_memory import trim_heap
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, ModelError, Problem
from plait.optim.gradient_math import multiply_all
from plait.optim.optimizer import build_optimizer, make_fake_states
from plait.parallel.hooks import StepHook
from plait.parallel.offload.arena import Arena, ShardPrefetcher, in_pages
from plait.parallel.parameter_layout import like_parameter
from plait.parallel.techniques.offload import ParameterOffload
from plait.sizes import format_bytes

T = TypeVar("T")
ELEMENTWISE = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
"""torch's optimizers that update each element by itself, so that slices can be updated."""
ALIGNED = 4096
"""Alignment of slices in elements.

Vectorised kernels then process the same elements in the same lanes as in a full parameter.
"""


def build_disk_tier(
    resolved: Resolved, model: nn.Module, units: Collection[str]
) -> DiskTier | None:
    """Create the files of a model, or return None if the configuration stores nothing in files.

    Args:
        resolved: The configuration.
        model: The sharded model. It may not have its weights yet.
        units: Paths of the FSDP units whose states are in files. "" means the full model.

    Raises:
        ConfigError: The buffers are too small for the parameters that are gathered together.
    """
    states = resolved.optimizer_offload
    parameters = resolved.parameter_offload
    if states.device != "nvme" and parameters.device != "nvme":
        return None

    arena = None
    if states.device == "nvme":
        arena = Arena(Path(states.path or "."))
    shards = None
    if parameters.device == "nvme":
        _refuse_small_pool(parameters, model)
        if arena is not None and parameters.path == states.path:
            shards = arena
        else:
            shards = Arena(
                Path(parameters.path or "."), field="zero_optimization.offload_param.nvme_path"
            )

    buffers = states if arena is not None else parameters
    tier = DiskTier(
        arena,
        buffer_bytes=buffers.buffer_bytes,
        buffer_count=buffers.buffer_count,
        shards=shards,
        pool_bytes=parameters.pool_bytes,
    )
    tier.adopt(
        model,
        states=large_states(lambda named: build_optimizer(resolved.optimizer, named)),
        units=units,
        shards_of=units if parameters.with_states else ("",),
    )
    return tier


def _refuse_small_pool(offload: ParameterOffload, model: nn.Module) -> None:
    """Raise ConfigError if the shards of an FSDP unit do not fit into the buffers.

    The shards of a unit are in memory together while it is gathered.
    """
    if offload.with_states:
        return
    names = {module: name or "what is outside the blocks" for name, module in model.named_modules()}
    units = [
        (sum(map(attrgetter("nbytes"), shard_buffers(unit))), names[unit])
        for unit in sharded_modules(model)
    ]
    size, name = max(units, default=(0, ""))
    if size <= offload.pool_bytes:
        return
    # The setting counts elements of 4 bytes.
    least = -(-size // offload.buffer_count // 4)
    rule = (
        f"{offload.buffer_count} buffers hold {format_bytes(offload.pool_bytes)}, and {name},"
        f" gathered as one, has {format_bytes(size)}"
    )
    raise ConfigError(
        Problem(
            "zero_optimization.offload_param.buffer_size",
            offload.buffer_bytes // 4,
            rule,
            f"set it to {least} or more",
        )
    )


def large_states(make: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]) -> int:
    """Return the largest number of states of one parameter that have the parameter's shape.

    The states are counted after a step on a small matrix and a small vector, because some
    optimizers (Adafactor, Muon) have different states for matrices and vectors.

    Args:
        make: Builds the optimizer from (name, parameter) pairs.
    """
    parameters = {
        "weight": nn.Parameter(torch.zeros(8, 8)),
        "bias": nn.Parameter(torch.zeros(8)),
    }
    optimizer = make(list(parameters.items()))
    make_fake_states(optimizer)
    counts = []
    for parameter in parameters.values():
        values = optimizer.state[parameter].values()
        counts.append(
            sum(isinstance(v, torch.Tensor) and v.shape == parameter.shape for v in values)
        )
    return max(counts)


class DiskTier(StepHook):
    """Files with the optimizer states, gradients and parameters of one model.

    The tier is created before the model has its weights. `adopt` maps the model, and `drive` later
    takes over its optimizer.

    Args:
        arena: File for gradients and optimizer states, or None to leave them in memory.
        buffer_bytes: Size of a chunk of the step.
        buffer_count: Number of chunks that may be in memory.
        shards: File for the shards of parameters, or None to leave them in memory. It may be the
            same file as `arena`.
        pool_bytes: Bytes of shards that are in memory at once while the model computes.
    """

    def __init__(
        self,
        arena: Arena | None,
        *,
        buffer_bytes: int,
        buffer_count: int = 4,
        shards: Arena | None = None,
        pool_bytes: int = 0,
    ) -> None:
        self.arena = arena
        self.shards = shards
        self.pool_bytes = pool_bytes
        self.buffer_bytes = buffer_bytes
        self.buffer_count = buffer_count
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        """Mapped gradients."""
        self._buffers: list[torch.Tensor] = []
        """Mapped shards of parameters, padding included."""
        self._shard_reader: ShardPrefetcher | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="plait-disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="plait-disk-write")
        self._leaving: deque[tuple[Future[None], int]] = deque()
        """Gradients that are being written to the disk, with their sizes in bytes."""
        # Set by `drive`.
        self._optimizer: Optimizer
        self._inner_step: Callable[..., Any]
        """The optimizer's original `step`."""
        self._factor: torch.Tensor | float = 1.0
        """Factor of the gradients in the next step."""
        self._places: dict[tuple[nn.Parameter, str], torch.Tensor] = {}
        """Mapped states, keyed by parameter and name."""
        self._group_of: dict[nn.Parameter, int] = {}
        self._new: set[nn.Parameter] = set()
        """Parameters whose first step is running."""

    def adopt(
        self,
        model: nn.Module,
        *,
        states: int,
        units: Collection[str] = ("",),
        shards_of: Collection[str] = ("",),
    ) -> None:
        """Map the gradients and shards of a model, and reserve space for optimizer states.

        If the model is not sharded, its forward reads the parameters directly, so they stay in
        memory.

        Args:
            model: The model.
            states: Number of states per parameter that are shaped like it.
            units: Paths of the units whose gradients and states are in files. "" means the full
                model.
            shards_of: Paths of the units whose shards are in files.

        Raises:
            PlaitError: The disk is full. Nothing has changed.
        """
        paths = {module: path for path, module in model.named_modules()}
        moved = [
            unit
            for unit in sharded_modules(model)
            if isinstance(unit, nn.Module) and ("" in shards_of or paths[unit] in shards_of)
        ]
        offloaded: set[nn.Parameter] = set()
        for path in units if "" not in units else ("",):
            offloaded.update(model.get_submodule(path).parameters())
        trained = [p for p in model.parameters() if p.requires_grad and p in offloaded]

        # Both are reserved before anything is moved, so that an error changes nothing.
        if self.shards is not None:
            buffers = [buffer for unit in moved for buffer in shard_buffers(unit)]
            self.shards.reserve(sum(map(in_pages, buffers)))
        if self.arena is not None:
            per_state = sum(in_pages(local_tensor(p.detach())) for p in trained)
            self.arena.reserve((1 + states) * per_state)

        # The step takes slices of flattened parameters. Shards are contiguous already.
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        if self.shards is not None:
            for unit in moved:
                replace_shard_buffers(unit, self.shards.copy)
            self._buffers = [buffer for unit in moved for buffer in shard_buffers(unit)]
            self._shard_reader = ShardPrefetcher(
                self.shards, moved, pool_bytes=self.pool_bytes, reader=self._reader
            )
        if self.arena is not None:
            for parameter in trained:
                local = local_tensor(parameter.detach())
                self._gradients[parameter] = self.arena.empty(local.shape, local.dtype)
                parameter.register_post_accumulate_grad_hook(self._move_gradient)

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Arenas in use, without duplicates."""
        return tuple({arena: None for arena in (self.arena, self.shards) if arena is not None})

    def close(self) -> None:
        """End the threads and close the files.

        Mapped memory stays readable as long as a tensor of it exists.
        """
        for pool in (self._writer, self._reader):
            pool.shutdown()
        for arena in self.arenas:
            arena.close()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a plain tensor is mapped from one of the files."""
        return any(arena.holds(tensor) for arena in self.arenas)

    def fetch(self, tensor: torch.Tensor, *, write: bool) -> None:
        """Read a tensor from its file (see `Arena`). Does nothing for a tensor without a file."""
        for arena in self.arenas:
            if arena.holds(tensor):
                arena.fetch(tensor, write=write)

    def evict(self, tensor: torch.Tensor, *, written: bool = True) -> None:
        """Remove a tensor from memory (see `Arena`). Does nothing for a tensor without a file.

        Args:
            tensor: The tensor.
            written: Whether the tensor has changed since it was read.
        """
        for arena in self.arenas:
            arena.evict(tensor, written=written)

    def evict_parameter(self, parameter: torch.Tensor) -> None:
        """Evict a parameter whose values have been written."""
        self.evict(local_tensor(parameter.detach()))

    def evict_parameters(self) -> None:
        """Evict all parameters, after their values have been written."""
        for buffer in self._buffers:
            self.evict(buffer)
        if self.arenas:
            # Returns the memory that the parameters had before they were mapped.
            trim_heap()

    def end_of_computation(self) -> None:
        """Evict prefetched shards, because no parameters are gathered before the next forward."""
        if self._shard_reader is not None:
            self._shard_reader.end_step()

    def _move_gradient(self, parameter: torch.Tensor) -> None:
        """Move a complete gradient to its file."""
        assert (
            isinstance(parameter, nn.Parameter)
            and parameter.grad is not None
            and self.arena is not None
        )
        mapped = self._gradients[parameter]
        gradient = local_tensor(parameter.grad)
        if gradient.data_ptr() != mapped.data_ptr():
            mapped.copy_(gradient)
            parameter.grad = like_parameter(mapped, parameter)
        self._leaving.append((self._writer.submit(self.arena.evict, mapped), mapped.nbytes))
        # The backward is faster than the disk, so it waits for the oldest.
        while sum(size for _, size in self._leaving) > self.buffer_bytes:
            self._leaving.popleft()[0].result()

    def walk(
        self, tensors: Sequence[torch.Tensor], *, write: bool = False
    ) -> Iterator[list[torch.Tensor]]:
        """Yield plain tensors in order, in lists that fill about one buffer.

        Each list is fetched before it is yielded, and evicted afterwards.

        Args:
            tensors: The tensors.
            write: Whether the caller changes them.
        """
        chunks: list[list[torch.Tensor]] = []
        chunk_bytes = 0
        for tensor in tensors:
            if not chunks or chunk_bytes + tensor.nbytes > self.buffer_bytes:
                chunks.append([])
                chunk_bytes = 0
            chunks[-1].append(tensor)
            chunk_bytes += tensor.nbytes

        def uses_of(chunk: list[torch.Tensor]) -> list[_TensorUse]:
            return [_TensorUse(tensor, changes=write) for tensor in chunk]

        yield from self._pipelined(chunks, uses_of)

    def _pipelined(
        self, chunks: Sequence[T], uses_of: Callable[[T], list[_TensorUse]]
    ) -> Iterator[T]:
        """Yield each chunk in order when its tensors are in memory, and evict them afterwards.

        As many chunks are prefetched as fit into memory, so that reading overlaps with the
        computation. See Note [Streaming step].
        """

        def fetch(uses: list[_TensorUse]) -> None:
            for use in uses:
                self.fetch(use.tensor, write=use.changes)

        def evict(uses: list[_TensorUse]) -> None:
            for use in uses:
                self.evict(use.tensor, written=use.changes and use.is_read_again)

        self.end_of_computation()
        waiting = iter(chunks)
        arriving: deque[tuple[T, Future[None]]] = deque()
        leaving: deque[Future[None]] = deque()

        def read_ahead() -> None:
            # One of the buffers belongs to the chunk that is computed.
            while len(arriving) + len(leaving) < self.buffer_count - 1:
                chunk = next(waiting, None)
                if chunk is None:
                    return
                arriving.append((chunk, self._reader.submit(fetch, uses_of(chunk))))

        read_ahead()
        while arriving:
            chunk, arrived = arriving.popleft()
            arrived.result()
            while leaving and leaving[0].done():
                leaving.popleft().result()
            read_ahead()
            yield chunk
            leaving.append(self._writer.submit(evict, uses_of(chunk)))
            # Without a chunk that arrives, the loop would end before the last ones are read.
            while leaving and not arriving:
                leaving.popleft().result()
                read_ahead()
        for future in leaving:
            future.result()

    def drive(self, optimizer: Optimizer) -> None:
        """Replace `optimizer.step` with a step that streams files.

        Raises:
            ModelError: The optimizer needs all parameters at once.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ModelError(
                "optimizer.type = 'LBFGS' reads all parameters at once; use another, or"
                ' offload_optimizer.device = "none"'
            )
        self._optimizer = optimizer
        self._inner_step = optimizer.step

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> None:
            self.step(closure)

        # torch's schedules require `step` to be a method of the optimizer.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(lambda _: self._map_states())
        self._map_states()

    def scale_in_step(self, factor: torch.Tensor | float) -> None:
        """Multiply all gradients by a factor in the next step.

        A separate multiplication would need another pass over the files.

        Args:
            factor: A number, or a 0-dimensional tensor.
        """
        self._factor = factor

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step the optimizer over all parameters that have a gradient.

        See Note [Streaming step].

        Raises:
            ModelError: A closure is passed.
        """
        optimizer = self._optimizer
        if closure is not None:
            raise ModelError(
                "an optimizer whose states are on disk takes no closure; compute the gradients"
                " first, then call step()"
            )
        factor = self._factor
        self._factor = 1.0
        members = [list(group["params"]) for group in optimizer.param_groups]
        self._group_of = {p: index for index, parameters in enumerate(members) for p in parameters}
        updated = [p for p in self._group_of if p.grad is not None]
        self._new = {p for p in updated if not optimizer.state.get(p)}
        elementwise = is_elementwise(optimizer)
        scaled = isinstance(factor, torch.Tensor) or factor != 1.0
        # The inner step sees the parameters of one chunk at a time in the groups.
        try:
            for chunk in self._pipelined(
                self._chunks(updated, elementwise=elementwise),
                partial(self._uses_of, scaled=scaled),
            ):
                if scaled:
                    multiply_all([part.view_of(part.gradient) for part in chunk], factor)
                if elementwise:
                    self._step_slices(optimizer, chunk)
                else:
                    self._step_parameters(optimizer, chunk)
        finally:
            for group, parameters in zip(optimizer.param_groups, members, strict=True):
                group["params"] = parameters

    def _chunks(
        self, parameters: Sequence[nn.Parameter], *, elementwise: bool
    ) -> list[list[_ParameterSlice]]:
        """Divide parameters into chunks.

        The parameters, gradients and states of a chunk, as far as they are in files, together have
        about the size of a buffer.
        """
        chunks: list[list[_ParameterSlice]] = [[]]
        room_bytes = self.buffer_bytes
        for parameter in parameters:
            count = local_tensor(parameter.detach()).numel()
            element_bytes = parameter.element_size()
            if self.arena is not None:
                # The parameter, its gradient and its states. Before the first step there are no
                # states to count, and two are assumed.
                element_bytes *= 2 + max(2, len(self._large_states(parameter)))

            start = 0
            while start < count or start == 0:
                length = count
                if elementwise:
                    length = max(ALIGNED, room_bytes // element_bytes // ALIGNED * ALIGNED)
                end = min(count, start + length)
                chunks[-1].append(_ParameterSlice(parameter, start, end))
                room_bytes -= (end - start) * element_bytes
                # An empty parameter has one slice, too.
                start = max(end, 1)
                if room_bytes < ALIGNED * element_bytes:
                    chunks.append([])
                    room_bytes = self.buffer_bytes
        return [chunk for chunk in chunks if chunk]

    def _large_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the states that are shaped like the parameter."""
        states = self._optimizer.state.get(parameter, {})
        large: dict[str, torch.Tensor] = {}
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                large[name] = value
        return large

    def _uses_of(self, chunk: list[_ParameterSlice], *, scaled: bool) -> list[_TensorUse]:
        uses = []
        for part in chunk:
            uses.append(_TensorUse(part.view_of(part.parameter.detach())))
            states = self._large_states(part.parameter).values()
            uses += [_TensorUse(part.view_of(state)) for state in states]
            # The gradient ends with the step, so a scaled one need not reach the disk.
            uses.append(
                _TensorUse(part.view_of(part.gradient), changes=scaled, is_read_again=False)
            )
        return uses

    def _select(self, optimizer: Optimizer, members: Sequence[tuple[int, nn.Parameter]]) -> None:
        """Set the parameters of all groups. `members` are (group index, parameter) pairs."""
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [parameter for owner, parameter in members if owner == index]

    def _step_parameters(self, optimizer: Optimizer, chunk: list[_ParameterSlice]) -> None:
        """Step the full parameters of a chunk."""
        self._select(optimizer, [(self._group_of[p.parameter], p.parameter) for p in chunk])
        self._inner_step()
        for part in chunk:
            for name, value in self._large_states(part.parameter).items():
                optimizer.state[part.parameter][name] = self._mapped(part.parameter, name, value)

    def _step_slices(self, optimizer: Optimizer, chunk: list[_ParameterSlice]) -> None:
        """Step the optimizer on the slices as plain parameters, with slices of the states."""
        members = []
        for part in chunk:
            sliced = nn.Parameter(part.view_of(part.parameter.detach()))
            sliced.grad = part.view_of(part.gradient)
            if part.parameter not in self._new:
                large = self._large_states(part.parameter)
                optimizer.state[sliced] = {
                    name: part.view_of(value) if name in large else _copy(value)
                    for name, value in optimizer.state[part.parameter].items()
                }
            members.append((self._group_of[part.parameter], sliced))
        self._select(optimizer, members)
        self._inner_step()
        for part, (_, sliced) in zip(chunk, members, strict=True):
            self._store_states(optimizer, part, optimizer.state.pop(sliced, {}))

    def _store_states(
        self, optimizer: Optimizer, part: _ParameterSlice, sliced: dict[str, Any]
    ) -> None:
        """Store the states of a slice in the states of the full parameter."""
        parameter = part.parameter
        states = optimizer.state[part.parameter]
        count = local_tensor(parameter.detach()).numel()
        for name, value in sliced.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == (part.end - part.start,)
                and (value.ndim and name != "step")
            ):
                if name not in states:
                    states[name] = self._mapped(parameter, name, None)
                mapped = part.view_of(states[name])
                if mapped.data_ptr() != value.data_ptr():
                    mapped.copy_(value)
            # Step counts advance with the last slice: the others must read the old ones.
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
        """Return the mapped tensor of a state, filled with `value`.

        The tensor occupies the same memory for the life of the optimizer. If the parameter's states
        are not in files, the result is `value` itself, or an empty tensor.

        Args:
            parameter: The parameter.
            name: Name of the state.
            value: Value of the state, or None for an empty one.
            dtype: Dtype of an empty state. The default is the parameter's.
        """
        if self.arena is None or parameter not in self._gradients:
            if value is not None:
                return value
            local = local_tensor(parameter.detach())
            return like_parameter(torch.empty_like(local, dtype=dtype), parameter)

        local_value = None
        if value is not None:
            local_value = local_tensor(value.detach())
            if type(local_value) is not torch.Tensor:
                raise ModelError(
                    f"zero_optimization.offload_optimizer.device = 'nvme': `{name}` of the"
                    f" optimizer is a {type(local_value).__name__}, of which a file would"
                    " store only the values; use an optimizer whose states are plain tensors, or"
                    ' device "none"'
                )
            dtype = value.dtype

        mapped = self._places.get((parameter, name))
        if mapped is None:
            local = local_tensor(parameter.detach())
            mapped = self.arena.empty(local.shape, dtype or parameter.dtype)
            self._places[parameter, name] = mapped
        if local_value is not None and local_value.data_ptr() != mapped.data_ptr():
            mapped.copy_(local_value)
            self.arena.evict(mapped)
        return like_parameter(mapped, parameter)

    def place(self, parameter: nn.Parameter, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised state shaped like the parameter, to be filled from a checkpoint.

        Args:
            parameter: The parameter.
            name: Name of the state.
            dtype: Dtype of the state.
        """
        return self._mapped(parameter, name, None, dtype=dtype)

    def _map_states(self) -> None:
        """Move states that were created outside the step into memory-mapped files.

        Such states come from a loaded checkpoint, or from an optimizer that creates its states when
        it is built.
        """
        for parameter in list(self._optimizer.state):
            assert isinstance(parameter, nn.Parameter)
            for name, value in self._large_states(parameter).items():
                self._optimizer.state[parameter][name] = self._mapped(parameter, name, value)


@dataclass(frozen=True)
class _ParameterSlice:
    """Elements `start` to `end` of the flattened local shard of a parameter."""

    parameter: nn.Parameter
    start: int
    end: int

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient of the full parameter."""
        assert self.parameter.grad is not None
        return self.parameter.grad

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat view of the slice's elements in a tensor of the parameter's shape."""
        return local_tensor(tensor).view(-1)[self.start : self.end]


@dataclass(frozen=True)
class _TensorUse:
    """Mapped tensor, or slice of a mapped tensor, that must be in memory for a chunk.

    Attributes:
        tensor: The tensor.
        changes: Whether the tensor is written to.
        is_read_again: Whether the tensor is read again later, so that changes must be written to
            the disk.
    """

    tensor: torch.Tensor
    changes: bool = True
    is_read_again: bool = True


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True for a torch optimizer that updates each element independently."""
    return type(optimizer).__name__ in ELEMENTWISE and type(optimizer).__module__.startswith(
        "torch.optim"
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
