"""Registries of modules and parameters, and the learning rates that LR schedulers store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

DROPOUTS = nn.modules.dropout._DropoutNd
"""Base class of torch's dropout modules."""
Tensors = dict[str, torch.Tensor | None]
Children = dict[str, nn.Module | None]
HookKind = Literal["forward_pre", "forward", "backward_pre", "backward"]
_STATISTICS = ("running_mean", "running_var")
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def direct_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary in which a module stores its parameters, without those of children.

    Changing the dictionary changes the module.
    """
    return module._parameters


def direct_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary in which a module stores its buffers, without those of children."""
    return module._buffers


def is_unversioned(module: nn.Module, buffer: str) -> bool:
    """Return whether a forward may write a buffer of a module without increasing its version.

    torch's batch_norm does so with its statistics in training.
    """
    return buffer in _STATISTICS and module.training


def direct_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without parameters, buffers, children and torch's own state."""
    return {name: value for name, value in vars(module).items() if not is_of_torch(name)}


def is_of_torch(attribute: str) -> bool:
    """Return whether `nn.Module` itself has an attribute of this name."""
    return attribute in _MODULE_ATTRIBUTES


def direct_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary in which a module stores its children."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer of the module itself is part of its state dict."""
    return buffer not in module._non_persistent_buffers_set


def state_without_tensors(module: nn.Module) -> tuple[dict[str, Any], Children, Tensors]:
    """Copy the attributes of a module, except for its parameters and buffers.

    Returns:
        (state, children, tensors). `state` has the attributes, with copies of the dictionaries of
        hooks and children. `children` is the copied dictionary of children in `state`. `tensors`
        has the module's parameters and buffers by name.
    """
    # torch has no list of a module's registries, but an empty module has each of them.
    registries = nn.Module().__dict__
    state: dict[str, Any] = {}
    for name, value in vars(module).items():
        is_registry = name in registries and isinstance(value, dict)
        state[name] = value.copy() if is_registry else value
    state["_parameters"] = {}
    state["_buffers"] = {}
    return state, state["_modules"], {**module._parameters, **module._buffers}


def hooks_of(module: nn.Module, kind: HookKind) -> dict[int, Any]:
    """Return the dictionary in which a module stores its hooks of one kind."""
    hooks: dict[int, Any] = getattr(module, f"_{kind}_hooks")
    return hooks


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a hook reads or changes the gradient of a parameter.

    Post-accumulate-grad hooks count too.
    """
    accumulation_hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return has_tensor_hooks(parameter) or bool(accumulation_hooks)


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has hooks that `register_hook` added."""
    return bool(tensor._backward_hooks)


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that initialises a module's own parameters, or None.

    In `nn.MultiheadAttention` and `nn.Transformer` it is private.
    """
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def is_compiled(module: nn.Module) -> bool:
    """Return True if `module.compile()` was called, so that calls run the compiled code."""
    return module._compiled_call_impl is not None


def scale_rates(scheduler: Any, ratios: Sequence[float]) -> None:
    """Multiply the learning rates that a scheduler stores, including those of inner schedulers.

    Args:
        scheduler: LR scheduler of torch, for example a `SequentialLR`.
        ratios: One factor per parameter group.
    """
    for name in ("base_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == len(ratios):
            scaled = [rate * ratio for rate, ratio in zip(rates, ratios, strict=True)]
            setattr(scheduler, name, scaled)

    for inner in getattr(scheduler, "_schedulers", ()):
        scale_rates(inner, ratios)
