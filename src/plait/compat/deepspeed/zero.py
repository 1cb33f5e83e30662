"""`deepspeed.zero`: building a model without its weights, and full parameters for a moment."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_parameters
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.held import find, full, refuse_in_step, write
from plait.compat.deepspeed.refused import refuse_given
from plait.errors import InputError

_LAYOUT = "the configuration that initialize is given says how parameters are sharded, and where they are"
_INIT = {
    "module": "initialize shards a model that was built already",
    "data_parallel_group": _LAYOUT,
    "remote_device": _LAYOUT,
    "mpu": _LAYOUT,
    "dtype": 'parameters keep their dtype as master weights; write "bf16": {"enabled": true} in the configuration',
}


class Init:
    """A context in which a model is built without memory, under `torch.device("meta")`; `initialize` gives each rank its parts, initialised
    by the classes of the model, the same numbers on every layout. The configuration given here is not read; `initialize` reads its own."""

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
            "zero.Init", _INIT, module=module, data_parallel_group=data_parallel_group, remote_device=remote_device, dtype=dtype, mpu=mpu
        )
        if pin_memory or not mem_efficient_linear:
            raise InputError(f"deepspeed.zero.Init(pin_memory=, mem_efficient_linear=) cannot be honoured; leave them out: {_LAYOUT}")
        self._enabled, self._stack = enabled, ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.enter_context(torch.device("meta"))

    def __exit__(self, *problem: Any) -> None:
        self._stack.close()


class GatheredParameters:
    """A context in which modules hold full parameters in place of shards. Collective at both ends.

    Inside, read and write them through their module (`engine.module.head.weight`), or through the list that the context gives; a shard that
    was taken from the model before stays a shard. What `modifier_rank` has written is every rank's afterwards, at ZeRO stage 0 too; without
    it changes are lost. Parameters that no engine has are left as they are. Raises InputError for changes of shards, for parameters that
    were replaced, for parameters on meta, in a pipeline, and with `modifier_rank` between a backward and its step.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        refuse_given("zero.GatheredParameters", {"fwd_module": "a forward inside of the context is refused"}, fwd_module=fwd_module)
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._given = list({id(parameter): parameter for parameter in given}.values())
        self._rank, self._enabled = modifier_rank, enabled
        self._held: list[_Held] = []

    def __enter__(self) -> list[nn.Parameter]:
        if not self._enabled:
            return self._given
        if any(parameter.is_meta for parameter in self._given):
            raise InputError("zero.GatheredParameters: the model is on meta and has no values before deepspeed.initialize; gather them after")
        known = [find(parameter) for parameter in self._given]
        for engine in {engine for entry in known if entry is not None for engine in entry[:1]}:
            if engine.plait.mesh.layout.pp > 1:
                raise InputError("zero.GatheredParameters: a rank of a pipeline has a part of the model; change weights before initialize")
            if self._rank is not None:
                refuse_in_step(engine, "zero.GatheredParameters(modifier_rank=...)")
        entries = [_Held(*entry) if entry is not None else None for entry in known]
        self._held = [entry for entry in entries if entry is not None]
        for entry in self._held:
            entry.open()
        return [entry.full if entry is not None else own for entry, own in zip(entries, self._given, strict=True)]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        held, self._held = self._held, []
        wrong = [entry for entry in held if not entry.close()]
        if kind is not None or not held:
            return
        bad = torch.tensor(len(wrong), device=held[0].engine.device)
        if dist.is_initialized():
            dist.all_reduce(bad)
        if bad:
            raise InputError(
                "zero.GatheredParameters: a shard was changed, or a parameter replaced, inside of the context, which no rank would keep; "
                "write in place, through the module (with torch.no_grad(): engine.module.head.weight.copy_(...))"
            )
        for entry in held if self._rank is not None else ():
            value = entry.full.detach().contiguous()
            dist.broadcast(value, src=self._rank)
            write(entry.own, value)


class _Held:
    """One parameter while it is full."""

    def __init__(self, engine: DeepSpeedEngine, own: nn.Parameter) -> None:
        self.engine, self.own = engine, own
        self.full = own
        self._places: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self._before: torch.Tensor | None = None

    def open(self) -> None:
        """Put the full value in the shard's place. Collective."""
        if not isinstance(self.own, DTensor):
            return
        with torch.no_grad():
            self._before = local_tensor(self.own).clone()
        self.full = nn.Parameter(full(self.own), requires_grad=self.own.requires_grad)
        registries = [own_parameters(module) for module in self.engine.module.modules()]
        self._places = [(registry, name) for registry in registries for name, value in registry.items() if value is self.own]
        for registry, name in self._places:
            registry[name] = self.full

    def close(self) -> bool:
        """Put the shard back. Whether neither was replaced or changed."""
        if self._before is None:
            return True
        with torch.no_grad():
            good = torch.equal(self._before, local_tensor(self.own))
        for registry, name in self._places:
            good = good and registry.get(name) is self.full
            registry[name] = self.own
        return good
