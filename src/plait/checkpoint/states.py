"""States of a model and an optimizer in a checkpoint.

A model has parameters, persistent buffers, and modules' extra state; an optimizer has tensors by
parameter name and a JSON record of the rest.

Note [Saving without a step]
    torch's `get_optimizer_state_dict` creates missing states by a step with zero gradients. This
    counts as a step, so AdamW's bias correction begins at 2. The step has `lr` = 0, but it still
    decays the weights if an optimizer's weight decay does not depend on `lr`. Nothing here takes a
    step: a state that does not exist is not saved, and saved states are allocated from their
    recorded shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from plait import exact
from plait._torch.tensors import local_tensor
from plait.checkpoint.windows import TensorRecord, dtype_of
from plait.cluster.small_messages import all_gather_objects
from plait.errors import CheckpointError

MODEL_START = "model."
_FROZEN_NAMES = "_plait_checkpoints_hold_what_is_trained"
"""Attribute of a model with the names of the parameters that its checkpoints leave out."""
_EXTRA = "_extra_state"
OPTIMIZER_START = "optimizer.state."
_ADAM_CLASSES = ("torch.optim.Adam", "torch.optim.AdamW", "plait.optim.low_bit_adam.SmallStateAdam")
_STATES_OF_OPTIONS = {
    "amsgrad": (("Adam", "AdamW"), "max_exp_avg_sq"),
    "centered": (("RMSprop",), "grad_avg"),
    "momentum": (("RMSprop",), "momentum_buffer"),
}
"""State that an option of torch's optimizers needs, and the classes that create it at a parameter's
first step only.
"""
StateAllocator = Callable[[nn.Parameter, str, torch.dtype], torch.Tensor]
"""Function from (parameter, name of the state, dtype) to a new state of the parameter's shape."""


def save_trained_only(model: nn.Module) -> None:
    """Restrict checkpoints of a model to the parameters that are currently not frozen.

    This is used for adapters. A resumed run loads the base model from the base model's own folder.
    """
    frozen = frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    )
    object.__setattr__(model, _FROZEN_NAMES, frozen)


def is_left_out(model: nn.Module, name: str) -> bool:
    """Return True if checkpoints of the model leave the parameter out."""
    return name in getattr(model, _FROZEN_NAMES, ())


def model_content(
    model: nn.Module, *, trained: Collection[nn.Parameter] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the part of a model's state that checkpoints contain. No tensor is copied.

    Args:
        model: The model, sharded or not.
        trained: Parameters to include even if they were frozen when `save_trained_only` was
            called, because the optimizer has them now.

    Returns:
        (tensors by the key `model.<name>`, JSON values of modules).

    Raises:
        CheckpointError: A value cannot be encoded.
    """
    left_out: frozenset[str] | None = getattr(model, _FROZEN_NAMES, None)
    if left_out is not None:
        # The state_dict is not read: modules that are left out may have one of another kind, such
        # as quantized ones.
        optimized = set(trained)
        return {
            f"{MODEL_START}{name}": parameter.detach()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in left_out or parameter in optimized
        }, {}

    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    # This function of torch leaves out the prefixes of wrappers such as torch.compile's.
    for name, value in get_model_state_dict(model).items():
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA:
            tensors[f"{MODEL_START}{name}"] = value
        else:
            values[name] = exact.encode(value, name)
    return tensors, values


def model_shapes(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the global shapes of the tensors of all pipeline stages. Collective.

    Args:
        tensors: Tensors of this stage from `model_content`.
        group: Ranks that have different parts of the model; None for a single stage.
    """
    local_shapes = {
        name.removeprefix(MODEL_START): tuple(tensor.shape) for name, tensor in tensors.items()
    }
    if group is None:
        return local_shapes
    shapes: dict[str, tuple[int, ...]] = {}
    for stage_shapes in all_gather_objects(local_shapes, group):
        shapes |= stage_shapes
    return shapes


def put_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Restore the extra state of modules from the values of `model_content`."""
    modules = dict(model.named_modules())
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        # The values of all pipeline stages are passed, and a rank has modules of one of them.
        if leaf == _EXTRA and owner in modules:
            modules[owner].set_extra_state(exact.decode(value, None, name))


@runtime_checkable
class MakesStates(Protocol):
    """Optimizer that creates its states itself, because they differ in shape from parameters."""

    def fresh_states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the states of a parameter before its first step."""


@dataclass(frozen=True)
class OptimizerContent:
    """State of this rank's optimizer in the form in which a checkpoint stores it."""

    tensors: dict[str, torch.Tensor]
    """Tensor states by `state.<parameter>.<name>`."""
    record: dict[str, Any]
    """JSON: class, parameter groups, states that are not tensors, other entries of `state_dict`."""


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter without the prefixes of `torch.compile`.

    Tied parameters have several names.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name.replace("_orig_mod.", ""))
    return names


def optimizer_content(
    model: nn.Module, optimizer: Optimizer, *, configured: Sequence[Mapping[str, Any]]
) -> OptimizerContent:
    """Return the current state of an optimizer. No tensor is copied.

    Args:
        model: The model, whose parameter names identify the states.
        optimizer: Its optimizer.
        configured: Values of each parameter group before steps or schedules changed them.

    Raises:
        CheckpointError: A state cannot be saved. The error names it.
    """
    names = parameter_names(model)
    class_label = type(optimizer).__name__
    # Before the states are read: hooks of `state_dict` may change them.
    state_dict = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, states in optimizer.state.items():
        if not isinstance(parameter, nn.Parameter) or parameter not in names:
            raise CheckpointError(
                f"{class_label} keeps state for {_describe_key(parameter)}, which is not a"
                " parameter of the model, so no other layout could find it again; keep it in the"
                " parameters' states or in the groups"
            )
        name = names[parameter][0]
        for key, value in states.items():
            if not isinstance(key, str) or "." in key:
                raise CheckpointError(
                    f"{class_label} keeps a state of {name} under {key!r}, which a checkpoint"
                    " cannot name; use no dots"
                )
            state_name = f"state.{name}.{key}"
            if isinstance(value, torch.Tensor):
                _refuse_rank_local_state(optimizer, parameter, value, state_name)
                _refuse_tensor_subclass(optimizer, value, state_name)
                tensors[state_name] = value
            else:
                values[state_name] = exact.encode(value, f"{class_label}: {state_name}")

    groups = []
    for group, configured_group in zip(optimizer.param_groups, configured, strict=True):
        groups.append(
            {
                "params": [names[p][0] for p in group["params"]],
                "now": _encode_group(optimizer, group),
                "configured": _encode_group(optimizer, configured_group),
            }
        )
    record = {
        "type": class_name(optimizer),
        "groups": groups,
        "values": values,
        "extra": exact.encode(_other_entries(state_dict), class_label),
    }
    return OptimizerContent(tensors, record)


def class_name(optimizer: Optimizer) -> str:
    """Return the qualified name of an optimizer's class, without torch's private modules."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def merge_stages(record: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Merge the records of all pipeline stages. Collective.

    Args:
        record: Record of this stage.
        group: Ranks that update different parameters; None for a single stage.
    """
    if group is None:
        return record
    records = all_gather_objects(record, group)

    result = {**records[0], "groups": [], "values": {}}
    seen: set[str] = set()
    for stage in records:
        result["values"] |= stage["values"]
        for entry in stage["groups"]:
            # Tied parameters are on several stages; the first one lists them.
            params = [name for name in entry["params"] if name not in seen]
            seen.update(params)
            # All stages have the same groups, each with the parameters of its stage.
            alike = next((group for group in result["groups"] if _is_alike(group, entry)), None)
            if alike is None:
                result["groups"].append({**entry, "params": params})
            else:
                alike["params"] = [*alike["params"], *params]
    return result


def _is_alike(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(group[key] == other[key] for key in ("now", "configured"))


@dataclass(frozen=True)
class Fill:
    """Allocated states that are filled from a checkpoint and then passed to the optimizer."""

    states: dict[nn.Parameter, dict[str, torch.Tensor]]
    tensors: dict[str, torch.Tensor]
    """States by their names in the checkpoint, without `optimizer.`."""


def allocate(
    model: nn.Module,
    optimizer: Optimizer,
    stored: Mapping[str, TensorRecord],
    record: Mapping[str, Any],
    *,
    place: StateAllocator | None,
) -> Fill:
    """Allocate the states that a checkpoint contains for this rank's parameters.

    Parameters that had no state when the checkpoint was written get none.

    Args:
        model: The model.
        optimizer: Its optimizer.
        stored: All tensors of the checkpoint by name.
        record: Record of the optimizer, from `merge_stages`.
        place: Function that allocates states of their parameter's shape, for example in host
            memory. None allocates them on the parameter's device.

    Raises:
        CheckpointError: The states are those of another optimizer.
    """
    same_class = _refuse_other_class(optimizer, record)
    saved = stored_states(stored)
    states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    tensors: dict[str, torch.Tensor] = {}
    names = parameter_names(model)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in trained:
        # Tied parameters are saved under the name that the saving layout used.
        name = next((alias for alias in names[parameter] if alias in saved), None)
        if name is None:
            continue

        if isinstance(optimizer, MakesStates):
            allocated = optimizer.fresh_states(parameter)
            _refuse_other_moments(name, saved[name], allocated)
        else:
            if class_name(optimizer) in _ADAM_CLASSES:
                _refuse_other_moments(name, saved[name], ("exp_avg", "exp_avg_sq"))
            parameter_record = stored.get(f"model.{name}")
            saved_dtype = None
            if same_class and parameter_record is not None:
                saved_dtype = dtype_of(parameter_record)
            allocated = {}
            for key, state in saved[name].items():
                allocated[key] = _allocate_state(
                    parameter, key, state, parameter_dtype=saved_dtype, place=place
                )
        states[parameter] = allocated
        tensors |= {f"state.{name}.{key}": tensor for key, tensor in allocated.items()}
    _refuse_missing_states(optimizer, states, names)
    return Fill(states, tensors)


def load_states(
    optimizer: Optimizer,
    model: nn.Module,
    fill: Fill,
    record: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Load the filled states and group values into the optimizer.

    Args:
        optimizer: Optimizer that `fill` was allocated for.
        model: The model.
        fill: Allocated states, after they have been filled from the checkpoint.
        record: Record of the optimizer, from `merge_stages`.
        groups: Values of each parameter group.
    """
    states: dict[nn.Parameter, dict[str, Any]] = {
        parameter: dict(tensors) for parameter, tensors in fill.states.items()
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, values in _decoded_values(model, parameters, record).items():
        states.setdefault(parameter, {}).update(values)
    # States of the run so far are freed, because none of them remains after the load.
    optimizer.state.clear()

    # `load_state_dict` identifies parameters by their number in the groups.
    state_dict = optimizer.state_dict()
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state_dict["state"] = {
        number: states[parameter]
        for number, parameter in zip(numbers, parameters, strict=True)
        if parameter in states
    }
    state_dict["param_groups"] = [
        {**group, **values, "params": group["params"]}
        for group, values in zip(state_dict["param_groups"], groups, strict=True)
    ]
    # A damaged record must not replace the states and groups.
    extra = _other_entries(exact.decode(record["extra"], _other_entries(state_dict)))
    state_dict |= extra
    optimizer.load_state_dict(state_dict)

    for parameter, tensors in fill.states.items():
        loaded = optimizer.state[parameter]
        for key, tensor in tensors.items():
            # torch casts most states to their parameter's dtype, which rounds them.
            if key in loaded and loaded[key].dtype != tensor.dtype and key != "step":
                loaded[key] = tensor.to(loaded[key].device)


def refuse_other_kinds(
    model: nn.Module,
    optimizer: Optimizer,
    stored: Mapping[str, TensorRecord],
    record: Mapping[str, Any],
    where: str,
) -> None:
    """Refuse states that would fail in a later step, or read memory that is not theirs.

    Args:
        model: The model.
        optimizer: Its optimizer.
        stored: All tensors of the checkpoint by name.
        record: Record of the optimizer, from `merge_stages`.
        where: Folder of the checkpoint, for messages.

    Raises:
        CheckpointError: A state is missing, or has another kind or shape than in this run.
    """
    current_entries = _other_entries(optimizer.state_dict())
    exact.refuse_other_kind(
        exact.decode(record["extra"], current_entries),
        current_entries,
        f"{where}: the optimizer's extra entries",
        is_strict=False,
    )
    names = parameter_names(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = _decoded_values(model, parameters, record)
    # SGD creates its only state at any step.
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(
        optimizer, torch.optim.SGD | torch.optim.LBFGS | torch.optim.SparseAdam
    ):
        return
    tensors = stored_states(stored)
    for group in optimizer.param_groups:
        created: dict[int, dict[str, Any]] = {}
        for parameter in group["params"]:
            # Tied parameters are saved under the name that the saving layout used.
            name = next((alias for alias in names[parameter] if alias in tensors), "")
            saved = {**tensors.get(name, {}), **values.get(parameter, {})}
            if not saved:
                continue
            ndim = parameter.ndim
            if ndim not in created:
                created[ndim] = _states_after_a_step(optimizer, group, _small_shape(ndim))
            for key, state in created[ndim].items():
                place = f"{where}: state {key} of {name or names[parameter][0]}"
                if key not in saved:
                    raise CheckpointError(
                        f"{place} is missing in the checkpoint; load another checkpoint"
                    )
                if not isinstance(saved[key], TensorRecord):
                    exact.refuse_other_kind(saved[key], state, place, is_strict=True)
                # A fused kernel does not check the sizes of the states that it reads and writes.
                elif state.shape == _small_shape(ndim):
                    shape = stored[f"{MODEL_START}{name}"].shape
                    if saved[key].shape != shape:
                        raise CheckpointError(
                            f"{place} has shape {saved[key].shape} in the checkpoint, and its"
                            f" parameter {shape}; load another checkpoint"
                        )


def _small_shape(ndim: int) -> tuple[int, ...]:
    """Return a shape of different sizes: only a state of the same shape has a value per element."""
    return tuple(range(2, 2 + ndim))


def _states_after_a_step(
    optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return the states that a step creates for a parameter of a shape.

    The step is that of another optimizer with the values of the group and one small parameter.
    """
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.zeros_like(parameter)
    # Kernels of a device do not fit a parameter on the CPU.
    kernels = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
    values: dict[str, Any] = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            values[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    values |= {key: value for key, value in kernels.items() if key in group}
    build: Callable[..., Optimizer] = type(optimizer)
    stand_in = build([{**values, "params": [parameter]}])
    stand_in.step()
    return dict(stand_in.state[parameter])


def _decoded_values(
    model: nn.Module, parameters: Sequence[nn.Parameter], record: Mapping[str, Any]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the states of this rank's parameters that are not tensors."""
    names = parameter_names(model)
    # Tied parameters are saved under the name that the saving layout used.
    owners = {alias: parameter for parameter in parameters for alias in names[parameter]}
    values: dict[nn.Parameter, dict[str, Any]] = {}
    for key, value in record["values"].items():
        alias, _, state_name = key.removeprefix("state.").rpartition(".")
        if alias in owners:
            decoded = exact.decode(value, None, state_name)
            values.setdefault(owners[alias], {})[state_name] = decoded
    return values


def stored_states(stored: Mapping[str, TensorRecord]) -> dict[str, dict[str, TensorRecord]]:
    """Return the records of a checkpoint's states by parameter name and state name."""
    states: dict[str, dict[str, TensorRecord]] = {}
    for key, record in stored.items():
        if key.startswith(OPTIMIZER_START):
            parameter, _, name = key.removeprefix(OPTIMIZER_START).rpartition(".")
            states.setdefault(parameter, {})[name] = record
    return states


def _allocate_state(
    parameter: nn.Parameter,
    key: str,
    record: TensorRecord,
    *,
    parameter_dtype: torch.dtype | None,
    place: StateAllocator | None,
) -> torch.Tensor:
    """Allocate one optimizer state of a parameter.

    Args:
        parameter: Parameter of the state.
        key: Name of the state.
        record: Record of the state in the checkpoint.
        parameter_dtype: dtype of the parameter in the checkpoint. None if another optimizer of the
            same kind wrote the states.
        place: Function that allocates states of the parameter's shape, see `allocate`.
    """
    shape = record.shape
    dtype = dtype_of(record)
    if shape and (parameter_dtype is None or dtype == parameter_dtype):
        # The state had its parameter's dtype, which may be another one in this run.
        dtype = parameter.dtype
    if shape == tuple(parameter.shape) and parameter.ndim:
        if place is not None:
            return place(parameter, key, dtype)
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    # Scalars such as `step` are on the CPU in torch's optimizers.
    device = parameter.device if shape else "cpu"
    return torch.zeros(shape, dtype=dtype, device=device)


def _refuse_tensor_subclass(optimizer: Optimizer, value: torch.Tensor, state_name: str) -> None:
    kind = type(local_tensor(value.detach()))
    if kind is not torch.Tensor:
        raise CheckpointError(
            f"{type(optimizer).__name__} stores {state_name} as a {kind.__name__}, which cannot be"
            " resharded for another layout; use optimizer.states for states of 8 or 4 bits"
        )


def _refuse_rank_local_state(
    optimizer: Optimizer, parameter: nn.Parameter, value: torch.Tensor, state_name: str
) -> None:
    """Refuse a plain tensor with the shape of a sharded parameter's local shard.

    Its values differ between ranks, and a checkpoint would contain only one of the ranks' tensors.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not value.ndim:
        return
    if tuple(value.shape) == tuple(parameter.to_local().shape) != tuple(parameter.shape):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {state_name} as a plain tensor of this rank's shard"
            f" {tuple(value.shape)}, from which a checkpoint cannot assemble the full tensor;"
            " create it by torch.zeros_like(parameter)"
        )


def _refuse_other_class(optimizer: Optimizer, record: Mapping[str, Any]) -> bool:
    """Return True if an optimizer of the same class saved the states.

    States of another class are refused unless both classes are variants of Adam.
    """
    saved = record["type"]
    current = class_name(optimizer)
    if saved != current and not {saved, current} <= set(_ADAM_CLASSES):
        raise CheckpointError(
            f"the checkpoint holds the states of {saved}, but this run's optimizer is {current};"
            " set optimizer.type to what the run was saved with"
        )
    return bool(saved == current)


def _refuse_missing_states(
    optimizer: Optimizer,
    states: Mapping[nn.Parameter, Mapping[str, Any]],
    names: Mapping[nn.Parameter, list[str]],
) -> None:
    """Refuse a checkpoint that lacks states that the optimizer needs but does not create later."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for option, (class_names, state) in _STATES_OF_OPTIONS.items():
        if type(optimizer).__name__ not in class_names:
            continue
        for group in optimizer.param_groups:
            if not group.get(option):
                continue
            for parameter in group["params"]:
                if parameter in states and state not in states[parameter]:
                    raise CheckpointError(
                        f"optimizer.params.{option} = {group[option]}: it needs `{state}` of every"
                        f" parameter, but the checkpoint has none for {names[parameter][0]}; set"
                        f" {option} to what the run was saved with"
                    )


def _refuse_other_moments(name: str, saved: Iterable[str], current: Iterable[str]) -> None:
    saved_moments = {key for key in saved if key.startswith("exp_avg")}
    current_moments = {key for key in current if key.startswith("exp_avg")}
    if saved_moments != current_moments:
        raise CheckpointError(
            f"the checkpoint keeps the optimizer's states of {name} as"
            f" {', '.join(sorted(saved_moments))}, but this run as"
            f" {', '.join(sorted(current_moments))}; set optimizer.states to what the run was saved"
            " with"
        )


def _encode_group(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return dict(exact.encode(values, f"{type(optimizer).__name__}: a parameter group"))


def _other_entries(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an optimizer's `state_dict` besides its states and groups."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}


def _describe_key(key: object) -> str:
    if isinstance(key, torch.Tensor):
        return f"a tensor of shape {tuple(key.shape)}"
    return repr(key)
