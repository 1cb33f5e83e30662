"""What a checkpoint keeps of an optimizer: its tensors by parameter name, and a record of the rest.
Nothing here takes a step.

torch's own `get_optimizer_state_dict` makes missing states by a step with zero gradients, which
counts as a step (AdamW's bias correction begins at 2 then) and decays what a user's optimizer
decays without its `lr`. Here a state that does not exist is not saved, and what was saved is
allocated from its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait import exact
from plait._torch.dtensor import local_tensor
from plait.checkpoint.windows import TensorRecord, dtype_of
from plait.errors import CheckpointError

START = "optimizer.state."
_ADAMS = ("torch.optim.Adam", "torch.optim.AdamW", "plait.optim.low_bit_adam.SmallStateAdam")
_NEEDS = {
    "amsgrad": (("Adam", "AdamW"), "max_exp_avg_sq"),
    "centered": (("RMSprop",), "grad_avg"),
    "momentum": (("RMSprop",), "momentum_buffer"),
}
Place = Callable[[nn.Parameter, str, torch.dtype], torch.Tensor]
"""Where a state shaped like its parameter is to be: (parameter, name, dtype) to an empty tensor."""


@runtime_checkable
class MakesStates(Protocol):
    """An optimizer whose states have other shapes than their parameters, and which can make
    them.
    """

    def fresh_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Those of one parameter before its first step."""


@dataclass(frozen=True)
class Content:
    """Of one rank."""

    tensors: dict[str, torch.Tensor]
    """`state.<parameter>.<name>` to a state."""
    record: dict[str, Any]
    """JSON: class, parameter groups, states that are no tensors, and what else `state_dict` gives.
    """


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter's names, several for tied ones; without the marks of compiled modules."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name.replace("_orig_mod.", ""))
    return found


def content(
    model: nn.Module, optimizer: Optimizer, *, configured: Sequence[Mapping[str, Any]]
) -> Content:
    """What there is now; no tensor is copied. `configured` are the groups' values before any step
    or schedule changed them. Raises CheckpointError for what cannot be saved, naming it.
    """
    names = parameter_names(model)
    saved = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, states in optimizer.state.items():
        if not isinstance(parameter, nn.Parameter) or parameter not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state for {_what(parameter)}, which is no"
                " parameter of the model, so no other layout could find it again; keep it in the"
                " parameters' states or in the groups"
            )
        name = names[parameter][0]
        for key, value in states.items():
            if not isinstance(key, str) or "." in key:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a state of {name} under {key!r}, which a"
                    " checkpoint cannot name; use no dots"
                )
            place = f"state.{name}.{key}"
            if isinstance(value, torch.Tensor):
                _refuse_partial(optimizer, parameter, value, place)
                _refuse_own_form(optimizer, value, place)
                tensors[place] = value
            else:
                values[place] = exact.encode(value, f"{type(optimizer).__name__}: {place}")
    groups = [
        {
            "params": [names[p][0] for p in group["params"]],
            "now": _plain(optimizer, group),
            "configured": _plain(optimizer, first),
        }
        for group, first in zip(optimizer.param_groups, configured, strict=True)
    ]
    extra = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    record = {
        "type": class_name(optimizer),
        "groups": groups,
        "values": values,
        "extra": exact.encode(extra, type(optimizer).__name__),
    }
    return Content(tensors, record)


def class_name(optimizer: Optimizer) -> str:
    """Where it was defined, without torch's private modules."""
    kind = type(optimizer)
    return (
        f"torch.optim.{kind.__name__}"
        if kind.__module__.startswith("torch.optim.")
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def merged(record: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The records of all pipeline stages as one. Collective over `group`, the ranks that hold
    different parameters.
    """
    if group is None:
        return record
    records: list[dict[str, Any]] = [{} for _ in range(group.size())]
    dist.all_gather_object(records, record, group=group)
    whole = {**records[0], "groups": [], "values": {}}
    seen: set[str] = set()
    for one in records:
        whole["values"] |= one["values"]
        for entry in one["groups"]:
            # a tied parameter is on several stages
            params = [name for name in entry["params"] if name not in seen]
            seen.update(params)
            alike = next(
                (
                    g
                    for g in whole["groups"]
                    if (g["now"], g["configured"]) == (entry["now"], entry["configured"])
                ),
                None,
            )
            if alike is None:
                whole["groups"].append({**entry, "params": params})
            else:
                alike["params"] = [*alike["params"], *params]
    return whole


@dataclass(frozen=True)
class Fill:
    """Empty states, to be filled from a checkpoint and then put into the optimizer."""

    states: dict[nn.Parameter, dict[str, torch.Tensor]]
    tensors: dict[str, torch.Tensor]
    """The same by the names in the checkpoint."""


def allocate(
    model: nn.Module,
    optimizer: Optimizer,
    stored: Mapping[str, TensorRecord],
    record: Mapping[str, Any],
    *,
    place: Place | None,
) -> Fill:
    """Room for what a checkpoint holds of this rank's parameters. Parameters that had no state when
    it was written get none.
    """
    same = _refuse_another_class(optimizer, record)
    saved = stored_states(stored)
    found: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    tensors: dict[str, torch.Tensor] = {}
    names = parameter_names(model)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in trained:
        name = next((alias for alias in names[parameter] if alias in saved), None)
        if name is None:
            continue
        if isinstance(optimizer, MakesStates):
            own = optimizer.fresh_states(parameter)
            _compare_forms(name, saved[name], own)
        else:
            if class_name(optimizer) in _ADAMS:
                _compare_forms(name, saved[name], ("exp_avg", "exp_avg_sq"))
            was = stored.get(f"model.{name}")
            dtype = dtype_of(was) if same and was is not None else None
            own = {
                key: _room(parameter, key, meta, was=dtype, place=place)
                for key, meta in saved[name].items()
            }
        found[parameter] = own
        tensors |= {f"state.{name}.{key}": tensor for key, tensor in own.items()}
    _refuse_lacking(optimizer, found, names)
    return Fill(found, tensors)


def put(
    optimizer: Optimizer,
    model: nn.Module,
    fill: Fill,
    record: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Give the optimizer its filled states and `groups` (values by key, one mapping a group)."""
    states: dict[nn.Parameter, dict[str, Any]] = {
        parameter: dict(found) for parameter, found in fill.states.items()
    }
    for parameter, names in parameter_names(model).items():
        for alias in names:
            start = f"state.{alias}."
            mine = {
                key.removeprefix(start): value
                for key, value in record["values"].items()
                if key.startswith(start)
            }
            if mine and any(
                parameter is p for group in optimizer.param_groups for p in group["params"]
            ):
                states.setdefault(parameter, {}).update(
                    {key: exact.decode(value, None, key) for key, value in mine.items()}
                )
                break
    optimizer.state.clear()
    whole = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    whole["state"] = {
        number: states[parameter]
        for number, parameter in zip(numbers, order, strict=True)
        if parameter in states
    }
    whole["param_groups"] = [
        {**group, **values, "params": group["params"]}
        for group, values in zip(whole["param_groups"], groups, strict=True)
    ]
    whole |= exact.decode(
        record["extra"],
        {key: value for key, value in whole.items() if key not in ("state", "param_groups")},
    )
    optimizer.load_state_dict(whole)
    for parameter, found in fill.states.items():
        loaded = optimizer.state[parameter]
        for (
            key,
            tensor,
        ) in found.items():  # torch gives most states their parameter's dtype, which rounds
            if key in loaded and loaded[key].dtype != tensor.dtype and key != "step":
                loaded[key] = tensor.to(loaded[key].device)


def stored_states(stored: Mapping[str, TensorRecord]) -> dict[str, dict[str, TensorRecord]]:
    """Parameter name to the names of its states in a checkpoint, with what is known of them."""
    found: dict[str, dict[str, TensorRecord]] = {}
    for key, meta in stored.items():
        if key.startswith(START):
            parameter, _, name = key.removeprefix(START).rpartition(".")
            found.setdefault(parameter, {})[name] = meta
    return found


def _room(
    parameter: nn.Parameter,
    key: str,
    meta: TensorRecord,
    *,
    was: torch.dtype | None,
    place: Place | None,
) -> torch.Tensor:
    """`was` is the parameter's dtype in the checkpoint; None where another optimizer of the same
    kind wrote the states.
    """
    size = meta.shape
    dtype = dtype_of(meta)
    if size and (was is None or dtype == was):
        dtype = parameter.dtype  # it follows the parameter's, where this run has another
    if size == tuple(parameter.shape) and parameter.ndim:
        return (
            place(parameter, key, dtype)
            if place is not None
            else torch.zeros_like(parameter.detach(), dtype=dtype)
        )
    return torch.zeros(size, dtype=dtype, device="cpu" if not size else parameter.device)


def _refuse_own_form(optimizer: Optimizer, value: torch.Tensor, place: str) -> None:
    kind = type(local_tensor(value.detach()))
    if kind is not torch.Tensor:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {place} as a {kind.__name__}, whose parts no other"
            " layout can cut; use optimizer.states for states of 8 or 4 bits"
        )


def _refuse_partial(
    optimizer: Optimizer, parameter: nn.Parameter, value: torch.Tensor, place: str
) -> None:
    """A plain tensor with a sharded parameter belongs to this rank alone, if it has the shard's
    shape: saved, it would be one of many.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not value.ndim:
        return
    if tuple(value.shape) == tuple(parameter.to_local().shape) != tuple(parameter.shape):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {place} as a plain tensor of this rank's shard"
            f" {tuple(value.shape)}, from which no checkpoint can put the whole together; make it"
            " by torch.zeros_like(parameter)"
        )


def _refuse_another_class(optimizer: Optimizer, record: Mapping[str, Any]) -> bool:
    """Whether the class is the same; Adam's forms may follow each other, if their states are the
    same.
    """
    there = record["type"]
    here = class_name(optimizer)
    if there != here and not {there, here} <= set(_ADAMS):
        raise CheckpointError(
            f"the checkpoint holds the states of {there}, and this run's optimizer is {here}; set"
            " optimizer.type to what the run was saved with"
        )
    return bool(there == here)


def _refuse_lacking(
    optimizer: Optimizer,
    found: Mapping[nn.Parameter, Mapping[str, Any]],
    names: Mapping[nn.Parameter, list[str]],
) -> None:
    """States that an option of torch's optimizers needs, and which they make at a parameter's first
    step only.
    """
    needs = _NEEDS if type(optimizer).__module__.startswith("torch.optim") else {}
    for option, (kinds, state) in needs.items():
        if type(optimizer).__name__ not in kinds:
            continue
        for group in optimizer.param_groups:
            lacking = [
                p
                for p in group["params"]
                if group.get(option) and p in found and state not in found[p]
            ]
            if lacking:
                raise CheckpointError(
                    f"optimizer.params.{option} = {group[option]}: it needs `{state}` of every"
                    f" parameter, and the checkpoint has none of {names[lacking[0]][0]}; set"
                    f" {option} to what the run was saved with"
                )


def _compare_forms(name: str, there: Iterable[str], here: Iterable[str]) -> None:
    there, here = ({key for key in keys if key.startswith("exp_avg")} for keys in (there, here))
    if there != here:
        raise CheckpointError(
            f"the checkpoint keeps the optimizer's states of {name} as {', '.join(sorted(there))},"
            f" and this run as {', '.join(sorted(here))}; set optimizer.states to what the run was"
            " saved with"
        )


def _plain(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return dict(exact.encode(kept, f"{type(optimizer).__name__}: a parameter group"))


def _what(key: object) -> str:
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
