"""Which values of a model's forward follow from which parameters and blocks, found by running it
once without its weights.

Parameters and what follows from them are on `meta`: shapes without values. What follows from the
batch alone (token ids, masks, positions) is computed, so code that looks at such values takes its
true branch. Of every value is known since which block it can be computed and from which parameters
outside of the blocks, so for any cut it is known what each pipeline stage must own and whether a
value goes around the chain of blocks. Nothing of the model is changed: a copy runs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from plait._torch.operators import (
    TorchDispatchMode,
    refusing_triton_kernels,
    schema_of,
    tree_leaves,
    tree_map,
)
from plait._torch.storage import storage_id, version_of
from plait.errors import ModelError, PlaitError
from plait.model.outer_state import (
    Setting,
    SettingName,
    changed_settings,
    outer_buffers,
    outer_modules,
    outer_settings,
)
from plait.model.tied import tied_names
from plait.model.without_values import Shapes, run_without_values

COMPUTED = 2**20
"""Elements up to which what follows from the batch is computed. Larger values (long masks) are
known by shape only.
"""
_SMALL_BUFFER = 2**12
_ATTEMPTS = 24
_READS = frozenset({"tolist", "numpy"})


@dataclass(frozen=True)
class Origin:
    """What a value follows from."""

    since: float = inf
    """The lowest block whose inside it follows from; i for the input of block i. Such a value is
    known on stages that begin at or before `since`. inf: it follows from no block.
    """
    parameters: frozenset[tuple[str, int]] = frozenset()
    """Parameters used outside of the blocks that it follows from, other than through a block's
    output, each with the block before which it was used.
    """
    random: float = inf
    """Before which block random numbers went into it; inf: none did."""

    def __or__(self, other: Origin) -> Origin:
        if other is KNOWN or other == self:
            return self
        return Origin(
            min(self.since, other.since),
            self.parameters | other.parameters,
            min(self.random, other.random),
        )


KNOWN = Origin()
"""Of the batch, of buffers and of constants."""


@dataclass(frozen=True)
class Need:
    """That a value of `origin` is used where block `position` runs; a `decision` on every stage
    from there on, because the code outside of the blocks runs on all of them.
    """

    position: int
    origin: Origin
    what: str
    decision: bool = False


@dataclass
class Dataflow:
    """What one forward did."""

    blocks: tuple[str, ...]
    uses: dict[str, set[int]] = field(default_factory=dict)
    """Parameter to the blocks before which (or inside which) it is used; after the last block is
    `len(blocks)`.
    """
    inside: set[str] = field(default_factory=set)
    """Those of them that a block uses."""
    ran: dict[str, set[int]] = field(default_factory=dict)
    """Module to the blocks before which, or inside which, it ran."""
    needs: set[Need] = field(default_factory=set)
    writes: bool = False
    """A value of a parameter or a block is changed in place outside of the blocks."""
    values: bool = False
    """Code outside of the blocks takes numbers from values of the batch, so shapes need not follow
    from its shapes.
    """
    decides: bool = False
    """Code outside of the blocks asks the batch's values a yes or no."""
    order: list[int] = field(default_factory=list)
    """The blocks as they ran."""
    shapes: list[tuple[tuple[torch.Size, torch.dtype], ...]] = field(default_factory=list)
    """Of what each of them returned."""
    returned: Any = None
    """What the first of them returned, its tensors on meta."""
    settings: dict[SettingName, Setting] = field(default_factory=dict)
    """Plain attributes outside of the blocks that the forward sets before its last block ends."""
    late_settings: dict[SettingName, Setting] = field(default_factory=dict)
    """Plain attributes outside of the blocks that the forward sets after its last block."""
    late_buffers: set[str] = field(default_factory=set)
    """Buffers outside of the blocks that are read before or inside a block, and changed after the
    last one.
    """
    strangers: set[str] = field(default_factory=set)
    """Names of the tensors in `Trace.strangers` that were used."""


class Untraceable(ModelError):
    """The model's forward cannot be run without its weights."""


@dataclass
class Skeleton:
    """A copy of a model without its weights, to be traced on any batch."""

    model: nn.Module
    blocks: tuple[str, ...]
    names: dict[int, str]
    """Storage to the first name of the parameter."""
    shapes: Shapes = field(default_factory=Shapes)
    """What operators of earlier traces were found to return."""

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[str]) -> Skeleton:
        """Raises Untraceable where the model cannot be copied."""
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = _copied(tensor)
        try:
            made = copy.deepcopy(model, memo)
        except Exception as error:
            raise Untraceable(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error})"
            ) from error
        first = {name: group[0] for group in tied_names(made) for name in group}
        names = {
            _storage(p): first.get(name, name)
            for name, p in made.named_parameters(remove_duplicate=False)
        }
        return cls(made, tuple(blocks), names)

    def trace(
        self, run: Callable[[nn.Module, Trace], Any], *, training: bool, negate: bool = False
    ) -> Trace:
        """Run `run(copy, trace)` without weights; `negate` turns every yes or no that code outside
        of the blocks asks of a value into its opposite. Modules that cannot run so (kernels of
        other libraries) count as opaque: what they return has the shape of their first input and
        follows from all of their inputs and parameters.

        Raises Untraceable; a PlaitError that `run` raises goes through.
        """
        self.model.train(training)
        opaque: dict[type, int] = {}
        python = random.getstate()
        try:
            for _ in range(_ATTEMPTS):
                trace = Trace(self, opaque, negate)
                with (
                    torch.random.fork_rng(devices=[]),
                    torch.no_grad(),
                    trace.watched(),
                    refusing_triton_kernels(),
                    _Functions(trace),
                    trace,
                ):
                    try:
                        trace.state.begin()
                        run(self.model, trace)
                        trace.state.end(trace.flow)
                        return trace
                    except Exception as error:
                        if isinstance(error, PlaitError) and not isinstance(error, Untraceable):
                            raise
                        _blame(trace, opaque, error)
        finally:
            random.setstate(python)
        raise Untraceable("too many of its modules cannot run without their weights")


def _storage(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's memory, without an operator that a mode would see."""
    return storage_id(tensor.untyped_storage())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(
            torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad
        )
    if tensor.device.type != "meta" and tensor.numel() <= _SMALL_BUFFER:
        return tensor.detach().to("cpu", copy=True)
    return torch.empty_like(tensor, device="meta")


def _blame(trace: Trace, opaque: dict[type, int], error: Exception) -> None:
    """Count the innermost module that failed as opaque; where that was tried, the one around it."""
    for kind in reversed(trace.failed[1:]):  # the first is the model itself
        if opaque.get(kind, -1) < len(_SHAPES) - 1:
            opaque[kind] = opaque.get(kind, -1) + 1
            return
    raise Untraceable(f"{type(error).__name__}: {error}") from error


_SHAPES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda out: out,
    lambda out: (out,),
    lambda out: (out, None),
)
"""What an opaque module may return."""


class Trace(TorchDispatchMode):
    """One run of a `Skeleton`."""

    def __init__(self, skeleton: Skeleton, opaque: dict[type, int], negate: bool) -> None:
        super().__init__()
        self._negate = negate
        self.skeleton, self.flow = skeleton, Dataflow(skeleton.blocks)
        self.failed: list[type] = []
        """Classes of the modules that were running when something failed, outermost first."""
        self._opaque = opaque
        self._inside: int | None = None
        self._region = 0
        self._origins: dict[int, Origin] = {}
        self._without_value: set[int] = set()
        self._alive: list[torch.Tensor] = []
        self._running: list[type] = []
        self.state = _OuterState(skeleton)
        self.strangers: dict[int, str] = {}
        """Storage to name of tensors outside of the copy whose use is noted."""

    def origin(self, tensor: torch.Tensor) -> Origin:
        """What a value follows from."""
        key = _storage(tensor)
        if key in self.skeleton.names:
            return Origin(parameters=frozenset({(self.skeleton.names[key], self._region)}))
        return self._origins.get(key, KNOWN)

    def need(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """`tensors` are used after the last block."""
        for tensor in tensors:
            if (origin := self.origin(tensor)) != KNOWN:
                self.flow.needs.add(Need(len(self.skeleton.blocks) - 1, origin, what))

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Whether it is computed, not only its shape known."""
        return tensor.device.type != "meta" and _storage(tensor) not in self._without_value

    def watched(self) -> _Watched:
        """Watch the modules of the skeleton."""
        return _Watched(self)

    def call(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a module."""
        kind = type(module)
        self.flow.ran.setdefault(name, set()).add(
            self._region if self._inside is None else self._inside
        )
        self._running.append(kind)
        try:
            return (
                self._stand_for(module, args, kwargs)
                if kind in self._opaque
                else forward(*args, **kwargs)
            )
        except Exception:
            if not self.failed:
                self.failed = list(self._running)
            raise
        finally:
            self._running.pop()

    def block(
        self, index: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a block; what it returns is an origin of its own."""
        self.flow.order.append(index)
        before = self._inside
        self._inside = index
        try:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._use(leaf)
            output = self.call(self.skeleton.blocks[index], module, forward, args, kwargs)
        finally:
            self._inside = before
        self._region = index + 1
        self.state.after_block()
        if not self.flow.shapes:
            self.flow.returned = tree_map(
                lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, output
            )
        self.flow.shapes.append(
            tuple(
                (leaf.shape, leaf.dtype)
                for leaf in tree_leaves(output)
                if isinstance(leaf, torch.Tensor)
            )
        )
        return tree_map(
            lambda leaf: self._fresh(leaf, index + 1) if isinstance(leaf, torch.Tensor) else leaf,
            output,
        )

    def _fresh(self, leaf: torch.Tensor, since: int) -> torch.Tensor:
        made = leaf.clone() if self.has_value(leaf) else torch.empty_like(leaf, device="meta")
        self._origins[_storage(made)] = Origin(since)
        self._alive.append(made)
        return made

    def _stand_for(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = next((leaf for leaf in tensors if leaf.is_floating_point()), None)
        if first is None:
            raise Untraceable(f"{type(module).__name__} takes no tensor")
        origin = KNOWN
        for leaf in (*tensors, *module.parameters()):
            origin |= self._use(leaf)
        made = torch.empty(first.shape, dtype=first.dtype, device="meta")
        self._origins[_storage(made)] = origin if self._inside is None else Origin(self._inside)
        self._alive.append(made)
        return _SHAPES[self._opaque[type(module)]](made)

    def _use(self, tensor: torch.Tensor) -> Origin:
        """Note that `tensor` is used here, and return its origin."""
        key = _storage(tensor)
        if key in self.strangers:
            self.flow.strangers.add(self.strangers[key])
        if self._inside is not None or self._region < len(self.skeleton.blocks):
            self.state.read(key)
        name = self.skeleton.names.get(key)
        if name is not None:
            self.flow.uses.setdefault(name, set()).add(
                self._region if self._inside is None else self._inside
            )
            if self._inside is None:
                return Origin(parameters=frozenset({(name, self._region)}))
            self.flow.inside.add(name)
            return Origin(self._inside)
        origin = self._origins.get(key, KNOWN)
        if self._inside is not None and (origin.parameters or origin.since < self._inside):
            self.flow.needs.add(Need(self._inside, origin, self.skeleton.blocks[self._inside]))
        return origin

    def read(self, tensor: torch.Tensor, *, shapes: bool) -> None:
        """The model's code looks at a value. `shapes`: at more than a yes or no."""
        origin = self._use(tensor)
        if self._inside is None:
            self.flow.values |= shapes
            self.flow.decides |= not shapes
            if origin.since < inf or origin.parameters:
                position = min(self._region, len(self.skeleton.blocks) - 1)
                self.flow.needs.add(Need(position, origin, "a decision", decision=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origin = KNOWN
        for tensor in tensors:
            origin |= self._use(tensor)
        if torch.Tag.nondeterministic_seeded in func.tags:
            origin |= Origin(random=self._region)
        if self._inside is not None and origin != KNOWN:
            origin = Origin(self._inside)
        known = all(self.has_value(tensor) for tensor in tensors)
        result, read = run_without_values(
            func,
            args,
            kwargs,
            known=known,
            limit=COMPUTED,
            has_value=self.has_value,
            shapes=self.skeleton.shapes,
        )
        if read is not None:
            self.read(tensors[0], shapes=read)
            if self._negate and isinstance(result, bool) and self._inside is None:
                result = not result
        for tensor in _written(func, args, kwargs) if schema_of(func).is_mutable else ():
            key = _storage(tensor)
            if self._inside is None and self._origins.get(key, KNOWN) != KNOWN:
                self.flow.writes = True
            self._origins[key] = self._origins.get(key, KNOWN) | origin
            if not known:
                self._without_value.add(key)
        before = {_storage(tensor) for tensor in tensors}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                key = _storage(leaf)
                if key not in before and key not in self.skeleton.names:
                    self._origins[key] = origin
                self._alive.append(leaf)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


class _Functions(TorchFunctionMode):
    """Sees what passes no operator."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and args and isinstance(args[0], torch.Tensor):
            self.trace.read(args[0], shapes=True)
            if not self.trace.has_value(args[0]):
                return getattr(torch.zeros(args[0].shape, dtype=args[0].dtype), func.__name__)()
        return func(*args, **(kwargs or {}))


class _OuterState:
    """Plain attributes and buffers of a skeleton outside of its blocks, at three moments of a
    forward.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._modules = outer_modules(skeleton.model, skeleton.blocks)
        self._storages: dict[int, str] = {}
        self._read: set[str] = set()

    def begin(self) -> None:
        """Record the state before the forward."""
        self._settings = self._settings_after_block = outer_settings(self._modules)
        self._buffers = self._buffers_now()
        self._storages = {
            _storage(buffer): name for name, buffer in outer_buffers(self._modules).items()
        }

    def after_block(self) -> None:
        """Record the state after a block."""
        self._settings_after_block = outer_settings(self._modules)
        self._buffers = self._buffers_now()

    def read(self, storage: int) -> None:
        """Record that a tensor is used before or inside a block."""
        if storage in self._storages:
            self._read.add(self._storages[storage])

    def end(self, flow: Dataflow) -> None:
        """Write to `flow` what the forward has changed."""
        flow.settings = changed_settings(self._settings, self._settings_after_block)
        flow.late_settings = changed_settings(
            self._settings_after_block, outer_settings(self._modules)
        )
        buffers = self._buffers_now()
        flow.late_buffers = {
            name for name in self._read if self._buffers.get(name) != buffers.get(name)
        }

    def _buffers_now(self) -> dict[str, tuple[int, int]]:
        # An assignment makes another object, an operation in place another version.
        return {
            name: (id(buffer), version_of(buffer))
            for name, buffer in outer_buffers(self._modules).items()
        }


class _Watched:
    """Sets a `forward` on every module of the skeleton that tells the trace, and takes it off
    again.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.before: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> None:
        skeleton = self.trace.skeleton
        blocks = {name: index for index, name in enumerate(skeleton.blocks)}
        for name, module in skeleton.model.named_modules():
            self.before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = self._telling(
                name, module, module.forward, blocks.get(name)
            )

    def _telling(
        self, name: str, module: nn.Module, forward: Callable[..., Any], block: int | None
    ) -> Callable[..., Any]:
        if block is None:
            return lambda *args, **kwargs: self.trace.call(name, module, forward, args, kwargs)
        return lambda *args, **kwargs: self.trace.block(block, module, forward, args, kwargs)

    def __exit__(self, *_: object) -> None:
        for module, forward in self.before:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
