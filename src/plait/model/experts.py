"""Mixture-of-experts layers of a model: which modules hold experts, and which route tokens to them.

Read from what Transformers' classes keep on their modules and say of themselves, not from names of
modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BIAS = "e_score_correction_bias"
"""Transformers' name for what is added to a router's scores where experts are chosen, and not where
they are weighted.
"""
SPLIT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""`config.model_type` of models that are compared with one process where tensor parallelism splits
their other layers.
"""
_MARKS = ("num_experts", "is_transposed", "has_gate")
"""Attributes that Transformers' `use_experts_implementation` gives to a module of experts."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer: parameters whose first dimension counts experts."""

    name: str
    """Of the module, called with (tokens [tokens, hidden], experts of every token [tokens, k]
    int64, their weights [tokens, k]).
    """
    count: int
    parameters: tuple[str, ...]
    """Full names (FQNs)."""


@dataclass(frozen=True)
class Router:
    """A module that chooses experts for tokens."""

    name: str
    index: int = 0
    """Where its logits [tokens, experts] are in the tuple that it returns."""


def find_experts(model: nn.Module) -> tuple[Experts, ...]:
    """All modules of experts, in model order."""
    found = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        count = getattr(module, "num_experts", None)
        if (
            not own
            or not isinstance(count, int)
            or not all(hasattr(module, mark) for mark in _MARKS)
        ):
            continue
        if all(parameter.ndim > 1 and parameter.shape[0] == count for parameter in own.values()):
            found.append(Experts(name, count, tuple(f"{name}.{leaf}" for leaf in own)))
    return tuple(found)


def biased_routers(model: nn.Module) -> tuple[str, ...]:
    """Routers whose choice is corrected by a bias of their own [experts]."""
    found = []
    for name, module in model.named_modules():
        bias = dict(module.named_buffers(recurse=False)).get(BIAS)
        if bias is not None and bias.ndim == 1:
            found.append(name)
    return tuple(found)


def recorded_routers(model: nn.Module) -> tuple[Router, ...]:
    """The routers whose logits Transformers returns as `router_logits`, in the order in which they
    run; none where that is not known.
    """
    specs = dict.fromkeys(_recorders(model))
    found = []
    for name, module in model.named_modules():
        for kind, index in specs:
            if isinstance(module, kind):
                found.append(Router(name, index))
    return tuple(found)


def _recorders(model: nn.Module) -> Iterator[tuple[type[nn.Module], int]]:
    for kind in {type(module) for module in model.modules()}:
        spec: Any = (getattr(kind, "_can_record_outputs", None) or {}).get("router_logits")
        for one in spec if isinstance(spec, list) else [spec]:
            target = getattr(one, "target_class", one)
            narrowed = getattr(one, "layer_name", None) or getattr(one, "class_name", None)
            if isinstance(target, type) and not narrowed:
                yield target, getattr(one, "index", 1)


def balance_coefficient(model: nn.Module) -> float | None:
    """What Transformers' class multiplies the balance loss of its routers with, which it adds to
    its own loss where `output_router_logits` is set; None for a class that adds none.
    """
    own = getattr(model, "router_aux_loss_coef", None)
    # some models of several parts read it in the forward
    if own is None and _takes_router_logits(model):
        own = getattr(_text_config(model), "router_aux_loss_coef", None)
    return float(own) if isinstance(own, int | float) else None


def wants_balance_loss(model: nn.Module) -> bool:
    """Whether the configuration of the model, or of its text part, asks for that loss."""
    asks = (
        getattr(config, "output_router_logits", False)
        for config in (getattr(model, "config", None), _text_config(model))
    )
    return balance_coefficient(model) is not None and any(asks)


def _text_config(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "text_config", None)


def _takes_router_logits(model: nn.Module) -> bool:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return "output_router_logits" in inspect.signature(base.forward).parameters


def chosen_experts(output: Any) -> torch.Tensor | None:
    """The experts of every token [tokens, k] in what a router returns; None where nothing there is
    that.
    """
    leaves = output if isinstance(output, tuple | list) else (output,)
    return next(
        (
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64 and leaf.ndim == 2
        ),
        None,
    )
