"""What a module and a parameter own, as torch keeps it: dictionaries in place, hooks that a user
has put on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module owns itself; what is put into the dictionary is the module's."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The same of buffers."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The same of modules."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether one of a module's own buffers is in its state dict."""
    return buffer not in module._non_persistent_buffers_set


Tensors = dict[str, torch.Tensor | None]
Children = dict[str, nn.Module | None]


def state_without_tensors(module: nn.Module) -> tuple[dict[str, Any], Children, Tensors]:
    """(a copy of a module's attributes, without parameters and buffers, whose dictionaries are the
    copy's own; the one among them that holds its modules; those parameters and buffers by name).
    """
    registries = nn.Module().__dict__
    found = {
        name: value.copy() if name in registries and isinstance(value, dict) else value
        for name, value in vars(module).items()
    }
    found |= {"_parameters": {}, "_buffers": {}}
    return found, found["_modules"], {**module._parameters, **module._buffers}


HookKind = Literal["forward_pre", "forward", "backward_pre", "backward"]


def hooks_of(module: nn.Module, kind: HookKind) -> dict[int, Any]:
    """The hooks of a module: the dictionary in which it keeps them, which changes with them."""
    found: dict[int, Any] = getattr(module, f"_{kind}_hooks")
    return found


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook reads or changes a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return whether `register_hook` put a hook on the gradient of a tensor."""
    return bool(tensor._backward_hooks)


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """What initialises a module's own parameters: torch's attention and Transformer hide theirs."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called: its call runs what was made of it."""
    return module._compiled_call_impl is not None


DROPOUTS = nn.modules.dropout._DropoutNd
"""All of torch's modules that drop something out."""
