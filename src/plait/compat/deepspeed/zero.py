"""`deepspeed.zero`: model construction on the meta device, and temporarily gathered parameters.

A model is built on `meta`, where tensors have no memory. Its weights are drawn later by the classes
of its modules (`parallel.materialise`). A value that a constructor writes to a parameter, such as
the scaled initial weights of a GPT's output layers, has no effect on `meta` and would be lost
silently. Such writes are therefore recorded while the model is built, and `initialize` refuses a
model with recorded writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from plait._torch.modules import direct_parameters
from plait._torch.operators import tree_map
from plait._torch.tensors import local_tensor, local_window, storage_key, version_of
from plait.compat.deepspeed.engine import DeepSpeedEngine, find_parameter
from plait.compat.deepspeed.refused import refuse_arguments
from plait.compat.deepspeed.saved import full_tensor, refuse_in_step, write_full
from plait.errors import InputError

_INITIALISERS = ("reset_parameters", "_reset_parameters", "_init_weights")
"""Methods that are called again when the weights are drawn."""
_NOT_WRITING = ("requires_grad_", "detach_", "rename_", "share_memory_")
"""Methods that end in an underscore and do not change values."""
_WRITING_OPERATORS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")

_WRITES: dict[int, tuple[torch.Tensor, str]] = {}
"""Last write by storage: the tensor and a description. The tensor keeps the storage's address."""


class RecordedWrites(TorchFunctionMode):
    """TorchFunctionMode that records writes to meta tensors, except those of initialisers."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        name = str(getattr(func, "__name__", ""))
        sets_data = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
        if not (_writes_in_place(name) or sets_data):
            return result
        # nn.init's functions name their argument `tensor`, torch's functions name it `input`.
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if not isinstance(target, torch.Tensor) or not target.is_meta:
            return result
        writer = _find_writer(sys._getframe(1))
        if writer is not None:
            operation = "data" if name == "__set__" else name
            _WRITES[storage_key(target)] = (target, f"{operation} in {writer}")
        return result


def _writes_in_place(name: str) -> bool:
    """Return True if a torch function of this name writes to its first argument."""
    if name in _WRITING_OPERATORS:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITING


def _find_writer(frame: FrameType | None) -> str | None:
    """Return the innermost function outside torch and Plait, with its file and line.

    Returns:
        None if the write is part of an initialiser, because initialisers are called again.
    """
    writer: str | None = None
    # All callers are searched, because an initialiser may write in a helper function.
    while frame is not None:
        code = frame.f_code
        if code.co_name in _INITIALISERS:
            return None
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if writer is None and package not in ("torch", "plait"):
            writer = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return writer


def refuse_lost_writes(model: nn.Module) -> None:
    """Refuse a model on `meta` whose constructor wrote to a parameter.

    Raises:
        InputError: The write would not be repeated when the weights are drawn.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        write = _WRITES.pop(storage_key(parameter), None)
        if write is not None:
            raise InputError(
                f"{name} is set by {write[1]}, and a model built under zero.Init() has no memory"
                " to write to: its weights are drawn in initialize by its classes'"
                " reset_parameters, or by the model's _init_weights(self, module); set it in one"
                " of those, or build the model without zero.Init() (enabled=False)"
            )


_META_CONTEXT = "`from_pretrained` with a meta device"
"""Part of Transformers' message for `from_pretrained` under `torch.device("meta")`."""
_LAYOUT = (
    "the configuration that is passed to initialize determines how and where parameters are sharded"
)
_INIT_REMEDIES = {
    "module": "initialize also shards a model that was built before",
    "data_parallel_group": _LAYOUT,
    "remote_device": _LAYOUT,
    "mpu": _LAYOUT,
    "dtype": (
        'parameters keep their dtype as master weights; write "bf16": {"enabled": true} in the'
        " configuration"
    ),
}


class Init:
    """Context that builds a model without memory, under `torch.device("meta")`.

    `initialize` later creates the shards of each rank. The classes of the model initialise them,
    with the same values on every layout. A model whose constructor sets weights itself is refused.

    A configuration that is passed here is not read; `initialize` reads its own.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        # Parameters get this dtype without the argument.
        if dtype == torch.get_default_dtype():
            dtype = None
        refuse_arguments(
            "zero.Init",
            _INIT_REMEDIES,
            module=module,
            data_parallel_group=data_parallel_group,
            remote_device=remote_device,
            dtype=dtype,
            mpu=mpu,
        )
        if pin_memory or not mem_efficient_linear:
            raise InputError(
                "deepspeed.zero.Init(pin_memory=, mem_efficient_linear=) is not supported; leave"
                f" them out: {_LAYOUT}"
            )
        self._enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.enter_context(torch.device("meta"))
            self._stack.enter_context(RecordedWrites())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        if self._enabled and _META_CONTEXT in str(error or ""):
            raise InputError(
                "from_pretrained inside zero.Init(): Transformers loads no weights for a model "
                "on the meta device; call plait.from_pretrained(name) without zero.Init(): every "
                "process then loads its shards in deepspeed.initialize"
            ) from error


class GatheredParameters:
    """Context in which parameters have their full values. Collective on entry and exit.

    In the context, functions of torch use the full value of a parameter, even if the script took
    the parameter from the module before it entered the context. Parameters that belong to no engine
    do not change. On exit, the values that `modifier_rank` has written are copied to all ranks, at
    every ZeRO stage.

    Args:
        params: Parameters to gather.
        modifier_rank: Rank whose changes are copied to all ranks. If None, changes are refused.
        fwd_module: Must be None.
        enabled: Ignored. Scripts pass True only at stage 3, but parameters are also sharded at
            stages 1 and 2.

    Raises:
        InputError: A parameter was changed without `modifier_rank`, was replaced, or is on meta;
            the model is a pipeline; or `modifier_rank` is given between a backward and its step.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        refuse_arguments(
            "zero.GatheredParameters",
            {"fwd_module": "a forward inside the context is refused"},
            fwd_module=fwd_module,
        )
        parameters = [params] if isinstance(params, nn.Parameter) else list(params)
        # Each parameter once, although tied ones may be passed several times.
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        self._rank = modifier_rank
        self._gathered: list[_GatheredParameter] = []
        self._stack = ExitStack()

    def __enter__(self) -> None:
        # All checks come before the first gather, which is collective and changes the modules.
        if any(parameter.is_meta for parameter in self._parameters):
            raise InputError(
                "zero.GatheredParameters: the model is on meta and has no values before"
                " deepspeed.initialize; gather the parameters after it"
            )
        matches = []
        for parameter in self._parameters:
            match = find_parameter(parameter)
            if match is not None:
                matches.append((parameter, match))
        for engine in {engine for _, (engine, _) in matches}:
            if engine.plait.mesh.layout.pp > 1:
                raise InputError(
                    "zero.GatheredParameters: a rank of a pipeline has a part of the model; change"
                    " weights before initialize"
                )
            if self._rank is not None:
                refuse_in_step(engine.plait, "zero.GatheredParameters(modifier_rank=...)")

        full_values: dict[int, nn.Parameter] = {}
        for _, (engine, shard) in matches:
            gathered = _GatheredParameter(engine, shard)
            self._gathered.append(gathered)
            full_values[id(shard)] = gathered.full
        for parameter, (_, shard) in matches:
            # The script may have passed a gathered copy of the shard.
            full_values[id(parameter)] = full_values[id(shard)]
        self._stack.enter_context(_FullValues(full_values))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        gathered = self._gathered
        self._gathered = []
        # The shards return to the modules even if the script raised an error in the context.
        replaced = [parameter for parameter in gathered if not parameter.restore()]
        if kind is not None or not gathered:
            return

        changed = []
        if self._rank is None:
            changed = [parameter for parameter in gathered if parameter.is_changed()]
        # All ranks must raise together. Only one of them may have changed a parameter.
        counts = torch.tensor([len(replaced), len(changed)], device=gathered[0].engine.device)
        if dist.is_initialized():
            dist.all_reduce(counts)
        if counts[0]:
            raise InputError(
                "zero.GatheredParameters: a parameter was replaced inside the context, and the"
                " replacement would be lost; write in place (with torch.no_grad():"
                " engine.module.head.weight.copy_(...))"
            )
        if counts[1]:
            raise InputError(
                "zero.GatheredParameters: a parameter was changed inside the context, and"
                " modifier_rank is not set, so the change would be lost; pass modifier_rank=0"
            )

        if self._rank is None:
            return
        # All ranks gathered in the order of `params`, so the broadcasts match.
        for parameter in gathered:
            value = parameter.full.detach().contiguous()
            if dist.is_initialized():
                dist.broadcast(value, src=self._rank)
            write_full(parameter.shard, value)


class _FullValues(TorchFunctionMode):
    """TorchFunctionMode that passes full values instead of shards to torch functions.

    It serves code that took a shard from its module before it entered the context.
    """

    def __init__(self, full_values: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self._full_values = full_values

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def to_full(value: Any) -> Any:
            return self._full_values.get(id(value), value)

        return func(*tree_map(to_full, args), **tree_map(to_full, kwargs or {}))


class _GatheredParameter:
    """Parameter whose full value replaces its shard in the modules of a model."""

    def __init__(self, engine: DeepSpeedEngine, shard: nn.Parameter) -> None:
        """Gather the full value, and replace the shard with it in all modules. Collective."""
        self.engine = engine
        self.shard = shard
        self.full = shard
        self._registrations: list[tuple[dict[str, nn.Parameter | None], str]] = []
        """Dictionaries of the modules that have the parameter, and its name in each."""
        if not isinstance(shard, DTensor):
            return

        self.full = nn.Parameter(full_tensor(shard), requires_grad=shard.requires_grad)
        self._version = version_of(self.full)
        for module in engine.module.modules():
            registry = direct_parameters(module)
            for name, value in registry.items():
                if value is shard:
                    self._registrations.append((registry, name))
        for registry, name in self._registrations:
            registry[name] = self.full

    def is_changed(self) -> bool:
        """Return True if this rank's part of the full value differs from the shard."""
        if not isinstance(self.shard, DTensor):
            return False
        if version_of(self.full) > self._version:
            return True
        # `parameter.data` is written without a new version.
        window = self.full.detach()[local_window(self.shard)]
        return not torch.equal(window, local_tensor(self.shard.detach()))

    def restore(self) -> bool:
        """Put the shard back into the modules. Return False if the full value was replaced."""
        is_present = all(registry.get(name) is self.full for registry, name in self._registrations)
        for registry, name in self._registrations:
            registry[name] = self.shard
        return is_present
