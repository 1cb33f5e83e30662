"""Low-rank adapters on parameters (PEFT's `target_parameters`), such as those of experts.

PEFT's wrapper of a module adds the product of two low-rank matrices to one parameter of the module.
In every forward the wrapper registers a parametrization, which moves the parameter and counts as a
write to the parameter. Gathered parameters of `fully_shard` support neither, and a rank of expert
parallelism has only some of the experts. The forwards of this module compute the same sum without a
parametrization.

Wrappers are recognised by the class names of PEFT, which need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait._torch.modules import direct_parameters
from plait.model.adapters import adapted_parameters
from plait.parallel.hooks import StepHook
from plait.parallel.tensor.styles import replace_values

Forward = Callable[..., Any]


@dataclass(frozen=True)
class AdaptedForward:
    """Forward of a module that has adapters on some of its parameters."""

    module: nn.Module
    original: Forward
    """Forward of the module without adapters."""
    wrappers: tuple[Any, ...]
    """PEFT's wrappers of the module, one per adapted parameter."""
    first_expert: int
    """Index of this rank's first expert."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with the weight updates of the adapters added to its parameters."""
        parameters: dict[str, torch.Tensor] = {}
        attributes: dict[str, torch.Tensor] = {}
        for wrapper in self.wrappers:
            name = wrapper.parameter_name
            # The dispatch of expert parallelism has replaced parameters with attributes.
            values = parameters if name in direct_parameters(self.module) else attributes
            values[name] = self._adapted(wrapper, getattr(self.module, name))
        with replace_values(self.module, parameters, **attributes):
            return self.original(*args, **kwargs)

    def _adapted(self, wrapper: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return a parameter with the weight updates of its wrapper's active adapters."""
        if wrapper.disable_adapters or wrapper.merged:
            return weight
        for adapter in wrapper.active_adapters:
            if adapter not in wrapper.lora_A:
                continue
            if wrapper.num_experts == 1:
                weight = weight + wrapper.get_delta_weight(adapter)
                continue
            # [experts, rows, r] and [experts, r, columns]
            left, right, scale = wrapper.get_delta_factors(adapter)
            left = left.narrow(0, self.first_expert, len(weight))
            right = right.narrow(0, self.first_expert, len(weight))
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=scale)
        return weight


@dataclass(frozen=True)
class WrapperForward:
    """Forward of a PEFT wrapper whose module already applies the adapter."""

    wrapper: Any
    original: Forward

    def __call__(self, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        if self.wrapper.merged or adapter_names is not None:
            # PEFT unmerges an adapter that was disabled, and refuses a batch of several adapters.
            return self.original(*args, adapter_names=adapter_names, **kwargs)
        return self.wrapper.base_layer(*args, **kwargs)


class AdaptedParameters(StepHook):
    """Hook that restores the original forwards when the model is released.

    Args:
        modules: Modules with adapted parameters, and their wrappers.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules

    def release(self) -> None:
        """Restore the original forwards."""
        for module in self._modules:
            if isinstance(module.__dict__.get("forward"), AdaptedForward | WrapperForward):
                del module.__dict__["forward"]


def install(model: nn.Module, *, rank: int, ranks: int) -> AdaptedParameters | None:
    """Replace the forwards of modules with adapted parameters and of their wrappers.

    Args:
        model: The model.
        rank: Index of this rank in expert parallelism.
        ranks: Number of ranks of expert parallelism.

    Returns:
        The hook that restores the original forwards, or None if the model has no adapted
        parameters.
    """
    wrappers_of: dict[nn.Module, list[Any]] = {}
    for wrapper in adapted_parameters(model).values():
        wrappers_of.setdefault(wrapper.get_base_layer(), []).append(wrapper)
    if not wrappers_of:
        return None

    for module, wrappers in wrappers_of.items():
        experts_per_rank = wrappers[0].num_experts // ranks
        module.forward = AdaptedForward(
            module, module.forward, tuple(wrappers), first_expert=rank * experts_per_rank
        )
        for wrapper in wrappers:
            wrapper.forward = WrapperForward(wrapper, wrapper.forward)
    return AdaptedParameters([*wrappers_of, *(w for group in wrappers_of.values() for w in group)])
