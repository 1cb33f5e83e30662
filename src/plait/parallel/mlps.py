"""Search for the MLPs of a model's blocks, which can compute their tokens in tiles.

An MLP takes one tensor of tokens, and the output for a token depends on that token only. This is
tested and not concluded from names: a copy of the module runs on the CPU with random weights, first
on all tokens at once and then on each token separately. Experts of Transformers' models count as
MLPs as well, because the router runs before them and they drop no tokens. The search runs on the
model of one process, before it is split.
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
from plait.model.guess import signature, takes_one_tensor
from plait.model.heads import count_attributes
from plait.model.layers import count_parameters, in_features, is_linear, out_features
from plait.model.sequence import is_inside
from plait.parallel.activations.block_state import BlockState

_SIZE_ATTRIBUTES = (
    "in_features",
    "out_features",
    "nf",
    "nx",
    "hidden_size",
    "intermediate_size",
)
"""Attributes with the sizes of a module's parameters, which a narrow copy must change."""
_MAX_PARAMETERS = 2**20
"""Largest number of parameters of a module that is tested at its full width."""
_MIN_NARROWED_SIZE = 64
"""Smallest size of a dimension that is narrowed."""
_ROWS = 2
_LENGTH = 8
_WRONG_INPUT = "the input has another width"


@dataclass(frozen=True)
class TokenModules:
    """Names of a model's modules that can compute their tokens in tiles."""

    mlps: tuple[str, ...]
    """Modules that are called with a single tensor of tokens [..., tokens, hidden]."""
    experts: tuple[str, ...]
    """Modules that are called as `model.experts.Experts` is."""


def find_mlps(model: nn.Module, blocks: Sequence[str], *, setting: str) -> TokenModules:
    """Return the MLPs and experts of all blocks.

    Args:
        model: The model of one process, before it is distributed.
        blocks: Names of its repeated blocks.
        setting: Name of the configuration field that needs the MLPs, for messages.

    Raises:
        ModelError: A layer outside attention and MLPs has an output at least as wide as its input,
            or a module inside an MLP has a hook. (The hook would receive a tile of the tokens.)
    """
    experts = tuple(layer.name for layer in find_experts(model))
    adapted = adapted_layers(model)
    reasons_of_kinds: dict[object, str | None] = {}
    mlps: list[str] = []
    for block in blocks:
        reasons: dict[str, str] = {}
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if name == block or is_inside(name, (*mlps, *experts, *adapted)):
                continue
            if name in experts or name in adapted or not _is_candidate(name, module, experts):
                continue
            # Blocks are alike, so each kind of module is tested once.
            key = signature(module)
            if key not in reasons_of_kinds:
                reasons_of_kinds[key] = _reason_against(module)
            reason = reasons_of_kinds[key]
            if reason is None:
                mlps.append(name)
            else:
                reasons[name] = reason
        _refuse_other_wide_layers(model, block, (*mlps, *experts), reasons, setting)

    # A module that computes tiles calls its children once per tile.
    for name in mlps:
        _refuse_hooks(model, name, setting)
    return TokenModules(tuple(mlps), tuple(name for name in experts if is_inside(name, blocks)))


def _is_candidate(name: str, module: nn.Module, experts: Sequence[str]) -> bool:
    if _is_attention(name, module):
        return False
    if any(is_inside(layer, (name,)) for layer in experts):
        return False
    return len(list(_linear_layers(module))) >= 2


def _linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    return (submodule for submodule in module.modules() if is_linear(submodule))


def _is_attention(name: str, module: nn.Module) -> bool:
    return (
        "attention" in type(module).__name__.lower()
        or name.rpartition(".")[2].endswith("attn")
        or bool(count_attributes(module))
    )


def _refuse_other_wide_layers(
    model: nn.Module, block: str, tiled: Sequence[str], reasons: dict[str, str], setting: str
) -> None:
    """Raise ModelError if a layer outside attention and the tiled modules has wide outputs.

    These are outputs that are at least as wide as the input of the layer.
    """
    modules = dict(model.get_submodule(block).named_modules(prefix=block))
    known = list(tiled)
    for name, module in modules.items():
        if name != block and _is_attention(name, module):
            known.append(name)

    for name, module in modules.items():
        if name in known or is_inside(name, known) or not _widens(module):
            continue
        owner = next((candidate for candidate in reasons if is_inside(name, (candidate,))), None)
        if owner is not None:
            reason = reasons[owner]
        else:
            owner = block
            reason = "the block computes it in its own forward instead of in a separate MLP module"
        class_name = type(model.get_submodule(owner)).__name__
        raise ModelError(
            f"{setting}: {name} is not computed in tiles, because of {owner} ({class_name}):"
            f" {reason}; use 0"
        )

    if not any(is_inside(name, (block,)) for name in tiled):
        raise ModelError(
            f"{setting}: no MLP was found in {block} ({type(model.get_submodule(block)).__name__});"
            " use 0"
        )


def _widens(module: nn.Module) -> bool:
    if is_linear(module) and out_features(module) >= in_features(module):
        return True
    return any(parameter.ndim > 2 for parameter in module.parameters(recurse=False))


def _refuse_hooks(model: nn.Module, name: str, setting: str) -> None:
    for inner, module in model.get_submodule(name).named_modules(prefix=name):
        if inner != name and any(hooks_of(module, kind) for kind in get_args(HookKind)):
            raise ModelError(
                f"{setting}: {inner} has a hook, which would receive a tile of the tokens; register"
                f" it on {name}, or set {setting} to 0"
            )


def _reason_against(module: nn.Module) -> str | None:
    """Return why a module cannot compute tokens in tiles, or None if it can."""
    if not takes_one_tensor(module):
        return (
            "it takes more than one tensor, or has parameters outside its children, so it cannot"
            " be tested separately"
        )
    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            narrow = _narrow_copy(module, generator)
            # The module's input has the width of one of its layers; which one is not known.
            for width in dict.fromkeys(in_features(layer) for layer in _linear_layers(narrow)):
                reason = _compare_with_single_tokens(narrow, width, generator)
                if reason != _WRONG_INPUT:
                    return reason
        except Exception as error:  # unknown code that cannot run alone proves nothing
            return f"it cannot be tested separately ({type(error).__name__}: {error})"
    return "it does not return a tensor of its input's shape"


def _compare_with_single_tokens(
    module: nn.Module, width: int, generator: torch.Generator
) -> str | None:
    """Compare the output for all tokens with the outputs for each token alone.

    Returns:
        None if they are equal, `_WRONG_INPUT` if the module does not map tokens of this width, or
        the reason why the tokens cannot be computed in tiles.
    """
    # [rows, length, width]
    x = torch.randn(_ROWS, _LENGTH, width, dtype=torch.float64, generator=generator)
    x[1] = x[0, 0]  # equal tokens reach the capacity limit of an expert, if it has one
    # A module that records something of its input would record the last tile only.
    state = BlockState(module)
    snapshot = state.save()
    try:
        expected = module(x.clone())
    except RuntimeError:
        return _WRONG_INPUT
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return _WRONG_INPUT

    state.record_changes(snapshot)
    changed = [*snapshot.tensors, *snapshot.attributes]
    if changed:
        owner, name = changed[0]
        paths = {submodule: path for path, submodule in module.named_modules()}
        return f"a call changes its {f'{paths[owner]}.{name}'.lstrip('.')}"

    rows = []
    for row in range(_ROWS):
        tokens = [
            module(x[row : row + 1, index : index + 1].clone())  # [1, 1, width]
            for index in range(_LENGTH)
        ]
        rows.append(torch.cat(tokens, 1)[0])  # [length, width]
    separate = torch.stack(rows)
    if not bool(((expected - separate).abs().max() <= 1e-9 * expected.abs().max()).item()):
        return "a token's output depends on other tokens"
    return None


def _narrow_copy(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a narrower copy of a module, in float64 on the CPU, with random parameters.

    The copy is in training mode without dropout. If the module is large, all sizes of the copy are
    divided by the same factor.
    """
    factor = _narrowing_factor(module)

    def narrow(size: int) -> int:
        return size // factor if size >= _MIN_NARROWED_SIZE else size

    memo: dict[int, object] = {id(buffer): buffer.detach().to("cpu") for buffer in module.buffers()}
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            raise TypeError(f"parameters of {parameter.dtype}")
        shape = tuple(map(narrow, parameter.shape))
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
        # Outputs stay about as large as inputs.
        if len(shape) > 1:
            values *= min(shape) ** -0.5
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)

    copied = copy.deepcopy(module, memo).train().double()
    for submodule in copied.modules():
        # Hooks of the user see the model's own calls only.
        for kind in get_args(HookKind):
            hooks_of(submodule, kind).clear()
        if isinstance(submodule, DROPOUTS):
            submodule.p = 0.0
        for name, value in list(vars(submodule).items()):
            if "drop" in name and isinstance(value, float):
                setattr(submodule, name, 0.0)
            elif name in _SIZE_ATTRIBUTES and type(value) is int:
                setattr(submodule, name, narrow(value))
    return copied


def _narrowing_factor(module: nn.Module) -> int:
    """Return the factor by which `_narrow_copy` divides all large sizes.

    It is the largest common divisor of these sizes that leaves at least 4 elements in each. It is 1
    if the module has few parameters, or no large size.
    """
    if count_parameters(module) <= _MAX_PARAMETERS:
        return 1
    large: set[int] = set()
    for parameter in module.parameters():
        large.update(size for size in parameter.shape if size >= _MIN_NARROWED_SIZE)
    if not large:
        return 1
    common = math.gcd(*large)
    factors = [factor for factor in range(1, common + 1) if common % factor == 0]
    return max(factor for factor in factors if min(large) // factor >= 4)
