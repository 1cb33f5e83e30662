"""Checks numerically whether a split of one module is correct, without a process group or knowledge
of the module's code.

A module runs alone on the CPU with random weights, once in full and once in parts, each with its
slice of the columns and of the rows. If the outputs of the parts add up to the full output at a
random point, they do so for all weights and inputs (both sides are the same formula in them), so
gradients agree as well. A module that cannot run alone is not accepted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from plait._torch.modules import own_buffers, own_parameters
from plait.model.heads import HEADS, KV_HEADS, count_attributes
from plait.model.layers import in_features, out_features, split_dims
from plait.model.rules import Style
from plait.shards import shard_length, shard_lengths

MOST_NUMBERS = 2**28
"""Parameters of a module that is tried, at most: 1 GiB of float32, and its parts once more."""
_FLOAT64_NUMBERS = 2**22
"""Up to here it is tried in float64."""


def checked_split(module: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Style] | None:
    """Styles for the children of `module` whose `layers` are linear: columns, one row-split layer,
    and whatever else has parameters.

    None if no such split is right, or none can be tried. The module's head counts, by their usual
    names, are divided with it.
    """
    if not 2 <= len(layers) <= 6 or not can_be_run(module):
        return None
    counts = [name for name in count_attributes(module) if name in (*HEADS, *KV_HEADS)]
    parts = _number_of_parts(module, counts)
    if parts is None:
        return None
    for row in reversed(list(layers)):
        columns = [leaf for leaf in layers if leaf != row]
        width = in_features(layers[columns[0]])
        if (
            any(in_features(layers[leaf]) != width for leaf in columns)
            or out_features(layers[row]) != width
        ):
            continue
        split: dict[str, Style] = {**dict.fromkeys(columns, "colwise"), row: "rowwise"}
        if _adds_up(module, split, parts, counts, width):
            # Whatever else it owns is used by every part, so its gradient is a sum over the parts.
            rest = [
                leaf
                for leaf, child in module.named_children()
                if leaf not in split and next(child.parameters(), None) is not None
            ]
            return {**split, **dict.fromkeys(rest, "replicated_with_grad_allreduce")}
    return None


def can_be_run(module: nn.Module) -> bool:
    """Whether it can run alone: see `takes_one_tensor`, and small enough."""
    return (
        takes_one_tensor(module)
        and sum(parameter.numel() for parameter in module.parameters()) <= MOST_NUMBERS
    )


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether a call asks for one argument, with all other state known, and no parameter outside of
    its children.
    """
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [
        p
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return (
        len(required) == 1
        and required[0].kind is not inspect.Parameter.KEYWORD_ONLY
        and next(module.parameters(recurse=False), None) is None
        and all(buffer.device.type != "meta" for buffer in module.buffers())
    )


def _number_of_parts(module: nn.Module, counts: Sequence[str]) -> int | None:
    """The smallest number above 1 that divides every head count; None without one."""
    values = [int(getattr(module, name)) for name in counts]
    return next(
        (
            parts
            for parts in range(2, min(values, default=2) + 1)
            if all(value % parts == 0 for value in values)
        ),
        None,
    )


def _adds_up(
    module: nn.Module, split: Mapping[str, Style], parts: int, counts: Sequence[str], width: int
) -> bool:
    size = sum(parameter.numel() for parameter in module.parameters())
    dtype, tolerance = (torch.float64, 1e-9) if size <= _FLOAT64_NUMBERS else (torch.float32, 1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole = _random_copy(module, dtype, generator)
            x = torch.randn(2, 5, width, dtype=dtype, generator=generator)
            expected = _output(whole(x.clone()))
            total = torch.zeros_like(expected)
            for part in range(parts):
                total += _output(_part(whole, split, part, parts, counts)(x.clone()))
        except Exception:  # unknown code that cannot run alone, or not in parts, proves nothing
            return False
    return bool(((total - expected).abs().max() <= tolerance * expected.abs().max()).item())


def _random_copy(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """On the CPU, in evaluation mode, with random parameters of a size that keeps outputs about as
    large as inputs.
    """
    copied = copy.deepcopy(module).eval()
    buffers = {name: buffer.detach().to("cpu") for name, buffer in copied.named_buffers()}
    made = copied.to_empty(device="cpu").to(dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        own_buffers(made.get_submodule(owner))[leaf] = (
            buffer.to(dtype) if buffer.is_floating_point() else buffer
        )
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(generator=generator)
        if parameter.ndim > 1:
            parameter.mul_(min(parameter.shape) ** -0.5)
    return made


def _part(
    whole: nn.Module, split: Mapping[str, Style], part: int, parts: int, counts: Sequence[str]
) -> nn.Module:
    """What one of `parts` ranks would compute, without the sum over ranks. The first adds the
    row-split layer's bias.
    """
    # shares the parameters
    own = copy.deepcopy(whole, {id(parameter): parameter for parameter in whole.parameters()})
    for leaf, style in split.items():
        layer = own.get_submodule(leaf)
        for name, dim in split_dims(layer, style).items():
            parameter = own_parameters(layer).get(name)
            if parameter is None:
                continue
            if dim is not None:
                piece = parameter.split(shard_lengths(parameter.shape[dim], parts), dim=dim)[part]
                own_parameters(layer)[name] = nn.Parameter(piece, requires_grad=False)
            elif part:
                own_parameters(layer)[name] = None
        for attribute in ("out_features", "nf") if style == "colwise" else ("in_features", "nx"):
            if hasattr(layer, attribute):  # for code that reads a layer's size
                setattr(layer, attribute, shard_length(int(getattr(layer, attribute)), parts, part))
    for name in counts:
        setattr(own, name, int(getattr(own, name)) // parts)
    return own


def _output(result: object) -> torch.Tensor:
    """The one tensor that a module returned. Raises ValueError where it returned more: what that
    means is unknown.
    """
    if isinstance(result, torch.Tensor):
        return result
    if (
        isinstance(result, tuple)
        and result
        and isinstance(result[0], torch.Tensor)
        and all(other is None for other in result[1:])
    ):
        return result[0]
    raise ValueError("not one tensor")
