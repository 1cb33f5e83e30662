"""`deepspeed.zero`: building a model without its weights, and full parameters for a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from plait._torch.dtensor import local_tensor, local_window
from plait._torch.modules import own_parameters
from plait._torch.operators import tree_map
from plait._torch.storage import version_of
from plait.compat.deepspeed.constructor import NotedWrites
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.held import find, refuse_in_step
from plait.compat.deepspeed.parts import full, write
from plait.compat.deepspeed.refused import refuse_given
from plait.errors import InputError

_LAYOUT = (
    "the configuration that initialize is given says how parameters are sharded, and where they are"
)
_INIT = {
    "module": "initialize shards a model that was built already",
    "data_parallel_group": _LAYOUT,
    "remote_device": _LAYOUT,
    "mpu": _LAYOUT,
    "dtype": (
        'parameters keep their dtype as master weights; write "bf16": {"enabled": true} in the'
        " configuration"
    ),
}


class Init:
    """A context in which a model is built without memory, under `torch.device("meta")`;
    `initialize` gives each rank its parts, initialised by the classes of the model, the same
    numbers on every layout, and refuses a model whose constructor sets weights itself. The
    configuration given here is not read; `initialize` reads its own.
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
        dtype = None if dtype == torch.get_default_dtype() else dtype
        refuse_given(
            "zero.Init",
            _INIT,
            module=module,
            data_parallel_group=data_parallel_group,
            remote_device=remote_device,
            dtype=dtype,
            mpu=mpu,
        )
        if pin_memory or not mem_efficient_linear:
            raise InputError(
                "deepspeed.zero.Init(pin_memory=, mem_efficient_linear=) cannot be honoured; leave"
                f" them out: {_LAYOUT}"
            )
        self._enabled, self._stack = enabled, ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.enter_context(torch.device("meta"))
            self._stack.enter_context(NotedWrites())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        if self._enabled and _META_CONTEXT in str(error or ""):
            raise InputError(
                "from_pretrained inside of zero.Init(): Transformers reads no weights for a model "
                "without memory; call plait.from_pretrained(name), without zero.Init(), which "
                "reads them in deepspeed.initialize, each process its parts"
            ) from error


_META_CONTEXT = "`from_pretrained` with a meta device"
"""Part of Transformers' message for `from_pretrained` under `torch.device("meta")`."""


class GatheredParameters:
    """A context in which parameters are full in place of shards. Collective at both ends.

    Inside, torch's functions and methods of a given parameter, wherever it was taken from, and its
    module's, use its full value. What `modifier_rank` has written is every rank's afterwards, at
    ZeRO stage 0 too. Parameters that no engine has are left as they are. `enabled` changes nothing:
    scripts give True at stage 3 alone, and parameters are sharded at stages 1 and 2 too. Raises
    InputError for shards that were changed without `modifier_rank`, for parameters that were
    replaced, for parameters on meta, in a pipeline, and with `modifier_rank` between a backward and
    its step.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        refuse_given(
            "zero.GatheredParameters",
            {"fwd_module": "a forward inside of the context is refused"},
            fwd_module=fwd_module,
        )
        given = [params] if isinstance(params, nn.Parameter) else list(params)
        self._given = list({id(parameter): parameter for parameter in given}.values())
        self._rank = modifier_rank
        self._held: list[_Held] = []
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if any(parameter.is_meta for parameter in self._given):
            raise InputError(
                "zero.GatheredParameters: the model is on meta and has no values before"
                " deepspeed.initialize; gather them after"
            )
        known = [find(parameter) for parameter in self._given]
        for engine in {entry[0] for entry in known if entry is not None}:
            if engine.plait.mesh.layout.pp > 1:
                raise InputError(
                    "zero.GatheredParameters: a rank of a pipeline has a part of the model; change"
                    " weights before initialize"
                )
            if self._rank is not None:
                refuse_in_step(engine, "zero.GatheredParameters(modifier_rank=...)")
        self._held = [_Held(*entry) for entry in known if entry is not None]
        full_of = {id(parameter): held.full for held in self._held for parameter in (held.own,)}
        full_of |= {
            id(given): full_of[id(entry[1])]
            for given, entry in zip(self._given, known, strict=True)
            if entry is not None
        }
        self._stack.enter_context(_FullValues(full_of))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        held = self._held
        self._held = []
        replaced = [entry for entry in held if not entry.close()]
        if kind is not None or not held:
            return
        changed = [entry for entry in held if self._rank is None and entry.is_changed()]
        lost = torch.tensor([len(replaced), len(changed)], device=held[0].engine.device)
        if dist.is_initialized():
            dist.all_reduce(lost)
        if lost[0]:
            raise InputError(
                "zero.GatheredParameters: a parameter was replaced inside of the context, which no"
                " rank would keep; write in place (with torch.no_grad():"
                " engine.module.head.weight.copy_(...))"
            )
        if lost[1]:
            raise InputError(
                "zero.GatheredParameters: a parameter was changed inside of the context, and no"
                " rank says that its change is the one to keep; give modifier_rank=0"
            )
        for entry in held if self._rank is not None else ():
            value = entry.full.detach().contiguous()
            if dist.is_initialized():
                dist.broadcast(value, src=self._rank)
            write(entry.own, value)


class _FullValues(TorchFunctionMode):
    """torch's functions are given the full value where they are given a shard: code may have taken
    the shard before.
    """

    def __init__(self, full_of: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self._full_of = full_of

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def full_one(value: Any) -> Any:
            return self._full_of.get(id(value), value)

        return func(*tree_map(full_one, args), **tree_map(full_one, kwargs or {}))


class _Held:
    """One parameter while it is full."""

    def __init__(self, engine: DeepSpeedEngine, own: nn.Parameter) -> None:
        """Put the full value in the shard's place. Collective."""
        self.engine = engine
        self.own = own
        self.full = own
        self._places: list[tuple[dict[str, nn.Parameter | None], str]] = []
        if not isinstance(own, DTensor):
            return
        self.full = nn.Parameter(full(own), requires_grad=own.requires_grad)
        self._version = version_of(self.full)
        registries = [own_parameters(module) for module in engine.module.modules()]
        self._places = [
            (registry, name)
            for registry in registries
            for name, value in registry.items()
            if value is own
        ]
        for registry, name in self._places:
            registry[name] = self.full

    def is_changed(self) -> bool:
        """Whether the full value is another one than the shard's, as far as this rank can see."""
        if not isinstance(self.own, DTensor):
            return False
        here = local_tensor(self.own.detach())
        return version_of(self.full) > self._version or not torch.equal(
            self.full.detach()[local_window(self.own)], here
        )

    def close(self) -> bool:
        """Put the shard in its place again. Whether the full value was still there."""
        good = all(registry.get(name) is self.full for registry, name in self._places)
        for registry, name in self._places:
            registry[name] = self.own
        return good
