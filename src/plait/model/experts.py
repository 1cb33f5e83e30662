"""Mixture-of-experts layers of a model: modules that hold experts, and routers.

They are recognised by the attributes that Transformers' classes set on their modules, not by
the names of modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.model.adapters import without_wrapper

SCORE_CORRECTION_BIAS = "e_score_correction_bias"
"""Transformers' name for the correction of a router's scores.

It is added where experts are chosen, not where their outputs are weighted.
"""
SPLIT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Model types whose other layers may be split by tensor parallelism.

Tests compare these families (`config.model_type`) with a single process.
"""
_MARKS = ("num_experts", "is_transposed", "has_gate")
"""Attributes that Transformers' `use_experts_implementation` sets on a module of experts."""


@dataclass(frozen=True)
class Experts:
    """Experts of one layer: a module whose parameters have one entry per expert in dimension 0."""

    name: str
    """Full name of the module.

    It is called with tokens [tokens, hidden], the experts of every token [tokens, k] as int64, and
    their weights [tokens, k].
    """
    count: int
    parameters: tuple[str, ...]
    """Full names (FQNs) of the parameters."""


@dataclass(frozen=True)
class Router:
    """Module that chooses experts for tokens."""

    name: str
    index: int = 0
    """Index of the logits [tokens, experts] in the tuple that the module returns."""


def find_experts(model: nn.Module) -> tuple[Experts, ...]:
    """Return all modules of experts, in model order."""
    experts = []
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        count = getattr(module, "num_experts", None)
        if not parameters or not isinstance(count, int):
            continue
        if not all(hasattr(module, mark) for mark in _MARKS):
            continue
        # Each parameter is [experts, ...]. Biases of experts are [experts, features].
        if all(p.ndim > 1 and p.shape[0] == count for p in parameters.values()):
            full_names = tuple(f"{name}.{leaf}" for leaf in parameters)
            experts.append(Experts(name, count, full_names))
    return tuple(experts)


def biased_routers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of routers that choose experts with a correction bias of shape [experts]."""
    names = []
    for name, module in model.named_modules():
        bias = dict(module.named_buffers(recurse=False)).get(SCORE_CORRECTION_BIAS)
        if bias is not None and bias.ndim == 1:
            names.append(name)
    return tuple(names)


def recorded_routers(model: nn.Module) -> tuple[Router, ...]:
    """Return the routers whose logits Transformers returns as `router_logits`.

    They are in the order in which they run. The tuple is empty if the model does not declare them.
    """
    declarations = dict.fromkeys(_declared_routers(model))
    routers = []
    for name, module in model.named_modules():
        for router_class, index in declarations:
            if isinstance(module, router_class):
                routers.append(Router(name, index))
    return tuple(routers)


def _declared_routers(model: nn.Module) -> Iterator[tuple[type[nn.Module], int]]:
    """Yield (router class, index of the logits in its output) from `_can_record_outputs`."""
    for module_class in {type(module) for module in model.modules()}:
        recorded: Any = getattr(module_class, "_can_record_outputs", None) or {}
        declarations = recorded.get("router_logits")
        if not isinstance(declarations, list):
            declarations = [declarations]
        for declaration in declarations:
            target = getattr(declaration, "target_class", declaration)
            # A declaration may be restricted to layers of some name, which is not supported.
            is_restricted = getattr(declaration, "layer_name", None) or getattr(
                declaration, "class_name", None
            )
            if isinstance(target, type) and not is_restricted:
                yield target, getattr(declaration, "index", 1)


def balance_coefficient(model: nn.Module) -> float | None:
    """Return the factor of the routers' balance loss in a Transformers model.

    The model adds this loss to its own if `output_router_logits` is set. The result is None for a
    class that adds no balance loss.
    """
    coefficient = getattr(model, "router_aux_loss_coef", None)
    # Some models of several parts read the coefficient from the text configuration in the forward.
    if coefficient is None and _takes_router_logits(model):
        coefficient = getattr(_text_config(model), "router_aux_loss_coef", None)
    return float(coefficient) if isinstance(coefficient, int | float) else None


def enables_balance_loss(model: nn.Module) -> bool:
    """Return True if the configuration of a model or of its text part enables the balance loss."""
    if balance_coefficient(model) is None:
        return False
    configs = (getattr(model, "config", None), _text_config(model))
    return any(getattr(config, "output_router_logits", False) for config in configs)


def disable_balance_loss(model: nn.Module) -> None:
    """Disable the balance loss in the configuration of a copy of a model."""
    config: Any
    for config in (getattr(model, "config", None), _text_config(model)):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False


def _text_config(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "text_config", None)


def _takes_router_logits(model: nn.Module) -> bool:
    # The forward of a PEFT model takes any keyword.
    forward = without_wrapper(model).forward
    return "output_router_logits" in inspect.signature(forward).parameters


def chosen_experts(output: Any) -> torch.Tensor | None:
    """Return the chosen experts of every token [tokens, k] from a router's output.

    The result is None if the output contains no such tensor.
    """
    leaves = output if isinstance(output, tuple | list) else (output,)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64 and leaf.ndim == 2:
            return leaf
    return None
