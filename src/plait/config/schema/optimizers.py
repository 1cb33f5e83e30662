"""Parameters of each optimizer: DeepSpeed's, all optimizers of torch, and classes by path.

This module checks names and values; `plait.optim.optimizer` builds the optimizers. Parameters of
torch's optimizers are read from the signatures of the installed torch, so new ones need no change
here. The parameters that DeepSpeed 0.19.8 adds are a table.

A problem is a string of the form `rule; remedy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch.optim
from pydantic import TypeAdapter

from plait.config.values import Flag, Fraction, NotNegative, parameters, value_problems
from plait.names import suggest_names

AUTO: Mapping[str, Any] = MappingProxyType(
    {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
)
"""Values that replace `"auto"`: the defaults of Hugging Face's `TrainingArguments`, with which its
DeepSpeed integration replaces it.
"""

LION: Mapping[str, Any] = MappingProxyType({"lr": 1e-3, "betas": (0.9, 0.999)})
"""Defaults of Lion, which are DeepSpeed's. lion-pytorch, which implements it, has lr 1e-4 and betas
(0.9, 0.99).
"""

_TORCH = {
    name: member
    for name, member in vars(torch.optim).items()
    if isinstance(member, type)
    and issubclass(member, torch.optim.Optimizer)
    and member is not torch.optim.Optimizer
}
"""Optimizers of the installed torch."""
_REMOVED = "DeepSpeed removed it in 0.19, and it never combined with ZeRO 2 and 3; use AdamW"
_MUP = (
    "its learning rates follow the base shapes that mup attaches to parameters, and sharding"
    " replaces the parameters; use AdamW or SGD"
)
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("OneBitAdam", "OneBitLamb", "ZeroOneAdam"), _REMOVED),
        **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), _MUP),
        "Lamb": (
            "torch has no LAMB, and pytorch-optimizer's fails on sharded parameters; use AdamW or"
            " Lion"
        ),
        "LBFGS": (
            "it evaluates the loss several times a step, and one step here is one pass over the"
            " batch; use AdamW"
        ),
        "SparseAdam": (
            "it takes sparse gradients only, and gradients are reduced densely; use AdamW"
        ),
    }
)
"""Types that cannot be used: rule and remedy by type."""

NOT_SHARDED: Mapping[str, str] = MappingProxyType(
    {"Adafactor": "it takes norms of full parameters", "Rprop": "it writes through an index"}
)
"""Optimizers of torch 2.13 that fail at their first step on sharded parameters: reason by type."""

MUON_PARAMS = frozenset(
    {
        "lr",
        "muon_lr",
        "adam_lr",
        "momentum",
        "weight_decay",
        "nesterov",
        "ns_coefficients",
        "ns_steps",
        "adjust_lr_fn",
        "betas",
        "eps",
    }
)
"""Parameters of Muon: DeepSpeed's, and those of torch's Muon that do not contradict them. `betas`
and `eps` apply to the parameters that AdamW updates.
"""

_DEEPSPEED_ADAM = frozenset(
    {"adam_w_mode", "torch_adam", "bias_correction", "set_grad_none", "fp32_optimizer_states"}
)
_DEEPSPEED_PARAMS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "Adam": _DEEPSPEED_ADAM,
        "AdamW": _DEEPSPEED_ADAM,
        "Muon": frozenset({"ns_method", "per_head_muon"}),
        "Lion": frozenset({"set_grad_none"}),
    }
)
"""Parameters that DeepSpeed adds to an optimizer, by type."""
SINGLE_VALUED_PARAMS: Mapping[str, tuple[object, str, str]] = MappingProxyType(
    {
        "bias_correction": (
            True,
            "torch's Adam always corrects the bias of its moments",
            "leave it out, and lengthen the warm-up",
        ),
        "set_grad_none": (True, "gradients are freed between steps", "leave it out"),
        "fp32_optimizer_states": (
            True,
            "optimizer states have the dtype of the master weights",
            "leave it out, and build the model in that dtype (in `plait train`: model.dtype)",
        ),
        "ns_method": (
            "standard",
            "torch's Muon multiplies in the standard order, which is the same iteration",
            "leave it out",
        ),
        "per_head_muon": (False, "torch's Muon orthogonalises full matrices", "leave it out"),
    }
)
"""Parameters of DeepSpeed with a single supported value: (value, reason, remedy) by name. They are
dropped when the optimizer is built.
"""

_FLAG = TypeAdapter(Flag)
_RANGES: Mapping[str, TypeAdapter[Any]] = MappingProxyType(
    {
        **{
            name: TypeAdapter(NotNegative)
            for name in ("lr", "muon_lr", "adam_lr", "weight_decay", "momentum")
        },
        "eps": TypeAdapter(NotNegative | tuple[NotNegative | None, NotNegative]),
        "betas": TypeAdapter(tuple[Fraction, Fraction]),
        **dict.fromkeys(_DEEPSPEED_ADAM, _FLAG),
        "per_head_muon": _FLAG,
    }
)
"""Valid values of the common parameters. torch's signatures contain types, but no ranges."""


def canonical_type(kind: str) -> str:
    """Return the usual spelling of a type. The case of known names is ignored, as in DeepSpeed."""
    # The usual spellings are those of torch, and of DeepSpeed for types that torch does not have.
    by_lower = {name.lower(): name for name in (*REFUSED, *_TORCH, "Lion")}
    return by_lower.get(kind.lower(), kind)


def torch_class(kind: str) -> type[torch.optim.Optimizer]:
    """Return a class of `torch.optim`.

    Raises:
        KeyError: torch has no such optimizer.
    """
    return _TORCH[kind]


def is_path(kind: str) -> bool:
    """Return True if a type is the import path of a class (`torchao.optim.AdamW8bit`)."""
    return "." in kind and all(part.isidentifier() for part in kind.split("."))


def settable_params(optimizer: Callable[..., object]) -> frozenset[str]:
    """Return the parameters of an optimizer class that a file can set."""
    # `differentiable` is for gradients through a step, which training never computes.
    return frozenset(parameters(optimizer)) - {"params", "differentiable"}


def accepted(kind: str) -> frozenset[str] | None:
    """Return the names of the parameters of a type, or None if they are not known.

    They are not known for an import path, because the class is imported only when the optimizer
    is built.
    """
    if is_path(kind):
        return None
    extra = _DEEPSPEED_PARAMS.get(kind, frozenset())
    if kind == "Lion":
        return extra | {"lr", "betas", "weight_decay"}
    if kind == "Muon":
        return extra | MUON_PARAMS

    names = settable_params(torch_class(kind))
    if kind == "Adam":
        # DeepSpeed's name for it is `adam_w_mode`.
        names -= {"decoupled_weight_decay"}
    return extra | names


def kind_problems(kind: str) -> list[str]:
    """Return the problems of a type, or an empty list if it is supported."""
    if kind in REFUSED:
        return [f"it cannot be used: {REFUSED[kind]}"]
    if kind not in (*_TORCH, "Lion") and not is_path(kind):
        return [
            f"`{kind}` is neither an optimizer of DeepSpeed or torch nor a path of a class;"
            f" {suggest_names(kind, (*_TORCH, 'Lion'))}"
        ]
    return []


def param_problems(kind: str, params: Mapping[str, Any]) -> list[str]:
    """Return the problems of the parameters of a known type."""
    names = accepted(kind)
    problems = []
    if names is not None:
        problems = [_unknown_param(kind, name, names) for name in params if name not in names]

    for name, value in params.items():
        if value == "auto" and name not in AUTO:
            problems.append(f"`{name}` is `auto`, and nothing determines its value; write one")
        # A class of a library may have a parameter of the same name and another meaning.
        elif (
            name in SINGLE_VALUED_PARAMS
            and value != SINGLE_VALUED_PARAMS[name][0]
            and names is not None
        ):
            supported, reason, remedy = SINGLE_VALUED_PARAMS[name]
            problems.append(f"`{name}` can only be {supported!r}, because {reason}; {remedy}")
    return problems + value_problems(convert, kind, params)


def state_problems(kind: str, states: str | None, params: Mapping[str, Any]) -> list[str]:
    """Return the problems of `optimizer.states` with a type and its parameters.

    Args:
        kind: Known type of the optimizer.
        states: Dtype of the moments. None for the optimizer's own dtype.
        params: Parameters of the optimizer.
    """
    if states is None:
        return []
    if kind not in ("Adam", "AdamW"):
        return [
            f'`states` is "{states}", which is implemented for Adam and AdamW, but the type is'
            f" {kind}; leave `states` out"
        ]

    # Plait's own update computes with low-precision moments, and these are all of its parameters.
    supported = {
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "adam_w_mode",
        "torch_adam",
        *SINGLE_VALUED_PARAMS,
    }
    problems: list[str] = []
    for name, value in params.items():
        if name not in supported and value not in (False, None):
            problems.append(
                f"`{name}` is a parameter of torch's kernels, which do not take `states` ="
                f' "{states}"; leave one of them out'
            )
    return problems


def _unknown_param(kind: str, name: str, names: frozenset[str]) -> str:
    if name == "max_grad_norm":
        return (
            "`max_grad_norm` is not a parameter of an optimizer; set gradient_clipping at the top"
            " of the file"
        )
    return f"`{name}` is not a parameter of {kind}; {suggest_names(name, names)}"


def convert(kind: str, name: str, value: object) -> object:
    """Convert a value from JSON or YAML to the type that torch expects.

    Lists become tuples, and `1e-4`, which YAML reads as text, becomes a number. `auto` is returned
    unchanged.

    Raises:
        pydantic.ValidationError: The value is invalid for the optimizer.
    """
    if value == "auto":
        return value
    # The range first: the signature of torch has only the type.
    if name in _RANGES:
        value = _RANGES[name].validate_python(value)

    constructor: Callable[..., object] | None = _TORCH.get(kind)
    if constructor is None:
        return value
    signature = parameters(constructor)
    if name not in signature:
        return value
    return signature[name].values.validate_python(value)
