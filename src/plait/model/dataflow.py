"""Dataflow of a model's forward between parameters, blocks and outputs.

Note [Tracing without weights]
    A copy of the model runs once. Its parameters, and every value that follows from them, are on
    the meta device: they have a shape and no value. Values that follow only from the batch (token
    ids, masks, positions) are computed, so code that branches on such values takes its real branch.

    For every value, the trace records a `ValueOrigin`: the last block that a stage can begin with
    and still compute the value, and the parameters outside the blocks on which the value depends.
    For any split into pipeline stages, this determines which parameters a stage must own, and
    whether a value bypasses the chain of blocks. The model itself is not changed.

Note [Opaque modules]
    Some modules cannot run without values, e.g. because they call kernels of another library. When
    a trace fails, the class of the innermost failed module is marked as opaque and the trace starts
    again. An opaque module does not run. Its output has the shape of its first floating-point
    input and depends on all of its inputs and parameters.

A script or a forward may change plain attributes and buffers outside the blocks
(`outer_settings`, `outer_buffers`). The stages of a pipeline are found by running a copy of the
model. Everything that the model's code reads besides its inputs must therefore be the same in the
copy, and on every stage.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from plait._torch.modules import direct_attributes, direct_buffers
from plait._torch.operators import (
    TorchDispatchMode,
    refusing_triton_kernels,
    schema_of,
    tree_map,
)
from plait._torch.tensors import memory_key, version_of
from plait.errors import ModelError, PlaitError
from plait.model.layers import first_names
from plait.model.without_values import Shapes, run_without_values, tensors_of

Setting = bool | int | float | str | None
SettingName = tuple[str, str]
"""Name of a module and of its attribute: `("", "skip_blocks")` or `("", "config.layerdrop")`."""

MAX_COMPUTED_ELEMENTS = 2**20
"""Largest number of elements of a value that is computed from the batch.

Only the shape of larger values (long masks) is known.
"""
_MAX_COPIED_ELEMENTS = 2**12
"""Largest number of elements of a buffer that a skeleton copies with its values."""
_MAX_ATTEMPTS = 24
"""Number of traces, each with one more opaque module, before a model counts as untraceable."""
_READS_WITHOUT_OPERATOR = frozenset({"tolist", "numpy"})


@dataclass(frozen=True)
class ValueOrigin:
    """Blocks, parameters and random numbers that a value depends on."""

    since: float = inf
    """Last block with which a stage can begin and still have the value.

    The input of block i has i. A value that depends on no block has infinity.
    """
    parameters: frozenset[tuple[str, int]] = frozenset()
    """Parameters used outside the blocks, each with the block before which it was used.

    Dependencies through the output of a block do not count.
    """
    random: float = inf
    """Block before which random numbers went into the value; infinite if none did."""

    def __or__(self, other: ValueOrigin) -> ValueOrigin:
        # Fast path: every operator of a trace combines the origins of its arguments.
        if other is INDEPENDENT or other == self:
            return self
        return ValueOrigin(
            min(self.since, other.since),
            self.parameters | other.parameters,
            min(self.random, other.random),
        )


INDEPENDENT = ValueOrigin()
"""Origin of values that depend only on the batch, on buffers and on constants."""


@dataclass(frozen=True)
class Need:
    """Use of a value with the origin `origin` while block `position` runs.

    If `decision` is set, the value decides between branches of code outside the blocks. This code
    runs on all stages, so the value is needed on every stage from that block on.
    """

    position: int
    origin: ValueOrigin
    what: str
    decision: bool = False


@dataclass
class Dataflow:
    """Record of what a traced forward used, ran and changed. See Note [Tracing without weights]."""

    blocks: tuple[str, ...]
    uses: dict[str, set[int]] = field(default_factory=dict)
    """Blocks before which, or inside which, each parameter is used.

    A use after the last block is recorded as `len(blocks)`.
    """
    inside: set[str] = field(default_factory=set)
    """Parameters that are used inside a block."""
    ran: dict[str, set[int]] = field(default_factory=dict)
    """Blocks before which, or inside which, each module ran."""
    needs: set[Need] = field(default_factory=set)
    writes: bool = False
    """True if a value of a parameter or block is changed in place outside the blocks."""
    values: bool = False
    """True if code outside the blocks reads numbers from the batch.

    Shapes may then depend on more than the shapes of the batch.
    """
    decides: bool = False
    """True if code outside the blocks branches on a Boolean value of the batch."""
    order: list[int] = field(default_factory=list)
    """Indices of the blocks in the order in which they ran."""
    shapes: list[tuple[tuple[torch.Size, torch.dtype], ...]] = field(default_factory=list)
    """Shapes and dtypes of each block's output tensors, in the order of `order`."""
    returned: Any = None
    """Output of the block that ran first, with its tensors on the meta device."""
    settings: dict[SettingName, Setting] = field(default_factory=dict)
    """Plain attributes outside the blocks that the forward sets before its last block ends."""
    late_settings: dict[SettingName, Setting] = field(default_factory=dict)
    """Plain attributes outside the blocks that the forward sets after its last block."""
    late_buffers: set[str] = field(default_factory=set)
    """Buffers outside the blocks that blocks read, and that change after the last block.

    A read before a block counts as a read by it.
    """
    foreign_tensors: set[str] = field(default_factory=set)
    """Names of the tensors in `ForwardTrace.foreign_tensors` that were used."""


class Untraceable(ModelError):
    """Raised if the forward of a model cannot run without its weights."""


@dataclass
class Skeleton:
    """Copy of a model without its weights, which can be traced on any batch."""

    model: nn.Module
    blocks: tuple[str, ...]
    names: dict[int, str]
    """First name of each parameter, keyed by its storage."""
    shapes: Shapes = field(default_factory=Shapes)
    """Cache of the results of operators, shared by all traces."""

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[str]) -> Skeleton:
        """Create the skeleton of a model: a copy without its weights.

        Args:
            model: The model, on any device.
            blocks: Names of its repeated blocks.

        Raises:
            Untraceable: The model cannot be copied.
        """
        # `deepcopy` takes the copies of tensors from the memo.
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = _copy_without_values(tensor)
        try:
            skeleton = copy.deepcopy(model, memo)
        except Exception as error:
            raise Untraceable(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error})"
            ) from error

        tied = first_names(skeleton)
        names = {}
        for name, parameter in skeleton.named_parameters(remove_duplicate=False):
            names[memory_key(parameter)] = tied.get(name, name)
        return cls(skeleton, tuple(blocks), names)

    def trace(
        self, run: Callable[[nn.Module, ForwardTrace], Any], *, training: bool, negate: bool = False
    ) -> ForwardTrace:
        """Run the copy without weights and record its dataflow. See Note [Tracing without weights].

        Args:
            run: Function that is called as `run(copy, trace)`. It runs again after a failure, see
                Note [Opaque modules].
            training: Whether the copy runs in training mode.
            negate: Whether to invert every Boolean that code outside the blocks reads from a
                tensor. A second trace with inverted decisions shows which shapes depend on them.

        Raises:
            Untraceable: The model cannot run without its weights.
            PlaitError: Any other error of Plait that `run` raises.
        """
        self.model.train(training)
        opaque: dict[type, int] = {}
        python_state = random.getstate()
        try:
            for _ in range(_MAX_ATTEMPTS):
                trace = ForwardTrace(self, opaque, negate)
                with (
                    torch.random.fork_rng(devices=[]),
                    torch.no_grad(),
                    trace.watched(),
                    refusing_triton_kernels(),
                    _ValueReads(trace),
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
                        _mark_opaque(trace, opaque, error)
        finally:
            random.setstate(python_state)
        raise Untraceable(
            f"after {_MAX_ATTEMPTS} attempts, some modules still fail on the meta device"
        )


def _copy_without_values(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(
            torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad
        )
    # Small buffers (rotary frequencies, position ids) keep their values, because code may branch
    # on them.
    if tensor.device.type != "meta" and tensor.numel() <= _MAX_COPIED_ELEMENTS:
        return tensor.detach().to("cpu", copy=True)
    return torch.empty_like(tensor, device="meta")


def _mark_opaque(trace: ForwardTrace, opaque: dict[type, int], error: Exception) -> None:
    """Mark the innermost failed module as opaque, or try the next form of its output.

    If all forms of output have been tried, the module around it is marked.

    Raises:
        Untraceable: No module is left.
    """
    for module_class in reversed(trace.failed[1:]):  # the first is the model itself
        if opaque.get(module_class, -1) < len(_OPAQUE_OUTPUTS) - 1:
            opaque[module_class] = opaque.get(module_class, -1) + 1
            return
    raise Untraceable(f"{type(error).__name__}: {error}") from error


_OPAQUE_OUTPUTS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda out: out,
    lambda out: (out,),
    lambda out: (out, None),
)
"""Forms of output that are tried for an opaque module."""


class ForwardTrace(TorchDispatchMode):
    """Single run of a `Skeleton`: a dispatch mode that observes every operator."""

    def __init__(self, skeleton: Skeleton, opaque: dict[type, int], negate: bool) -> None:
        super().__init__()
        self._negate = negate
        self.skeleton = skeleton
        self.flow = Dataflow(skeleton.blocks)
        self.failed: list[type] = []
        """Classes of the modules that were running when an error was raised, outermost first."""
        self._opaque = opaque
        self._inside: int | None = None
        """Index of the block that is running, or None outside the blocks."""
        self._region = 0
        """Index of the block before which code outside the blocks is running."""
        self._origins: dict[int, ValueOrigin] = {}
        self._without_value: set[int] = set()
        # Origins are keyed by storage. Live tensors keep a storage from being reused as a key.
        self._alive: list[torch.Tensor] = []
        self._running: list[type] = []
        self.state = _OuterState(skeleton)
        self.foreign_tensors: dict[int, str] = {}
        """Names of tensors outside the copy whose use is recorded, keyed by storage."""

    def origin(self, tensor: torch.Tensor) -> ValueOrigin:
        """Return what the value of a tensor depends on. See `ValueOrigin`."""
        key = memory_key(tensor)
        if key in self.skeleton.names:
            return ValueOrigin(parameters=frozenset({(self.skeleton.names[key], self._region)}))
        return self._origins.get(key, INDEPENDENT)

    def need(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Record that tensors are used after the last block.

        Args:
            tensors: The tensors.
            what: Name of the code that uses them, for error messages.
        """
        for tensor in tensors:
            origin = self.origin(tensor)
            if origin != INDEPENDENT:
                self.flow.needs.add(Need(len(self.skeleton.blocks) - 1, origin, what))

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is computed, False if only its shape is known."""
        return tensor.device.type != "meta" and memory_key(tensor) not in self._without_value

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make every module of the skeleton report its calls to this trace, inside the context.

        An attribute `forward` is set on the modules, and removed or restored at the end. Hooks are
        not used, because they cannot replace the computation of an opaque module.
        """
        blocks = {name: index for index, name in enumerate(self.skeleton.blocks)}
        replaced: list[tuple[dict[str, Any], Any]] = []
        for name, module in self.skeleton.model.named_modules():
            attributes = module.__dict__
            replaced.append((attributes, attributes.get("forward")))
            attributes["forward"] = self._reporting_forward(name, module, blocks.get(name))
        try:
            yield
        finally:
            for attributes, forward in replaced:
                if forward is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward

    def _reporting_forward(
        self, name: str, module: nn.Module, block: int | None
    ) -> Callable[..., Any]:
        forward = module.forward
        if block is None:
            return lambda *args, **kwargs: self.call(name, module, forward, args, kwargs)
        return lambda *args, **kwargs: self.block(block, module, forward, args, kwargs)

    def call(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a module, or replace it if it is opaque."""
        module_class = type(module)
        self.flow.ran.setdefault(name, set()).add(self._position())
        self._running.append(module_class)
        try:
            if module_class in self._opaque:
                return self._replace_opaque(module, args, kwargs)
            return forward(*args, **kwargs)
        except Exception:
            # The innermost module sees the error first.
            if not self.failed:
                self.failed = list(self._running)
            raise
        finally:
            self._running.pop()

    def block(
        self, index: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a block. Values that depend on its output originate in this block."""
        self.flow.order.append(index)
        outer = self._inside
        self._inside = index
        try:
            for tensor in tensors_of((args, kwargs)):
                self._use(tensor)
            output = self.call(self.skeleton.blocks[index], module, forward, args, kwargs)
        finally:
            self._inside = outer

        self._region = index + 1
        self.state.after_block()
        if not self.flow.shapes:
            self.flow.returned = tree_map(
                lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, output
            )
        self.flow.shapes.append(tuple((leaf.shape, leaf.dtype) for leaf in tensors_of(output)))
        return tree_map(lambda leaf: self._block_output(leaf, index + 1), output)

    def _position(self) -> int:
        return self._region if self._inside is None else self._inside

    def _block_output(self, leaf: Any, since: int) -> Any:
        """Copy a tensor that a block returns, because origins are recorded per storage."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        output = leaf.clone() if self.has_value(leaf) else torch.empty_like(leaf, device="meta")
        self._origins[memory_key(output)] = ValueOrigin(since)
        self._alive.append(output)
        return output

    def _replace_opaque(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return an output for a module that does not run. See Note [Opaque modules]."""
        tensors = tensors_of((args, kwargs))
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if first is None:
            raise Untraceable(
                f"{type(module).__name__} fails on the meta device, and takes no floating-point"
                " tensor"
            )

        origin = INDEPENDENT
        for tensor in (*tensors, *module.parameters()):
            origin |= self._use(tensor)
        if self._inside is not None:
            origin = ValueOrigin(self._inside)

        output = torch.empty(first.shape, dtype=first.dtype, device="meta")
        self._origins[memory_key(output)] = origin
        self._alive.append(output)
        return _OPAQUE_OUTPUTS[self._opaque[type(module)]](output)

    def _use(self, tensor: torch.Tensor) -> ValueOrigin:
        """Record that a tensor is used at the current position, and return its origin."""
        key = memory_key(tensor)
        if key in self.foreign_tensors:
            self.flow.foreign_tensors.add(self.foreign_tensors[key])
        if self._inside is not None or self._region < len(self.skeleton.blocks):
            self.state.read(key)

        name = self.skeleton.names.get(key)
        if name is not None:
            self.flow.uses.setdefault(name, set()).add(self._position())
            if self._inside is None:
                return ValueOrigin(parameters=frozenset({(name, self._region)}))
            self.flow.inside.add(name)
            return ValueOrigin(self._inside)

        origin = self._origins.get(key, INDEPENDENT)
        if self._inside is not None and (origin.parameters or origin.since < self._inside):
            self.flow.needs.add(Need(self._inside, origin, self.skeleton.blocks[self._inside]))
        return origin

    def read(self, tensor: torch.Tensor, *, shapes: bool) -> None:
        """Record that the model's Python code reads the value of a tensor.

        Args:
            tensor: The tensor.
            shapes: Whether shapes can depend on the value. False for a Boolean, which only decides
                between branches.
        """
        origin = self._use(tensor)
        if self._inside is not None:
            return
        if shapes:
            self.flow.values = True
        else:
            self.flow.decides = True
        if origin.since < inf or origin.parameters:
            position = min(self._region, len(self.skeleton.blocks) - 1)
            self.flow.needs.add(Need(position, origin, "a decision", decision=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_of((args, kwargs))
        origin = self._origin_of_result(func, tensors)

        known = all(self.has_value(tensor) for tensor in tensors)
        result, read = run_without_values(
            func,
            args,
            kwargs,
            known=known,
            limit=MAX_COMPUTED_ELEMENTS,
            has_value=self.has_value,
            shapes=self.skeleton.shapes,
        )
        if read is not None:
            self.read(tensors[0], shapes=read)
            if self._negate and isinstance(result, bool) and self._inside is None:
                result = not result

        if schema_of(func).is_mutable:
            for tensor in _mutated_tensors(func, args, kwargs):
                self._record_write(tensor, origin, known=known)

        # Views share the storage of an input and keep its origin.
        input_keys = {memory_key(tensor) for tensor in tensors}
        for tensor in tensors_of(result):
            key = memory_key(tensor)
            if key not in input_keys and key not in self.skeleton.names:
                self._origins[key] = origin
            self._alive.append(tensor)
        return result

    def _origin_of_result(self, func: Any, tensors: Sequence[torch.Tensor]) -> ValueOrigin:
        origin = INDEPENDENT
        for tensor in tensors:
            origin |= self._use(tensor)
        if torch.Tag.nondeterministic_seeded in func.tags:
            origin |= ValueOrigin(random=self._region)
        if self._inside is not None and origin != INDEPENDENT:
            return ValueOrigin(self._inside)
        return origin

    def _record_write(self, tensor: torch.Tensor, origin: ValueOrigin, *, known: bool) -> None:
        key = memory_key(tensor)
        before = self._origins.get(key, INDEPENDENT)
        if self._inside is None and before != INDEPENDENT:
            self.flow.writes = True
        self._origins[key] = before | origin
        if not known:
            self._without_value.add(key)


def _mutated_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors += tensors_of(value)
    return tensors


class _ValueReads(TorchFunctionMode):
    """Function mode that observes those reads of tensor values that call no operator."""

    def __init__(self, trace: ForwardTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_WITHOUT_OPERATOR and args and isinstance(args[0], torch.Tensor):
            self.trace.read(args[0], shapes=True)
            if not self.trace.has_value(args[0]):
                return getattr(torch.zeros(args[0].shape, dtype=args[0].dtype), name)()
        return func(*args, **(kwargs or {}))


class _OuterState:
    """Plain attributes and buffers of a skeleton outside its blocks.

    They are compared at three points of a forward: at its start, after the last block, and at its
    end.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._modules = outer_modules(skeleton.model, skeleton.blocks)
        self._storages: dict[int, str] = {}
        self._read: set[str] = set()

    def begin(self) -> None:
        """Record plain attributes and buffers before the forward."""
        self._settings = outer_settings(self._modules)
        self._settings_after_block = self._settings
        self._buffers = self._buffer_versions()
        for name, buffer in outer_buffers(self._modules).items():
            self._storages[memory_key(buffer)] = name

    def after_block(self) -> None:
        """Record plain attributes and buffers after a block."""
        self._settings_after_block = outer_settings(self._modules)
        self._buffers = self._buffer_versions()

    def read(self, storage: int) -> None:
        """Record that the tensor with this storage is used before or inside a block."""
        if storage in self._storages:
            self._read.add(self._storages[storage])

    def end(self, flow: Dataflow) -> None:
        """Record in `flow` the settings and buffers that the forward has changed."""
        flow.settings = changed_settings(self._settings, self._settings_after_block)
        flow.late_settings = changed_settings(
            self._settings_after_block, outer_settings(self._modules)
        )
        buffers = self._buffer_versions()
        flow.late_buffers = {
            name for name in self._read if self._buffers.get(name) != buffers.get(name)
        }

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        # An assignment creates another object, an operation in place another version.
        return {
            name: (id(buffer), version_of(buffer))
            for name, buffer in outer_buffers(self._modules).items()
        }


def outer_modules(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return (name, module) for every module of a model outside its blocks."""
    prefixes = tuple(f"{block}." for block in blocks)
    outer: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not f"{name}.".startswith(prefixes):
            outer.append((name, module))
    return outer


def outer_settings(modules: Sequence[tuple[str, nn.Module]]) -> dict[SettingName, Setting]:
    """Return numbers, flags and strings that are attributes of modules, or of their `config`."""
    settings: dict[SettingName, Setting] = {}
    for name, module in modules:
        for attribute, value in direct_attributes(module).items():
            if _is_setting(value):
                settings[name, attribute] = value
            elif attribute == "config":
                for key, entry in getattr(value, "__dict__", {}).items():
                    if _is_setting(entry):
                        settings[name, f"config.{key}"] = entry
    return settings


def _is_setting(value: object) -> TypeGuard[Setting]:
    return value is None or isinstance(value, bool | int | float | str)


def changed_settings(
    before: Mapping[SettingName, Setting], after: Mapping[SettingName, Setting]
) -> dict[SettingName, Setting]:
    """Return the settings of `after` that are new or differ from `before`."""
    changed: dict[SettingName, Setting] = {}
    for name, value in after.items():
        if name not in before or not _equal(before[name], value):
            changed[name] = value
    return changed


def set_settings(model: nn.Module, settings: Mapping[SettingName, Setting]) -> None:
    """Assign settings to a model with the same module names."""
    for (name, attribute), value in settings.items():
        owner: Any = model.get_submodule(name)
        *path, leaf = attribute.split(".")
        for key in path:
            owner = getattr(owner, key)
        setattr(owner, leaf, value)


def setting_text(name: SettingName) -> str:
    """Return a setting's name in user code, e.g. `model.encoder.skip_blocks`."""
    return ".".join(part for part in ("model", *name) if part)


def outer_buffers(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """Return the buffers of modules by their full names."""
    buffers = {}
    for name, module in modules:
        for leaf, buffer in direct_buffers(module).items():
            if buffer is not None:
                buffers[f"{name}.{leaf}".removeprefix(".")] = buffer
    return buffers


def _equal(first: Setting, second: Setting) -> bool:
    # NaN is the same setting, although it differs from itself.
    if first != first and second != second:
        return True
    return first == second and type(first) is type(second)
