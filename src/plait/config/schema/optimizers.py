"""The parameters of each optimizer, and which ones cannot be used and why: DeepSpeed's names, every
optimizer of torch, and classes by path.

Pure: this checks names and values, `plait.optim.optimizer` builds. Parameters of torch's optimizers
are read from the installed torch, so a new one is known without a change here; what DeepSpeed
0.19.8 adds to them is a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch.optim
from pydantic import TypeAdapter

from plait.config.values.names import instead
from plait.config.values.numbers import Flag, Fraction, NotNegative
from plait.config.values.signatures import parameters, value_problems

AUTO: Mapping[str, Any] = MappingProxyType(
    {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
)
"""What `"auto"` means: the defaults of Hugging Face's `TrainingArguments`, which its DeepSpeed
integration fills in.
"""

LION: Mapping[str, Any] = MappingProxyType({"lr": 1e-3, "betas": (0.9, 0.999)})
"""Lion's defaults, which are DeepSpeed's. lion-pytorch, which runs it, has lr 1e-4 and betas (0.9,
0.99).
"""

_TORCH = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type)
    and issubclass(found, torch.optim.Optimizer)
    and found is not torch.optim.Optimizer
}
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
"""Types that are known and cannot be used: the rule and the remedy."""

NOT_SHARDED: Mapping[str, str] = MappingProxyType(
    {"Adafactor": "it takes norms of full parameters", "Rprop": "it writes through an index"}
)
"""torch's optimizers that fail at their first step on shards, in torch 2.13, and why."""

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
"""DeepSpeed's, and those of torch's Muon that keep their meaning beside them. `betas` and `eps` are
those of the AdamW half.
"""

_DEEPSPEED_ADAM = frozenset(
    {"adam_w_mode", "torch_adam", "bias_correction", "set_grad_none", "fp32_optimizer_states"}
)
_EXTRA: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "Adam": _DEEPSPEED_ADAM,
        "AdamW": _DEEPSPEED_ADAM,
        "Muon": frozenset({"ns_method", "per_head_muon"}),
        "Lion": frozenset({"set_grad_none"}),
    }
)
ONLY: Mapping[str, tuple[object, str, str]] = MappingProxyType(
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
            "set model.dtype instead",
        ),
        "ns_method": (
            "standard",
            "torch's Muon multiplies in the standard order, which is the same iteration",
            "leave it out",
        ),
        "per_head_muon": (False, "torch's Muon orthogonalises full matrices", "leave it out"),
    }
)
"""Parameters of DeepSpeed that have one possible value here: the value, why, and the remedy for
another. The engine drops them.
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
"""What the common parameters can be, beyond the type in torch's signature."""


def canonical(kind: str) -> str:
    """The usual spelling of a type: DeepSpeed ignores the case of its own names, and so does this.
    Others stay as they are.
    """
    by_lower = {name.lower(): name for name in (*REFUSED, *_TORCH, "Lion")}
    return by_lower.get(kind.lower(), kind)


def torch_class(kind: str) -> type[torch.optim.Optimizer]:
    """The class in `torch.optim`. Raises KeyError for a type that torch does not have."""
    return _TORCH[kind]


def is_path(kind: str) -> bool:
    """Whether a type names a class by its import path (`torchao.optim.AdamW8bit`)."""
    return "." in kind and all(part.isidentifier() for part in kind.split("."))


def settable(optimizer: Callable[..., object]) -> frozenset[str]:
    """The parameters of a class that a file can set. `differentiable` is for gradients through a
    step, which training never takes.
    """
    return frozenset(parameters(optimizer)) - {"params", "differentiable"}


def accepted(kind: str) -> frozenset[str] | None:
    """The parameters of a type; None for a path, whose class is only imported when it is built."""
    if is_path(kind):
        return None
    extra = _EXTRA.get(kind, frozenset())
    if kind == "Lion":
        return extra | {"lr", "betas", "weight_decay"}
    if kind == "Muon":
        return extra | MUON_PARAMS
    # For Adam this is `adam_w_mode`, under DeepSpeed's name.
    return extra | settable(torch_class(kind)) - (
        {"decoupled_weight_decay"} if kind == "Adam" else set()
    )


def kind_problems(kind: str) -> list[str]:
    """Why a type cannot be used; empty for one that can. Each `rule; remedy`."""
    if kind in REFUSED:
        return [f"it cannot be used: {REFUSED[kind]}"]
    if kind not in (*_TORCH, "Lion") and not is_path(kind):
        return [
            f"`{kind}` is neither an optimizer of DeepSpeed or torch nor a path of a class;"
            f" {instead(kind, (*_TORCH, 'Lion'))}"
        ]
    return []


def param_problems(kind: str, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters of a known type, whatever the model. Each `rule;
    remedy`.
    """
    names = accepted(kind)
    found = [
        _unknown(kind, name, names) for name in params if names is not None and name not in names
    ]
    for name, value in params.items():
        if value == "auto" and name not in AUTO:
            found.append(f"`{name}` is `auto`, and nothing determines its value; write one")
        elif name in ONLY and value != ONLY[name][0] and names is not None:
            only, why, remedy = ONLY[name]
            found.append(f"`{name}` can only be {only!r}, because {why}; {remedy}")
    return found + value_problems(convert, kind, params)


def state_problems(kind: str, states: str | None, params: Mapping[str, Any]) -> list[str]:
    """Why states of a form other than the optimizer's own cannot be had; empty where they can. Each
    `rule; remedy`.
    """
    if states is None:
        return []
    if kind not in ("Adam", "AdamW"):
        return [
            f'`states` is "{states}", which is written for Adam and AdamW, and this is {kind};'
            " leave `states` out"
        ]
    taken = {"lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam", *ONLY}
    return [
        f'`{name}` is a parameter of torch\'s kernels, which do not take `states` = "{states}";'
        " leave one of them out"
        for name, value in params.items()
        if name not in taken and value not in (False, None)
    ]


def _unknown(kind: str, name: str, names: frozenset[str]) -> str:
    if name == "max_grad_norm":
        return (
            "`max_grad_norm` is not a parameter of an optimizer; set gradient_clipping at the top"
            " of the file"
        )
    return f"`{name}` is not a parameter of {kind}; {instead(name, names)}"


def convert(kind: str, name: str, value: object) -> object:
    """A value from JSON or YAML as torch wants it: lists become tuples, and `1e-4`, which YAML
    reads as text, a number. Raises pydantic's ValidationError for a value that the optimizer cannot
    take.
    """
    if value == "auto":
        return value
    if name in _RANGES:
        value = _RANGES[name].validate_python(value)
    build: Callable[..., object] | None = _TORCH.get(kind)
    signature = parameters(build) if build is not None else {}
    return signature[name].values.validate_python(value) if name in signature else value
