"""Which modules of a block are its MLP: they take one tensor of tokens and compute every token from
itself alone, so that tokens may be computed in any number of parts.

That a module does so is not read from its name: it runs alone on the CPU with random weights, all
tokens at once and one by one. Experts of Transformers' models count too, once their router has
chosen: they are dropless. Decided on the model of one process, before it is split.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from plait._torch.modules import DROPOUTS, HookKind, hooks_of
from plait.errors import ModelError
from plait.model.adapters import adapted_layers
from plait.model.experts import find_experts
from plait.model.guess import signature
from plait.model.heads import count_attributes
from plait.model.layers import in_features, is_linear, out_features
from plait.model.sequence import is_inside
from plait.model.split_check import takes_one_tensor

_SIZES = ("in_features", "out_features", "nf", "nx", "hidden_size", "intermediate_size")
"""Attributes of modules that say how wide their parameters are."""
_LARGE = 2**20
"""Parameters of a module above which a narrower one is tried in its place."""
_TOKENS = (2, 8)


@dataclass(frozen=True)
class TokenModules:
    """The modules of a model whose tokens may be computed in parts, by name."""

    mlps: tuple[str, ...]
    """Called with tokens [.., tokens, hidden] alone."""
    experts: tuple[str, ...]
    """Called as `model.experts.Experts` is."""


def find_mlps(model: nn.Module, blocks: Sequence[str], *, setting: str) -> TokenModules:
    """Those of all blocks. Raises ModelError, which begins with `setting`, for a block that widens
    tokens anywhere else but in attention, and for one whose MLP has hooks inside, which would be
    given parts.
    """
    experts = tuple(one.name for one in find_experts(model))
    adapted = adapted_layers(model)
    tried: dict[object, str | None] = {}
    mlps: list[str] = []
    for block in blocks:
        reasons: dict[str, str] = {}
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if (
                name == block
                or is_inside(name, (*mlps, *experts, *adapted))
                or name in (*experts, *adapted)
            ):
                continue
            if (
                _attends(name, module)
                or any(is_inside(one, (name,)) for one in experts)
                or len(list(_layers(module))) < 2
            ):
                continue
            key = signature(module)
            if key not in tried:
                tried[key] = _why_not(module)
            reason = tried[key]
            if reason is None:
                mlps.append(name)
            else:
                reasons[name] = reason
        _refuse_others(model, block, (*mlps, *experts), reasons, setting)
    for name in mlps:
        _refuse_hooks(model, name, setting)
    return TokenModules(tuple(mlps), tuple(name for name in experts if is_inside(name, blocks)))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if is_linear(part))


def _attends(name: str, module: nn.Module) -> bool:
    return (
        "attention" in type(module).__name__.lower()
        or name.rpartition(".")[2].endswith("attn")
        or bool(count_attributes(module))
    )


def _refuse_others(
    model: nn.Module, block: str, found: Sequence[str], reasons: dict[str, str], setting: str
) -> None:
    inside = dict(model.get_submodule(block).named_modules(prefix=block))
    attentions = [
        name for name, module in inside.items() if name != block and _attends(name, module)
    ]
    for name, module in inside.items():
        if name in (*found, *attentions) or is_inside(name, (*found, *attentions)):
            continue
        widens = is_linear(module) and out_features(module) >= in_features(module)
        if widens or any(parameter.ndim > 2 for parameter in module.parameters(recurse=False)):
            owner = next((other for other in reasons if is_inside(name, (other,))), None)
            kind = type(model.get_submodule(owner if owner is not None else block)).__name__
            reason = (
                reasons[owner]
                if owner is not None
                else "the block computes it itself, and has no MLP as a module of its own"
            )
            raise ModelError(
                f"{setting}: {name} is not computed in tiles, because of {owner or block} ({kind}):"
                f" {reason}; use 0"
            )
    if not any(is_inside(name, (block,)) for name in found):
        raise ModelError(
            f"{setting}: {block} ({type(model.get_submodule(block)).__name__}) has no MLP that is"
            " known; use 0"
        )


def _refuse_hooks(model: nn.Module, name: str, setting: str) -> None:
    for inner, module in model.get_submodule(name).named_modules(prefix=name):
        if inner != name and any(hooks_of(module, kind) for kind in get_args(HookKind)):
            raise ModelError(
                f"{setting}: {inner} has a hook, which would be given a tile of the tokens; put it"
                f" on {name}, or use 0"
            )


def _why_not(module: nn.Module) -> str | None:
    """Why the module does not compute every token from itself alone, for all that is known; None
    where it does.
    """
    if not takes_one_tensor(module):
        return (
            "it takes more than one tensor, or has parameters of its own, so it cannot be tried"
            " alone"
        )
    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            tried = _narrow_copy(module, generator)
            for width in dict.fromkeys(in_features(layer) for layer in _layers(tried)):
                found = _tokens_alone(tried, width, generator)
                if found != "other":
                    return found
        except Exception as error:  # unknown code that cannot run alone proves nothing
            return f"it cannot be tried alone ({type(error).__name__}: {error})"
    return "it does not return a tensor of its input's shape"


def _tokens_alone(module: nn.Module, width: int, generator: torch.Generator) -> str | None:
    rows, length = _TOKENS
    x = torch.randn(rows, length, width, dtype=torch.float64, generator=generator)
    x[1] = x[0, 0]  # a limit to the tokens of anything inside is reached by equal ones
    before = _attributes(module)
    try:
        whole = module(x.clone())
    except RuntimeError:
        return "other"  # another of its widths is that of its input
    if not isinstance(whole, torch.Tensor) or whole.shape != x.shape:
        return "other"
    changed = next(
        (
            name
            for name, value in _attributes(module).items()
            if name not in before or before[name] is not value
        ),
        None,
    )
    if changed is not None:
        return f"a call changes its {changed}"
    alone = torch.stack(
        [
            torch.cat([module(x[row : row + 1, at : at + 1].clone()) for at in range(length)], 1)[0]
            for row in range(rows)
        ]
    )
    if not bool(((whole - alone).abs().max() <= 1e-9 * whole.abs().max()).item()):
        return "a token's output follows from other tokens too"
    return None


def _attributes(module: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, part in module.named_modules():
        own = {**vars(part), **vars(part)["_buffers"]}
        found |= {
            f"{name}.{key}".lstrip("."): value
            for key, value in own.items()
            if not key.startswith("_")
        }
    return found


def _narrow_copy(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """In training mode without dropout, in float64, with random parameters. A large module's are
    narrower by one factor.
    """
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    factor = 1
    if sum(parameter.numel() for parameter in module.parameters()) > _LARGE:
        common = math.gcd(*(size for size in sizes if size >= 64))
        factor = max(
            part
            for part in range(1, common + 1)
            if common % part == 0 and min(s for s in sizes if s >= 64) // part >= 4
        )

    def narrow(size: int) -> int:
        return size // factor if size >= 64 else size

    memo: dict[int, object] = {id(buffer): buffer.detach().to("cpu") for buffer in module.buffers()}
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            raise TypeError(f"parameters of {parameter.dtype}")
        shape = tuple(map(narrow, parameter.shape))
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
        memo[id(parameter)] = nn.Parameter(
            values * (min(shape) ** -0.5 if len(shape) > 1 else 1.0), requires_grad=False
        )
    copied = copy.deepcopy(module, memo).train().double()
    for part in copied.modules():
        if isinstance(part, DROPOUTS):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
            elif name in _SIZES and type(value) is int:
                setattr(part, name, narrow(value))
    return copied
